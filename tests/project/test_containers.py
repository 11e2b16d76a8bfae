"""Containers and several hosts: what their files name exists, and their commands can be typed. Nothing is started."""

import os
import re
import shlex
import stat
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_lines import COMMANDS, problem
from documents import CommandLine
from nats_servers import BESIDE_PYTHON
from paths import ROOT

CONTAINERS, CLUSTER = ROOT / "containers", ROOT / "examples" / "cluster"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PROGRAMS = {"nats-server", "sleep", "tensorboard", "torchrun", "wget", *(path.name for path in CONTAINERS.iterdir())}
DOCKERFILE = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
OBJECTS: list[dict[str, Any]] = [
    made for name in ("nats.yaml", "training.yaml") for made in yaml.safe_load_all((CLUSTER / name).read_text())
]
PODS = {made["metadata"]["name"]: made for made in OBJECTS if "template" in made.get("spec", {})}
CONFIGS = {made["metadata"]["name"]: made["data"]["server.conf"] for made in OBJECTS if made["kind"] == "ConfigMap"}


def check(command: str | Sequence[str]) -> None:
    """A command can be typed; a script of ours may stand before it, and variables are not set."""
    parts = shlex.split(command) if isinstance(command, str) else command
    words = [re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word) for word in parts]
    words = words[{"train-host": 2, "with-keys": 1}.get(words[0], 0) :]
    assert words[0] in COMMANDS or words[0] in PROGRAMS
    assert problem(CommandLine("docker-compose.yml", 0, tuple(words), is_whole=True)) is None


@pytest.mark.parametrize("name", SERVICES)
def test_services_have_valid_commands_and_volumes(name: str) -> None:
    service = SERVICES[name]
    healthcheck = service.get("healthcheck", {"test": ["CMD"]})["test"][1:]
    for command in filter(None, (service.get("command"), healthcheck)):
        check(command)
    others = service.get("depends_on", [])
    assert set(others) <= set(SERVICES)
    for other, how in others.items() if isinstance(others, dict) else ():
        assert how["condition"] != "service_healthy" or "healthcheck" in SERVICES[other]
    sources = {volume.split(":")[0] for volume in service.get("volumes", [])}
    assert {source for source in sources if not source.startswith("./")} <= set(COMPOSE["volumes"])


@pytest.mark.parametrize("name", PODS)
def test_pods_have_valid_commands_and_volumes(name: str) -> None:
    spec = PODS[name]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    check(container["command"])
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"] for volume in pod["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", ())}
    assert set(mounts.values()) == volumes
    written = " ".join(container["command"]) + CONFIGS.get(name, "")
    for path in re.findall(r"(?<![\w/.:])/\w[\w/.]*", written):
        assert any(path.startswith(mount) for mount in mounts), path


@pytest.mark.parametrize("config", [CONFIGS["nats"], (CONTAINERS / "nats" / "server.conf").read_text()])
def test_servers_accept_their_configuration(config: str, tmp_path: Path) -> None:
    file = tmp_path / "server.conf"
    file.write_text(config)
    done = subprocess.run([BESIDE_PYTHON, "-t", "-c", file], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_dockerfile_names_existing_files_and_extras() -> None:
    def instructions(kind: str) -> list[str]:
        return re.findall(rf"^{kind} (.+)$", DOCKERFILE, re.MULTILINE)

    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [line.split()[:-1] for line in instructions("COPY") if "--from=" not in line]
    for source in (word for words in copied for word in words if not word.startswith("--")):
        assert (ROOT / source).exists(), source
        assert f"!{source.split('/')[0]}" in ignored, source
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = [several for line in instructions("RUN") for several in re.findall(r'"\.\[([\w,]+)\]"', line)]
    asked += re.findall(r"^ARG EXTRAS=(\S+)", DOCKERFILE, re.MULTILINE)
    asked += [service["build"].get("args", {}).get("EXTRAS", "") for service in SERVICES.values() if "build" in service]
    assert {name for several in filter(None, asked) for name in several.split(",")} <= set(extras)


@pytest.mark.needs("openssl")
def test_tokens_of_a_dashboard_are_private_and_kept(tmp_path: Path) -> None:
    def start() -> dict[Path, bytes]:
        command = [CONTAINERS / "with-keys", "true"]
        subprocess.run(command, env=os.environ | {"OFFLOOP_KEYS_DIR": str(tmp_path)}, check=True, timeout=60)
        return {path: path.read_bytes() for path in tmp_path.iterdir()}

    made = start()
    assert sorted(path.name for path in made) == ["certificate.pem", "tokens"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in made)
    assert start() == made


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
        assert host.communicate(timeout=100)[0].splitlines() == ["stopped", "offloop server bridge digits"]
    assert host.returncode == 7


def program(folder: Path, name: str, script: str) -> None:
    """A program of that name that does something else."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


def test_slurm_starts_a_part_of_the_training_on_each_host(tmp_path: Path) -> None:
    code = 3
    noted = f'echo "$OFFLOOP_HOST $OFFLOOP_RUNS_DIR {{}} $*" >> {tmp_path}/$OFFLOOP_HOST'
    program(tmp_path, "scontrol", "printf 'one\\ntwo\\n'")
    program(tmp_path, "srun", 'SLURM_NODEID=0 "$@" & SLURM_NODEID=1 "$@"; code=$?; wait; exit $code')
    program(tmp_path, "torchrun", f"{noted.format('torchrun')}; exit {code}")
    program(tmp_path, "offloop", noted.format("offloop"))
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "OFFLOOP_STREAM": "nats://127.0.0.1:4222",
        "SLURM_JOB_NODELIST": "one,two",
        "SLURM_JOB_ID": "1005",
        "SLURM_NNODES": "2",
    }
    script = CLUSTER / "slurm.sh"
    done = subprocess.run(["bash", script], env=environment, cwd=tmp_path, check=False, timeout=60)
    assert done.returncode == code
    for number in range(2):
        host = f"host-{number}"
        trained, copied = map(shlex.split, (tmp_path / host).read_text().splitlines())
        assert trained[:2] == copied[:2] == [host, f"{tmp_path}/runs/{host}"]
        where = ["--nnodes=2", f"--node-rank={number}", "--nproc-per-node=2", "--master-addr=one"]
        assert trained[3:7] == where
        check(trained[2:])
        assert copied[2:] == ["offloop", "server", "bridge", "digits"]
