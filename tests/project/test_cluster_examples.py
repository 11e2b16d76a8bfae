"""The examples for several hosts: what they name exists, and what they run can be typed. No cluster is needed."""

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_lines import problem
from documents import CommandLine
from nats_servers import BESIDE_PYTHON
from paths import ROOT

FOLDER = ROOT / "examples" / "cluster"
OBJECTS: list[dict[str, Any]] = [
    made for name in ("nats.yaml", "training.yaml") for made in yaml.safe_load_all((FOLDER / name).read_text())
]
WITH_PODS = {made["metadata"]["name"]: made for made in OBJECTS if "template" in made.get("spec", {})}
SERVICES = {made["metadata"]["name"]: made for made in OBJECTS if made["kind"] == "Service"}
CONFIGS = {made["metadata"]["name"]: made["data"]["server.conf"] for made in OBJECTS if made["kind"] == "ConfigMap"}


def check(words: Sequence[str]) -> None:
    """A command of ours exists as it stands."""
    assert problem(CommandLine("docs/cluster.md", 0, tuple(words), is_whole=True)) is None


@pytest.mark.parametrize("name", WITH_PODS)
def test_a_pod_has_valid_commands_and_volumes(name: str) -> None:
    made = WITH_PODS[name]
    pod = made["spec"]["template"]["spec"]
    labels = made["spec"]["template"]["metadata"]["labels"]
    assert pod["securityContext"]["runAsNonRoot"]
    (container,) = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    command = container["command"]
    check(command[2:] if command[0] == "train-host" else command)
    probes = [probe["exec"]["command"] for key, probe in container.items() if key.endswith("Probe")]
    assert {probe[0] for probe in probes} <= {"answers", "wget"}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"] for volume in pod["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in made["spec"].get("volumeClaimTemplates", ())}
    assert set(mounts.values()) == volumes
    written = " ".join(command) + CONFIGS.get(name, "")
    for path in re.findall(r"(?<![\w/.:])/\w[\w/.]*", written):
        assert any(path.startswith(mount) for mount in mounts), path
    given = {entry["name"]: entry.get("value", "") for entry in container.get("env", ())}
    for pod_name, service, port in re.findall(r"//([\w-]+)-\d\.([\w-]+):(\d+)", " ".join([written, *given.values()])):
        assert pod_name == service in SERVICES
        assert int(port) in [one["port"] for one in SERVICES[service]["spec"]["ports"]]
        assert name == service or labels["offloop"] == "yes", "the network policy lets nobody else in"
    for service in (pod.get("subdomain"), made["spec"].get("serviceName")):
        assert service is None or SERVICES[service]["spec"]["selector"].items() <= labels.items()


@pytest.mark.parametrize("config", [CONFIGS["nats"], (ROOT / "containers" / "nats" / "server.conf").read_text()])
def test_servers_accept_their_configuration(config: str, tmp_path: Path) -> None:
    file = tmp_path / "server.conf"
    file.write_text(config)
    done = subprocess.run([BESIDE_PYTHON, "-t", "-c", file], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


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
    script = FOLDER / "slurm.sh"
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
