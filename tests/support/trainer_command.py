"""The command ``trainer`` in the test's own process, with a small task of the user's own."""

import subprocess
import sys
from pathlib import Path

import pytest
from commands import Run, command
from paths import SUPPORT

from offloop.trainer.cli.main import main

SMALL = ["fruit:small", "--batch-size=6", "--slope=0.5", "--gentle"]
"""The task ``small`` with everything that it asks for."""

WITHOUT_TORCH = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "torchmetrics", "cloudpickle"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""
MODULE = '''
import sys
sys.path.insert(0, {tests!r})
from gold import GoldMLP, gold_loader, gold_optimizer

def small(*, batch_size: int, slope: float = 0.1, gentle: bool = False, note: str = "none", seed: int = 0):
    """Sort apples from pears.

    It is quick.

    batch_size: fruits in a batch,
        at least one.
    note: what to write down.
    """
    assert (batch_size, slope, gentle, note) == (6, 0.5, True, "none"), (batch_size, slope, gentle, note)
    print("seed", seed)
    model = GoldMLP()
    return {{
        "model": model,
        "train_dataloader": gold_loader("train", 24, batch_size),
        "optimizers": gold_optimizer(model),
        "max_duration": "9ep",
    }}

def wrong():
    return {{"modle": 1}}

def empty():
    return {{}}

def nothing():
    """Returns nothing."""

def needs_sklearn():
    raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")

value = 3
'''


def command_in(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process, in a folder with a module ``fruit`` of tasks."""
    (folder / "fruit.py").write_text(MODULE.format(tests=str(SUPPORT)))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))

    return command("trainer", main, monkeypatch, capsys)


def without_torch(code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code on a machine that has no torch."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + code], capture_output=True, text=True, timeout=100, check=False
    )
