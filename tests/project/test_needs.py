"""Slow tests are left out of 'make test', and tests that need a program on a machine without it; continuous integration
fails there."""

import os
import re
import subprocess
import sys

import pytest
from paths import ROOT

LEFT_OUT = "chromium and openssl not found: apt-get install chromium fonts-dejavu-core; apt-get install openssl"


def collect(
    *arguments: str, tests: str = "consumers/dashboard/test_access.py", only: str = "--collect-only"
) -> "subprocess.CompletedProcess[str]":
    """Collects tests, by default those of the page's access, on a machine that has no program and no GPU."""
    command = [sys.executable, "-m", "pytest", only, ROOT / "tests" / tests, *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in ("CHROMIUM", "OPENSSL")}
    nothing = {**environment, "PATH": "/nonexistent", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=nothing)


def test_tests_that_need_a_missing_program_are_left_out_with_one_line():
    done = collect()
    assert done.returncode == 0, done.stdout
    assert "test_links_with_tokens_over_tls" not in done.stdout
    assert "test_one_dashboard_after_another_in_a_process" in done.stdout
    assert "slow test" not in done.stdout
    assert done.stdout.splitlines().count(f"2 tests left out, {LEFT_OUT}") == 1


@pytest.mark.parametrize("processes", [(), ("--numprocesses", "2")], ids=["one process", "several"])
def test_slow_tests_that_are_left_out_are_counted_in_one_line(processes):
    done = collect("-m", "not slow", *processes)
    assert done.returncode == 0, done.stdout
    assert "test_links_with_tokens_over_tls" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines.count("5 slow tests left for 'make test-all'") == 1
    assert lines.count("1 test left out, openssl not found: apt-get install openssl") == 1


def test_with_all_tools_a_missing_program_is_an_error():
    done = collect("--all-tools")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    [line] = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    assert line.startswith("ERROR: not all tests can run, chromium and node and ")
    assert "apt-get install chromium fonts-dejavu-core; apt-get install nodejs npm; " in line


def test_gpu_tests_are_left_out_with_one_line():
    done = collect(tests="gpu")
    assert done.returncode == 0, done.stdout
    assert "[cpu]" in done.stdout
    assert "gpu]" not in done.stdout.replace("[cpu", "")
    [line] = [line for line in done.stdout.splitlines() if "left for" in line]
    assert re.fullmatch(r"\d+ gpu tests left for 'make gpu', on a machine with a GPU", line)


def test_gpu_tests_can_be_looked_at_without_a_gpu():
    done = collect("-m", "gpu", tests="gpu")
    assert done.returncode == 0, done.stdout
    assert "test_a_loop_that_replays_a_cuda_graph_publishes_each_loss" in done.stdout
    assert "[cpu" not in done.stdout


def test_without_a_gpu_its_tests_are_refused_at_once_in_one_line():
    done = collect("-m", "gpu", tests="gpu", only="-v")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    [line] = [line for line in done.stderr.splitlines() if line.strip()]
    assert line.startswith("ERROR: no GPU to test on (device 'gpu' is not there: torch finds no CUDA device; ")
    assert line.endswith(": on a machine that has one, make gpu GPU_PYTHON=PATH with a Python whose torch has CUDA")
