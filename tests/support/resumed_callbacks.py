"""A training whose callbacks keep state across attempts."""

from pathlib import Path
from typing import Any

from counting import Counter, SlowCounter, never
from gold import gold_loader
from training import gold_trainer

from offloop.consumers import EarlyStopper, JsonlLogger
from offloop.trainer import Evaluator, Trainer


def make(folder: Path, run_name: str, **arguments: Any) -> Trainer:
    """A training that its stopper ends with epoch 4, exactly: 16 batches, the last evaluation included."""
    settings: dict[str, Any] = {
        "max_duration": "8ep",
        "eval_dataloader": Evaluator("eval", gold_loader("eval_a", 12, 5)),
        "save_folder": folder / run_name,
        "save_interval": "3ba",
        "autoresume": True,
        "run_name": run_name,
        "publish": True,
        "callbacks": [Counter(), SlowCounter(), EarlyStopper("CrossEntropy", "eval", comp=never, patience=2)],
        "loggers": [JsonlLogger()],
        "wait_for": "callbacks",
    }
    return gold_trainer(**(settings | arguments))
