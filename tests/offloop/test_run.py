"""``offloop run``: scripts of other frameworks, without a line of ours in them."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import wait_for

from offloop.automatic import VARIABLE
from offloop.bus import Event, Recording, find_run

OFFLOOP = [sys.executable, "-m", "offloop", "run"]

TRANSFORMERS = """
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 50, (16, 8))]
sizes = {"n_layer": 1, "n_head": 1, "n_embd": 16, "vocab_size": 50, "n_positions": 8}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))
arguments = TrainingArguments(
    "out", max_steps=int(sys.argv[1]), report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
)
trainer = Trainer(model, arguments, train_dataset=rows)
if "attach" in sys.argv:
    from offloop.transformers import OffloopCallback

    trainer.add_callback(OffloopCallback(trainer, run_name="own"))
trainer.train()
print("trained", flush=True)
sys.exit(3)
"""
LIGHTNING = """
import logging

import lightning.pytorch
import pytorch_lightning
import torch

from offloop.lightning import OffloopCallback

own = [OffloopCallback(run_name="own")]
for pl, callbacks in ((lightning.pytorch, []), (pytorch_lightning, []), (lightning.pytorch, own)):
    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    quiet |= {"max_epochs": 1, "enable_model_summary": False}
    pl.Trainer(**quiet, callbacks=callbacks).fit(Module(), torch.utils.data.DataLoader(torch.ones(3, 2)))
"""
CALLBACK = """
from offloop.consumers import Callback


class Counter(Callback):
    count = 0

    def batch_end(self, state, logger):
        self.count += 1

    def fit_end(self, state, logger):
        print("counted", self.count, flush=True)
"""


def offloop(folder: Path, *arguments: str, path: str = "") -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [*OFFLOOP, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def batches_in(run: str, attempt: int = 1) -> int:
    recorded = Recording(find_run(run).path, attempt)
    return sum(snapshot.event is Event.BATCH_END for snapshot in recorded)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, runs_dir: Path) -> Iterator[Path]:
    for name, text in {"hf.py": TRANSFORMERS, "pl.py": LIGHTNING, "counter.py": CALLBACK}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.slow
def test_a_script_of_transformers_is_attached_in_a_process_that_it_starts(folder: Path) -> None:
    (folder / "launch.py").write_text(
        "import subprocess, sys; sys.exit(subprocess.call([sys.executable, 'hf.py', '4']))"
    )
    (folder / "mine").mkdir()
    (folder / "mine" / "sitecustomize.py").write_text("import sys; print('my own', file=sys.stderr)")
    chosen = ["--run-name", "r", "--callbacks", "counter.py:Counter", "--log", "jsonl"]
    done = offloop(folder, *chosen, "--", sys.executable, "launch.py", path=str(folder / "mine"))
    assert done.returncode == 3, done.stderr
    assert "train_runtime" in (find_run("r").path / "console-1-0.log").read_text()
    assert "my own\n" in done.stderr
    assert "trained\n" in done.stdout
    assert "counted 4\n" in done.stdout
    assert "attached to nothing" not in done.stderr
    assert batches_in("r") == 4
    assert find_run("r").status == "finished"
    assert find_run("r").last.info["framework"]["name"] == "Transformers"


@pytest.mark.slow
def test_both_namespaces_of_lightning_are_attached_once(folder: Path, runs_dir: Path) -> None:
    done = offloop(folder, "--run-name", "r", "-c", "counter.py:Counter", "--", sys.executable, "pl.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("counted 3\n") == 2
    for name in ("r", "r-2", "own"):
        assert [one.info["framework"]["name"] for one in find_run(name).attempts] == ["Lightning"]
        assert batches_in(name) == 3


@pytest.mark.slow
def test_a_script_that_attaches_itself_is_attached_once_and_ctrl_c_ends_its_run_in_order(
    folder: Path, runs_dir: Path
) -> None:
    command = [*OFFLOOP, "--run-name", "r", "-c", "counter.py:Counter", "--", sys.executable, "hf.py", "100000"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        [*command, "attach"], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_for(lambda: (runs_dir / "own" / "run.json").exists() and find_run("own").live, "the run")
        wait_for(lambda: batches_in("own") > 0, "a batch")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGINT
    assert find_run("own").status == "stopped"
    assert "trained" not in out
    assert [path.name for path in runs_dir.glob("[!.]*") if path.is_dir()] == ["own"]


WAITING = """
import signal, sys, time

def end(number, frame):
    print("got", number, flush=True)
    count.append(number)

count = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, end)
print("ready", flush=True)
while not count:
    time.sleep(0.01)
time.sleep(0.3)
sys.exit(len(count))
"""


def test_a_signal_reaches_the_script(folder: Path) -> None:
    command = [*OFFLOOP, "-c", "", "--", sys.executable, "-c", WAITING]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=100)
    assert (out, process.returncode) == (f"got {int(signal.SIGTERM)}\n", 1)


def test_ctrl_c_in_a_terminal_reaches_the_script_once(folder: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execv(sys.executable, [*OFFLOOP, "-c", "", "--", sys.executable, "-c", WAITING])
    shown = b""
    while b"ready" not in shown:
        shown += os.read(terminal, 1024)
    os.write(terminal, b"\x03")
    while b"got 2" not in shown:
        shown += os.read(terminal, 1024)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("hf.py", "4"), 1, "write 'offloop run -- python hf.py 4'"),
        (("-c", "spede", "--", "touch", "started"), 1, "did you mean speed?"),
        (("--run-name", "a/b", "--", "touch", "started"), 1, "a/b"),
        (("--", "sh", "-c", "kill -9 $$"), 128 + signal.SIGKILL, "PYTHONPATH"),
    ],
)
def test_what_cannot_be_attached_is_said_in_one_line(
    folder: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = offloop(folder, *arguments)
    assert done.returncode == code
    assert message in done.stderr.splitlines()[-1]
    assert not (folder / "started").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import json", "Transformers'; 'Attach' in the documentation shows the line for other loops"),
        ("import transformers.trainer", "Transformers was loaded, but no training has begun"),
        ("import sys; sys.modules['offloop'] = None; import transformers.trainer", "it is not installed for"),
        ("from transformers.trainer import Trainer; Trainer()", "offloop is not attached, the script continues"),
    ],
)
def test_a_framework_without_a_training_or_without_offloop_is_told_from_none(
    folder: Path, script: str, message: str
) -> None:
    (folder / "transformers").mkdir()
    (folder / "transformers" / "__init__.py").write_text("__version__ = '0'")
    (folder / "transformers" / "trainer.py").write_text("class Trainer: pass")
    done = offloop(folder, "--", sys.executable, "-c", f"{script}; print('done')")
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert message in done.stderr
    assert "offloop attached to nothing: " in done.stderr


def test_what_is_left_of_it_is_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    script = f"import json, os; print(json.loads(os.environ['{VARIABLE}'])['folder'])"
    done = offloop(folder, "--", sys.executable, "-c", script)
    assert Path(done.stdout.strip()).parent == folder / "tmp"
    assert list((folder / "tmp").iterdir()) == []
