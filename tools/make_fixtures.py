"""Writes a run and a checkpoint of this version to ``tests/data/versions/VERSION/``: ``python tools/make_fixtures.py``.

Made once for each release, and never again: every later version must read them."""

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path

import torch

import offloop
from offloop.bus import BASE_EVENTS, Event
from offloop.bus.runs.directory import find_run
from offloop.trainer import Trainer

VERSIONS = Path(__file__).parents[1] / "tests" / "data" / "versions"
BATCHES = 8


class Line(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 1)

    def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return super().forward(batch[0])

    def loss(self, outputs: torch.Tensor, batch: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(outputs, batch[1])


class Samples(offloop.Algorithm):
    """Logs a table, an event and a span in each batch."""

    def match(self, event: Event, state: object) -> bool:
        return event is Event.BATCH_START

    def apply(self, event: Event, state: object, logger: object) -> None:
        picture = offloop.Image(b"GIF89a\x01\x00\x01\x00\x00\x00\x00;")
        logger.log_table("samples", [["2 + 2 =", 4.0, [1, 2], picture]], columns=["prompt", "score", "tokens", "image"])
        with logger.span("generate", tokens=2):
            logger.event("rollout_end", reward=0.5)


def write(folder: Path) -> None:
    torch.manual_seed(1)
    model = Line()
    data = [[torch.full((4, 2), float(number)), torch.full((4, 1), float(number))] for number in range(BATCHES)]
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):  # not within a repository
        with Trainer(
            model,
            data,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
            max_duration="1ep",
            algorithms=[Samples()],
            record=BASE_EVENTS | {Event("@*")},
            run_name="run",
            save_folder="checkpoints",
            config={"lr": 0.01},
            seed=1,
        ) as trainer:
            trainer.fit()
        shutil.copytree(find_run("run").path, folder / "run")
        (checkpoint,) = Path("checkpoints").rglob("ep1*.safetensors")
        shutil.copy(checkpoint, folder / "checkpoint.safetensors")


if __name__ == "__main__":
    target = VERSIONS / offloop.__version__
    if target.exists():
        sys.exit(f"{target} exists: fixtures of a version are made once")
    target.mkdir(parents=True)
    write(target)
    print(*sorted(path.relative_to(target) for path in target.rglob("*")), sep="\n")
