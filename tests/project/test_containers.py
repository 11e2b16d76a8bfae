"""The files for containers: what they name exists, and the services' commands can be typed. No engine is needed."""

import os
import re
import shlex
import stat
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_lines import COMMANDS, problem
from documents import CommandLine
from paths import ROOT

CONTAINERS = ROOT / "containers"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROGRAMS = {"", "nats-server", "sleep", "tensorboard", "wget", *(path.name for path in CONTAINERS.iterdir())}
DOCKERFILE = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(kind: str) -> list[str]:
    """What stands in the Dockerfile behind each instruction of a kind."""
    return re.findall(rf"^{kind} (.+)$", DOCKERFILE, re.MULTILINE)


def stages() -> dict[str, str]:
    return {name: base for base, name in (line.split(" AS ") for line in instructions("FROM"))}


def words(command: str | Sequence[str]) -> list[str]:
    return shlex.split(command) if isinstance(command, str) else list(command)


def interpolated(command: str | Sequence[str]) -> list[str]:
    """A command in the parts that Compose gives it, where no variable is set."""
    return [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in words(command)]


def typed(command: str | Sequence[str]) -> list[str]:
    """What a service runs in the end: a script of ours may stand before it."""
    parts = interpolated(command)
    return parts[{"train-host": 2, "with-keys": 1}.get(parts[0], 0) :]


def listening(service: Mapping[str, Any]) -> str:
    """Where a service's ports are named."""
    configured = [ROOT / source for source in mounts(service).values() if source.startswith("./")]
    texts = [*words(service.get("command", "")), *service.get("ports", [])]
    return " ".join([*texts, *(path.read_text() for path in configured if path.is_file())])


def mounts(service: Mapping[str, Any]) -> dict[str, str]:
    """What is mounted where in a service: folder to volume."""
    return {target: source for source, target, *_ in (volume.split(":") for volume in service.get("volumes", []))}


@pytest.mark.parametrize("name", SERVICES)
def test_services_have_valid_commands_and_addresses(name: str) -> None:
    service = SERVICES[name]
    check = service.get("healthcheck", {"test": ["CMD"]})["test"]
    for command in (service.get("command"), check[1:]):
        program, *arguments = typed(command) if command else [""]
        assert program in COMMANDS or program in PROGRAMS or program == "torchrun"
        assert problem(CommandLine("docker-compose.yml", 0, (program, *arguments), is_whole=True)) is None
        given = [*arguments, *service.get("environment", {}).values()]
        for host, port in re.findall(r"//([\w-]+):(\d+)", " ".join(given)):
            assert port in listening(SERVICES[name if host == "localhost" else host])
    assert all(port.rpartition(":")[2] in " ".join(check) for port in service.get("ports", []))
    others = service.get("depends_on", [])
    assert set(others) <= set(SERVICES)
    for other, how in others.items() if isinstance(others, dict) else ():
        assert how["condition"] != "service_healthy" or "healthcheck" in SERVICES[other]
    assert {source for source in mounts(service).values() if not source.startswith("./")} <= set(COMPOSE["volumes"])


def make_keys(folder: Path) -> dict[Path, bytes]:
    """Starts a dashboard that ends at once; returns the files that it has."""
    command = [CONTAINERS / "with-keys", "true"]
    subprocess.run(command, env=os.environ | {"OFFLOOP_KEYS_DIR": str(folder)}, check=True, timeout=60)
    return {path: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.needs("openssl")
def test_tokens_of_a_dashboard_are_private_and_kept(tmp_path: Path) -> None:
    made = make_keys(tmp_path)
    assert sorted(path.name for path in made) == ["certificate.pem", "tokens"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in made)
    assert make_keys(tmp_path) == made


def test_the_dockerfile_names_existing_files_and_extras() -> None:
    names, extras = stages(), PROJECT["optional-dependencies"]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    for line in instructions("COPY"):
        *sources, _target = [word for word in line.split() if not word.startswith("--")]
        if stage := re.search(r"--from=(\S+)", line):
            assert stage[1] in names
            continue
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source.split('/')[0]}" in ignored, source
    for line in instructions("RUN"):
        for stage in re.findall(r"from=([\w-]+)", line):
            assert stage in names
        for several in re.findall(r'"\.\[([\w,]+)\]"', line):
            assert set(several.split(",")) <= set(extras)
    given = [service["build"].get("args", {}) for service in SERVICES.values() if "build" in service]
    (default,) = re.findall(r"^ARG EXTRAS=(\S+)", DOCKERFILE, re.MULTILINE)
    for asked in (default, *(args["EXTRAS"] for args in given if "EXTRAS" in args)):
        assert set(asked.split(",")) <= set(extras), asked


def test_a_host_s_run_is_copied_after_its_training_and_signals_reach_the_training(tmp_path: Path) -> None:
    offloop = tmp_path / "offloop"
    offloop.write_text('#!/bin/sh\necho "offloop $*"\n')
    offloop.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    training = "trap 'echo stopped; exit 7' TERM; echo ready; while :; do sleep 0.02; done"
    command = [CONTAINERS / "train-host", "digits", "sh", "-c", training]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == "ready\n"
        host.terminate()
        assert host.communicate(timeout=30)[0].splitlines() == ["stopped", "offloop server bridge digits"]
    assert host.returncode == 7
