"""Lines of offloop on a terminal where a training draws a progress bar: both stay whole."""

import sys
from pathlib import Path

import pytest
from terminals import Terminal

# Each step waits until the callbacks are there: the bar is to be at work meanwhile.
STEP = """
import os, time

def step():
    time.sleep(0.02)
    while not os.path.exists("begun"):
        time.sleep(0.01)
"""
LIGHTNING = """
import lightning.pytorch as pl
import torch

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        step()
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

data = torch.utils.data.DataLoader(torch.ones(60, 2))
quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "accelerator": "cpu"}
pl.Trainer(**quiet, max_epochs=1, callbacks=[pl.callbacks.RichProgressBar()]).fit(Module(), data)
"""
TQDM = """
import torch
from tqdm import tqdm
from offloop import watch

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = watch(model, optimizer, callbacks=["lr", "rows.py:Rows"])
for batch in run.batches(tqdm(range(60))):
    step()
    optimizer.step()
"""
ROWS = """
from offloop.consumers import Callback

class Rows(Callback):
    def fit_start(self, state, logger):
        open("begun", "w").close()

    def batch_end(self, state, logger):
        print("batch", end=" ")
        print(int(state.timestamp.batch), "done")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "command"),
    [(TQDM, ()), (LIGHTNING, ("-m", "offloop", "run", "-c", "lr,rows.py:Rows", "--", sys.executable))],
    ids=["tqdm", "Lightning with rich"],
)
def test_lines_of_callbacks_and_the_bar_of_the_training_are_whole(
    script: str, command: tuple[str, ...], runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(STEP + script)
    (tmp_path / "rows.py").write_text(ROWS)
    monkeypatch.chdir(tmp_path)
    terminal = Terminal(sys.executable, *command, "train.py", columns=120, lines=150)
    terminal.wait_for("batch 60 done", timeout=200)
    terminal.wait_for_end()
    lines = [line.rstrip() for line in terminal.text.splitlines()]
    rows = [line for line in lines if "batch" in line and "done" in line]
    assert rows == [f"batch {number} done" for number in range(1, 61)]
    steps = [line for line in lines if "step" in line and "  lr" in line]
    assert len(steps) > 1
    assert all(line.startswith("step ") for line in steps)
    assert [line for line in lines if line.startswith("run ") and "recording to" in line]
    bars = [line for line in lines if "60/60" in line and "it/s" in line]
    assert bars
    assert not [line for line in bars if "step" in line or "batch" in line]


SAYING = """
import logging, sys, time
from offloop.bus.printing import AboveLastLine, say, share_terminal

share_terminal()
if sys.argv[1] == "tqdm":
    from tqdm import tqdm
    bar = tqdm(range(5), desc="bar", position=0), tqdm(range(5), desc="inner", position=1)
else:
    print("\\n" * int(sys.argv[2]) + "begun", end="", flush=True)
other = AboveLastLine(sys.stdout)
say("one", err=True)
other.write("two")
say("long " + 90 * "x" + " end", err=True)
print(file=other)
logging.getLogger("offloop").warning("three %s", 3)
logging.getLogger("offloop").info("too low")
other.write("four")
other.close()
if sys.argv[1] == "tqdm":
    bar[1].close(), bar[0].close()
else:
    print(" ended")
"""


@pytest.mark.parametrize("what", [("tqdm",), ("line", "20")], ids=" ".join)
def test_lines_come_above_the_last_one_wherever_that_is(what: tuple[str, ...]) -> None:
    terminal = Terminal(sys.executable, "-c", SAYING, *what, columns=60, lines=16)
    assert terminal.wait_for_end() == 0
    lines = [line.rstrip() for line in terminal.text.splitlines() if line.strip()]
    long = ["long " + 55 * "x", 35 * "x" + " end"]
    bar = [one for one in lines if one.startswith(("bar:", "inner:"))]
    assert [one for one in lines if one not in bar] == [
        *("one", *long, "two", "three 3", "four"),
        *(["begun ended"] if what[0] == "line" else []),
    ]
    assert (what[0] == "tqdm") == bool(bar)
