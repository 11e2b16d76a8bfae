"""What callbacks log beside metrics, and how it is handed to the destinations."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from consumers_stream import Collector, batch_end

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers import Logger
from offloop.consumers.api.images import as_bytes
from offloop.consumers.api.logger import Images, RunContext, Table, Text, Upload
from offloop.consumers.delivery.fanout import Fanout


def logger_at(batch: int) -> Logger:
    logger = Logger()
    logger.begin(batch_end(batch))
    return logger


def logged_images(images: Any, **arguments: Any) -> Images:
    logger = logger_at(3)
    logger.log_images(images, **arguments)
    others = logger.take_non_metrics(batch_end(3))
    assert others is not None
    (entry,) = others.entries
    assert isinstance(entry, Images)
    return entry


def shapes(images: Any, **arguments: Any) -> list[tuple[int, ...]]:
    return [image.shape for image in logged_images(images, **arguments).images]


def test_images_of_every_form_become_height_width_and_channels() -> None:
    assert shapes(np.zeros((4, 6))) == [(4, 6, 1)]
    assert shapes(torch.zeros(3, 4, 6)) == [(4, 6, 3)]
    assert shapes(torch.zeros(4, 6, 3), channels_last=True) == [(4, 6, 3)]
    assert shapes(torch.zeros(2, 1, 4, 6)) == [(4, 6, 1)] * 2
    assert shapes(np.zeros((2, 4, 6, 4)), channels_last=True) == [(4, 6, 4)] * 2
    assert shapes([torch.zeros(4, 6), np.zeros((3, 5, 5))]) == [(4, 6, 1), (5, 5, 3)]


@pytest.mark.parametrize(
    ("images", "channels_last"),
    [
        (torch.zeros(32), False),
        (torch.zeros(3, 8, 8), True),
        (np.array([[256]]), False),
    ],
)
def test_invalid_images_are_refused(images: Any, channels_last: bool) -> None:
    with pytest.raises(ConfigurationError, match="'Images'"):
        logger_at(1).log_images(images, channels_last=channels_last)


def test_masks_must_have_the_size_of_the_images() -> None:
    images = torch.zeros(2, 3, 4, 6)
    entry = logged_images(images, masks={"truth": np.ones((2, 4, 6), int)}, mask_class_labels={1: "cat"})
    assert [mask.shape for mask in entry.masks["truth"]] == [(4, 6)] * 2
    assert entry.mask_class_labels == {1: "cat"}
    for wrong in (np.ones((1, 4, 6), int), np.ones((2, 6, 4), int), np.ones((2, 4, 6))):
        with pytest.raises(ConfigurationError, match="mask 'truth' of images 'Images'"):
            logger_at(1).log_images(images, masks={"truth": wrong})


def test_floats_become_bytes() -> None:
    assert as_bytes(np.array([0.0, 0.5, 1.0])).tolist() == [0, 128, 255]
    assert as_bytes(np.array([-1.0, 0.0, 3.0])).tolist() == [0, 64, 255]
    assert as_bytes(np.array([np.nan, 1.0])).tolist() == [0, 255]
    assert as_bytes(np.array([7.0, 7.0])).tolist() == [0, 0]


def test_tables_texts_and_files_are_collected_with_step_and_time(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    file.write_bytes(b"weights")
    logger = logger_at(3)
    logger.log_table(["a", "b"], [(1, torch.tensor(0.5)), ("x", None)])
    logger.log_table(["a"], [], name="empty", step=9)
    logger.log_text("all is well", name="note")
    logger.upload_file("checkpoints/model.pt", file)
    assert logger.pending
    state = batch_end(3)
    others = logger.take_non_metrics(state)
    assert others is not None
    assert others.entries == [
        Table(3, state.time, "Table", ["a", "b"], [[1, 0.5], ["x", None]]),
        Table(9, state.time, "empty", ["a"], []),
        Text(3, state.time, "note", "all is well"),
        Upload("checkpoints/model.pt", file, False),
    ]
    assert not logger.pending


def test_unsupported_values_are_refused(tmp_path: Path) -> None:
    logger = logger_at(1)
    for log in (
        lambda: logger.log_table(["a", "b"], [[1, 2], [3]], name="T"),
        lambda: logger.log_table(["a"], [[object()]]),
        lambda: logger.log_text(5),  # type: ignore[arg-type]
        lambda: logger.upload_file("x", tmp_path),
        lambda: Logger().log_text("before the first event"),
    ):
        with pytest.raises(ConfigurationError):
            log()
    assert not logger.pending


def raise_here(_error: BrokenPipeError) -> None:
    raise AssertionError


class Broken(Collector):
    def log_rows(self, rows: Any, state: Snapshot) -> None:
        raise ValueError("disk on fire")


class Gone(Collector):
    def log_rows(self, rows: Any, state: Snapshot) -> None:
        raise BrokenPipeError


def test_a_destination_that_raises_is_shown_and_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    whole, gone = Collector(), []
    fanout = Fanout({"Broken": Broken(), "Gone": Gone(), "Collector": whole}, gone.append)
    for batch in (1, 2):
        logger = logger_at(batch)
        logger.log_metrics({"loss": 1.0})
        fanout.deliver(logger, batch_end(batch))
    assert [row.step for row in whole.rows] == [1, 2]
    assert fanout.failed == ("Broken",)
    assert fanout.names == ["Collector"]
    assert len(gone) == 1
    assert fanout.states() is None
    assert capsys.readouterr().err.count("Traceback") == 1


class Closed(Collector):
    def open(self, context: RunContext) -> None:
        raise ConfigurationError("cannot be opened")


class Unchecked(Collector):
    def check(self) -> None:
        raise ConfigurationError("not installed")


def test_loggers_are_closed_when_one_cannot_be_opened() -> None:
    first = Collector()
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        Fanout({"first": first, "second": Closed()}, raise_here).open(RunContext("run", 1, None))
    assert first.closed
    untouched = Collector()
    with pytest.raises(ConfigurationError, match="not installed"):
        Fanout({"first": untouched, "second": Unchecked()}, raise_here).open(RunContext("run", 1, None))
    assert untouched.context is None


class Alone(Collector):
    def __init__(self) -> None:
        super().__init__()
        self.inside = 0

    def log_rows(self, rows: Any, state: Snapshot) -> None:
        self.inside += 1
        super().log_rows(rows, state)
        threading.Event().wait(0.0005)  # lets another thread run
        assert self.inside == 1
        self.inside -= 1


def test_several_threads_deliver_one_at_a_time() -> None:
    destination = Alone()
    fanout = Fanout({"alone": destination}, raise_here)

    def deliver(offset: int) -> None:
        for step in range(20):
            logger = logger_at(1)
            logger.log_metrics({"x": 1}, step=offset + step)
            fanout.deliver(logger, batch_end(1))

    threads = [threading.Thread(target=deliver, args=(offset,)) for offset in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fanout.failed == ()
    assert len(destination.rows) == 60
