"""Slow tests are left out of 'make test', and tests that need a program on a machine without it; continuous integration
fails there."""

import os
import subprocess
import sys

import pytest
from paths import ROOT

LEFT_OUT = "chromium and openssl not found: apt-get install chromium fonts-dejavu-core; apt-get install openssl"


def collect(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Collects the tests of the page's access on a machine that has no program at all."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        ROOT / "tests" / "consumers" / "dashboard" / "test_access.py",
        *arguments,
    ]
    environment = {name: value for name, value in os.environ.items() if name not in ("CHROMIUM", "OPENSSL")}
    nothing = {**environment, "PATH": "/nonexistent"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=nothing)


def test_tests_that_need_a_missing_program_are_left_out_with_one_line():
    done = collect()
    assert done.returncode == 0, done.stdout
    assert "test_links_with_tokens_over_tls" not in done.stdout
    assert "test_one_dashboard_after_another_in_a_process" in done.stdout
    assert "slow test" not in done.stdout
    assert done.stdout.splitlines().count(f"3 tests left out, {LEFT_OUT}") == 1


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
