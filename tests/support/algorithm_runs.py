"""Short trainings that algorithms are applied in, and what they leave behind."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from training import Act

from offloop.bus.types.event import Event
from offloop.trainer import Algorithm, AlgorithmLogger, Classifier, State, Trainer


class Image(Classifier):
    """Scores for 3 classes from images of any size with 2 channels."""

    def __init__(self, **arguments: Any) -> None:
        layers = nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3)
        super().__init__(nn.Sequential(*layers), **arguments)


def row_batches(count: int = 4, rows: int = 6) -> list[tuple[Tensor, Tensor]]:
    """Batches of rows with 8 numbers each, of 4 classes."""
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(rows, 8, generator=generator), torch.randint(4, (rows,), generator=generator))
        for _ in range(count)
    ]


def image_batches(count: int = 4, rows: int = 6, height: int = 8, width: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Batches of images with 2 channels, without a zero in them, of 3 classes."""
    generator = torch.Generator().manual_seed(6)
    return [
        (
            torch.rand(rows, 2, height, width, generator=generator) + 0.5,
            torch.randint(3, (rows,), generator=generator),
        )
        for _ in range(count)
    ]


def train(
    batches: Any,
    algorithms: Algorithm | list[Algorithm],
    make_model: Callable[[], nn.Module] = lambda: Classifier(nn.Linear(8, 4)),
    **settings: Any,
) -> State:
    """Trains, on each batch once unless ``max_duration`` says otherwise, and returns the state at the end."""
    torch.manual_seed(3)
    model = make_model()
    if "max_duration" not in settings:
        settings["max_duration"] = f"{len(batches)}ba"
    arguments = {"seed": 11, "device": "cpu"} | settings
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Trainer(
        model, batches, optimizers=optimizer, algorithms=algorithms, publish=False, progress_bar=False, **arguments
    ) as trainer:
        trainer.fit()
    return trainer.state


def note(notes: list[Any], look: Callable[[State], Any], *events: Event) -> Act:
    """Note what a look at the state gives, at each of the events."""

    def add(event: Event, state: State, logger: AlgorithmLogger) -> None:
        notes.append(look(state))

    return Act(add, *events)


def seen_batches(algorithm: Algorithm, batches: Any, make_model: Any = Image, **settings: Any) -> list[Any]:
    """Return the batches as they are trained on."""
    notes: list[Any] = []
    train(batches, [algorithm, note(notes, lambda state: state.batch, Event.BEFORE_FORWARD)], make_model, **settings)
    return notes
