"""What tests of destinations share: a callback that logs what its events say, and consumers that are killed."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers import Callback, Logger, LoggerDestination


class LogsWhatItSees(Callback):
    """Logs what a snapshot has in its fields ``rows`` (a list of step and metrics), ``hyperparameters``, and
    ``images``, ``table``, ``text`` (arguments of the logger's methods)."""

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        fields = state.fields
        for step, metrics in fields.get("rows", []):
            logger.log_metrics(metrics, step)
        if "hyperparameters" in fields:
            logger.log_hyperparameters(fields["hyperparameters"])
        if "images" in fields:
            logger.log_images(**fields["images"])
        if "table" in fields:
            logger.log_table(**fields["table"])
        if "text" in fields:
            logger.log_text(**fields["text"])


class Everything(Callback):
    """Logs one of each kind."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def fit_start(self, state: Snapshot, logger: Logger) -> None:
        logger.log_hyperparameters({"seed": 17, "model": {"depth": 2}})

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        batch = state.timestamp.values[2]
        logger.log_metrics({"loss": state.loss, "loss/train[0]": state.loss, "good": True, "note": f"batch {batch}"})
        if batch == 2:
            image, masks = np.full((2, 2, 3), 80, np.uint8), {"truth": np.array([[[0, 1], [2, 0]]])}
            logger.log_images([image], "seen", True, masks=masks, mask_class_labels={1: "cat"}, use_table=False)
            logger.log_images([image], "tabled", True)
            logger.log_table(["a", "b"], [[1, "x"], [None, 0.5]], "numbers")
            logger.log_histogram([3, 1], [-1.0, 0.0, 2.0], "spread")
            logger.log_text("all is well", "note at 2")
            logger.upload_file("checkpoints/model.pt", self._file)


class Photographer(LoggerDestination):
    """Copies the directory whenever it is asked for anything: each copy is what ``kill -9`` at that moment leaves."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory
        self.copies: list[Path] = []

    def shoot(self) -> None:
        if self.directory is not None:
            self.copies.append(self.directory.with_name(f"copy-{len(self.copies)}"))
            shutil.copytree(self.directory, self.copies[-1])

    def log_rows(self, rows: Any, state: Snapshot) -> None:
        self.shoot()

    def state_dict(self) -> dict[str, Any]:
        self.shoot()
        return {}

    def close(self) -> None:
        self.shoot()


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below the directory, by its path there."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
