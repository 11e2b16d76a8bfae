"""A training with Keras on several ranks, for ``run_two_ranks``."""

import json
import os
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch.distributed as dist
from attached_runs import RUN, Sender

from offloop.keras import OffloopCallback


class Count(keras.callbacks.Callback):
    """Counts batches, and has commands come to the first rank."""

    def __init__(self, sender: Sender | None) -> None:
        super().__init__()
        self.count, self.sender = 0, sender

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1
        if self.sender is not None:
            self.sender.step(self.count)


def main(folder: Path) -> None:
    rank = os.environ["RANK"]
    dist.init_process_group("gloo")
    commands = (("pause",), ("checkpoint",), ("set", "eval", "now"), ("resume",), ("stop",))
    count, saved = Count(Sender(*commands) if rank == "0" else None), []
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse")
    watching = OffloopCallback(run_name=RUN, save_folder=folder / "saved")
    save = watching._save

    def note() -> None:
        saved.append(watching._training.state.timestamp.values.batch)
        save()

    watching._save = note
    rows = np.ones((16, 8)), np.ones((16, 1))
    model.fit(*rows, batch_size=4, epochs=2000, verbose=0, callbacks=[count, watching])
    errors = count.sender and [one.error for one in count.sender.outcomes]
    (folder / f"rank-{rank}.json").write_text(json.dumps([count.count, saved, errors]))
    dist.destroy_process_group()
