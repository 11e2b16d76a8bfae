"""A training of two ranks that hangs: which rank waits, which one is elsewhere, and where."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from brokers import free_address
from helpers import wait_for

from offloop.bus import find_run
from offloop.bus.runs.alerts import read_alerts
from offloop.bus.subscriber.commands import send_command

SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
import offloop

def rows(rank):
    for number in range(1000):
        if number == 20 and rank:
            print("hangs", flush=True)
            time.sleep(1000)  # as a dataloader that waits for a disk
        yield torch.randn(2, 4)

def train_step(batch):
    model(batch).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = offloop.watch(model, optimizer, run_name="r", runs_dir=sys.argv[1])
for batch in run.batches(rows(dist.get_rank())):
    train_step(batch)
"""
VERDICT = "rank 0 waits in all_reduce (train.py:17 in train_step); rank 1 is in rows (train.py:11)"


@pytest.fixture
def hanging(tmp_path: Path, runs_dir: Path) -> Iterator[list["subprocess.Popen[str]"]]:
    (tmp_path / "train.py").write_text(SCRIPT)
    os.mkfifo(tmp_path / "pipe1.pipe")
    started = []
    port = free_address().rpartition(":")[2]
    for rank in ("0", "1"):
        environment: dict[str, Any] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        environment |= {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
        environment |= {
            "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/nccl",
            "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/pipe",
        }
        command = [sys.executable, tmp_path / "train.py", runs_dir]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment))
    assert started[1].stdout is not None
    assert started[1].stdout.readline() == "hangs\n"
    yield started
    for process in started:
        process.kill()
        process.communicate()


def ask() -> str:
    return str(send_command(find_run("r"), "stacks"))


def test_a_hang_is_explained_by_an_alert_and_on_request(hanging: Any, runs_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "offloop.consumers", "--run", "r", "--callbacks", "stall", "-o", "stall.factor=1"]
    with subprocess.Popen([*command, "-o", "stall.min_seconds=2"], stderr=subprocess.DEVNULL) as consumer:
        [alert] = wait_for(lambda: read_alerts(runs_dir / "r"), "the alert")
        consumer.send_signal(signal.SIGINT)
    assert alert.text.endswith(f"; stacks-1-1.txt: {VERDICT}")
    assert "the training hangs after batch " in alert.text
    # In place of NCCL, which listens on a GPU.
    with open(os.open(tmp_path / "pipe1.pipe", os.O_RDONLY | os.O_NONBLOCK), "rb") as pipe:
        (tmp_path / "nccl0").touch()
        said = ask()
        assert pipe.read() == b"1"
    files = f"{tmp_path}/nccl0, {tmp_path}/nccl1"
    assert said == f"'stacks' wrote stacks-1-2.txt: {VERDICT}; NCCL records of torch: {files}"
    first, second = hanging
    first.send_signal(signal.SIGSTOP)
    second.kill()
    said = ask()
    assert "rank 0 does not answer within 3 s: it is stopped" in said
    assert "rank 1 has " in said
    wait_for(lambda: "rank 1 has ended" in ask(), "the broker to notice")
