"""A destination that is slow or away: nobody waits for it, nothing is lost, nothing arrives twice."""

import errno
import io
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from consumers_stream import batch_end, snapshots_of_training
from helpers import wait_for

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers import Callback, Logger
from offloop.consumers.api.logger import Histogram, Images, LoggerDestination, Row, RunContext, Table, Text, Upload
from offloop.consumers.delivery.spool import PAUSES, Spool, wrap_in_spool
from offloop.consumers.runner.runner import Runner

Fault = Callable[[str], None]


class Server(LoggerDestination):
    """Keeps what it is given; ``fault`` is called first with the name of the method, and may raise or wait."""

    background = True
    drain_seconds = 60.0

    def __init__(self, fault: Fault = lambda method: None) -> None:
        self.fault = fault
        self.rows: list[Row] = []
        self.others: list[Any] = []
        self.states: list[Snapshot] = []
        self.opened = 0
        self.closed = 0
        self.taken = 0
        self.loaded: list[dict[Any, Any]] = []
        self.noted: dict[Any, Any] = {}

    def open(self, context: RunContext) -> None:
        self.fault("open")
        self.opened += 1

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        self.fault("log_rows")
        self.rows += rows
        self.states.append(state)
        self.taken += len(rows)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any], state: Snapshot) -> None:
        self.others.append(dict(hyperparameters))

    def log_images(self, entry: Images | Histogram | Text, state: Snapshot) -> None:
        self.others.append(entry)

    log_text = log_histogram = log_images

    def log_table(self, entry: Table, state: Snapshot) -> None:
        self.fault("log_table")
        self.others.append(entry)

    def upload_file(self, entry: Upload, state: Snapshot) -> None:
        self.fault("upload_file")
        self.others.append((entry.remote_file_name, entry.file_path.read_bytes(), entry.overwrite))

    def close(self) -> None:
        self.closed += 1

    def state_dict(self) -> dict[str, Any]:
        self.noted = {1: self.taken}
        return self.noted

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded.append(state)

    @property
    def steps(self) -> list[int]:
        return [row.step for row in self.rows]


class Unsafe(Server):
    """What it took is safe when it is closed, and not before."""

    acknowledges = False


def log(spool: Spool, *steps: int) -> None:
    for step in steps:
        state = batch_end(step)
        spool.log_rows([Row(step, state.time, {"loss": 1 / step, "note": "ok"})], state)


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    return RunContext("demo", 1, tmp_path)


def opened(context: RunContext, server: Server, *pause: Callable[[float], object]) -> Spool:
    spool = Spool(server, *pause)
    spool.open(context)
    return spool


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "model.pt"
    file.write_bytes(b"weights")
    return file


@pytest.fixture
def hanging() -> Iterator[tuple[Fault, threading.Event]]:
    go_on = threading.Event()

    def hang(method: str) -> None:
        go_on.wait(60)

    yield hang, go_on
    go_on.set()


def no_pause(seconds: float) -> None:
    """Lets the sending thread try again at once."""


def spool_directories(context: RunContext) -> list[Path]:
    assert context.run_dir is not None
    return sorted((context.run_dir / "consumers").glob("*"))


def test_entries_arrive_in_order_and_unchanged(context: RunContext, model: Path) -> None:
    server = Server()
    spool = wrap_in_spool(server)
    spool.check()
    spool.open(context)
    state = batch_end(3, batch_size=8)
    row = Row(3, state.time, {"loss": 0.1, "nan": float("inf"), "text": "x", "whole": 2**40, "flag": True})
    images = [np.arange(12, dtype=np.uint8).reshape(2, 2, 3), np.array([[[0.5]]], np.float32)]
    masks = {"truth": [np.array([[0, 1], [1, 2]]), np.array([[1]])]}
    table = Table(3, state.time, "T", ["a", "b"], [[1, "x"], [None, 0.5]])
    spool.log_hyperparameters({"seed": 17, "sizes": [1, 2], "path": Path("x"), "np": np.float32(0.5)}, state)
    spool.log_rows([row], state)
    spool.log_entry(Images(3, state.time, "I", images, masks, {1: "cat"}, False), state)
    spool.log_entry(table, state)
    histogram = Histogram(3, state.time, "H", [1, 2], [-1.0, 0.0, 0.5])
    spool.log_entry(histogram, state)
    spool.log_entry(Text(3, state.time, "note", "hello"), state)
    spool.log_entry(Upload("checkpoints/model.pt", model, True), state)
    model.unlink()
    spool.close()
    assert server.rows == [row]
    hyperparameters, logged_images, *rest = server.others
    assert hyperparameters == {"seed": 17, "sizes": [1, 2], "path": "x", "np": 0.5}
    assert logged_images[:3] == (3, state.time, "I")
    for found, expected in zip(
        logged_images.images + logged_images.masks["truth"], images + masks["truth"], strict=True
    ):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)
    assert logged_images[5:] == ({1: "cat"}, False)
    assert rest == [table, histogram, Text(3, state.time, "note", "hello"), ("checkpoints/model.pt", b"weights", True)]
    assert server.states == [state]
    assert (server.opened, server.closed) == (1, 1)
    assert spool_directories(context) == []


def test_a_failed_delivery_is_retried_after_growing_pauses(
    context: RunContext, capsys: pytest.CaptureFixture[str]
) -> None:
    attempts, pauses = 0, []
    last = len(PAUSES) + 3

    def refuse(method: str) -> None:
        nonlocal attempts
        attempts += 1
        if attempts <= last:
            raise ConnectionError("refused")

    server = Server(refuse)
    spool = opened(context, server, pauses.append)
    log(spool, *range(1, 51))
    wait_for(lambda: len(server.rows) == 50, "all rows")
    spool.close()
    assert server.steps == [*range(1, 51)]
    assert server.states[-1] == batch_end(50)
    assert pauses == [*PAUSES, *[PAUSES[-1]] * 3]
    takes_nothing, takes_again = capsys.readouterr().err.splitlines()
    assert "accepts nothing, ConnectionError: refused" in takes_nothing
    assert "accepts entries again" in takes_again


def test_a_retry_continues_after_the_accepted_entries(context: RunContext) -> None:
    fail_at = iter((3, 5))
    due = next(fail_at)

    def fail(method: str) -> None:
        nonlocal due
        if method == "log_table" and len(server.others) == due - 1:
            due = next(fail_at, 0)
            raise OSError("broken")

    server, pauses = Server(fail), list[float]()
    spool = opened(context, server, pauses.append)
    for step in range(1, 8):
        state = batch_end(step)
        spool.log_entry(Table(step, state.time, "T", [], []), state)
    spool.close()
    assert [table.step for table in server.others] == [*range(1, 8)]
    assert server.opened == 3
    assert len(server.loaded) == 2
    assert pauses == [PAUSES[0]] * 2


def test_unconfirmed_entries_are_sent_again_after_a_failure(context: RunContext) -> None:
    failures = iter((OSError("broken"),))

    def fail(method: str) -> None:
        if len(server.rows) == 2 and (error := next(failures, None)):
            raise error

    server = Unsafe(fail)
    spool = opened(context, server, no_pause)
    for step in (1, 2):
        log(spool, step)
        wait_for(lambda expected=step: len(server.rows) == expected, "the row")
    log(spool, 3)
    spool.close()
    assert server.steps == [1, 2, 1, 2, 3]
    assert server.loaded == [{1: 0}]


def test_a_rejected_entry_is_skipped(context: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(method: str) -> None:
        if method == "log_table":
            raise ConfigurationError("no tables here")

    server = Server(refuse)
    spool = opened(context, server)
    log(spool, 1)
    for step in (2, 3, 4):
        spool.log_entry(Table(step, 0.0, "T", [], []), batch_end(step))
    log(spool, 5)
    spool.close()
    assert server.steps == [1, 5]
    assert spool.problem == "lacks entries that it refused"
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_destination_that_never_opens_is_abandoned(context: RunContext) -> None:
    def refuse(method: str) -> None:
        raise ConfigurationError("no such project")

    spool = opened(context, Server(refuse))

    def is_refused() -> bool:
        try:
            log(spool, 1)
        except ConfigurationError:
            return True
        return False

    wait_for(is_refused, "the error in the consumer's thread")


def test_undelivered_entries_are_reported_with_a_remedy(
    context: RunContext, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(method: str) -> None:
        raise ConnectionError("refused")

    server = Server(refuse)
    server.drain_seconds = 0.01
    spool = opened(context, server)
    log(spool, 1, 2, 3)
    wait_for(lambda: "accepts nothing" in capsys.readouterr().err, "the first failure")
    spool.close()
    err = capsys.readouterr().err
    assert "3 of 3 entries did not arrive" in err
    assert f"'consumer --replay {context.run_dir} --log Server'" in err
    assert spool.problem == "lacks 3 of 3 entries"
    assert spool_directories(context) == []


class Stderr(io.StringIO):
    """Does something when a line is written that has a certain word in it."""

    def __init__(self, word: str, action: Callable[[], object]) -> None:
        super().__init__()
        self._word, self._action = word, action

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._word in text:
            self._action()
        return written


def test_one_interrupt_keeps_pending_entries_at_the_end_of_a_run(
    hanging: tuple[Fault, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offloop.consumers.delivery.spool._PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", Stderr("more entries", lambda: signal.raise_signal(signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        Runner(snapshots_of_training(), [LogsLoss()], [Server(hanging[0])]).run()
    assert "sending 8 more entries; Ctrl-C leaves them" in sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "8 of 8 entries did not arrive" in sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_a_named_consumer_sends_committed_entries_only(context: RunContext) -> None:
    server = Server()
    spool = opened(context, server)
    spool.state_dict()
    log(spool, 1, 2)
    spool.state_dict()
    spool.on_commit()
    log(spool, 3)
    wait_for(lambda: server.steps == [1, 2], "what was committed")
    spool.close()
    assert server.steps == [1, 2]


def go_on(state: dict[str, Any], server: Server, context: RunContext) -> Spool:
    spool = Spool(server)
    spool.load_state_dict(state)
    spool.open(context)
    spool.state_dict()
    return spool


def abandon(spool: Spool, server: Server) -> None:
    """Ends the thread and closes the files of one that stands for a killed process."""
    server.fault = lambda method: None
    server.drain_seconds = 0.01
    spool.close()


def test_a_resumed_consumer_sends_nothing_twice(context: RunContext, hanging: tuple[Fault, threading.Event]) -> None:
    first = Server()
    spool = opened(context, first)
    log_committed(spool, 1, 2)
    wait_for(lambda: first.noted == {1: 2}, "the first rows, noted as sent")
    first.fault = hanging[0]
    state = log_committed(spool, 3, 4)
    log(spool, 5, 6)
    # As if the process had been killed here: it never closes anything.
    second = Server()
    again = go_on(state, second, context)
    log(again, 5, 6, 7)
    again.state_dict()
    again.on_commit()
    again.on_commit()
    again.close()
    assert second.steps == [3, 4, 5, 6, 7]
    assert second.loaded == [{1: 2}]
    abandon(spool, first)


def log_committed(spool: Spool, *steps: int) -> dict[str, Any]:
    log(spool, *steps)
    state = spool.state_dict()
    spool.on_commit()
    return state


def test_entries_sent_at_close_are_not_sent_again(context: RunContext) -> None:
    first = Server()
    spool = opened(context, first)
    state = log_committed(spool, 1, 2)
    log(spool, 3)
    spool.on_commit()  # the run is over, nothing follows
    spool.close()
    assert first.steps == [1, 2, 3]
    # Killed before that was stored: it goes on from before, and its end comes once more.
    second = Server()
    again = go_on(state, second, context)
    log(again, 3)
    again.on_commit()
    again.close()
    assert second.steps == []


def test_delivered_entries_are_removed_from_the_disk(context: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offloop.consumers.delivery.spool_file._FILE_BYTES", 1000)
    may_take = threading.Semaphore(0)

    def wait(method: str) -> None:
        if method == "log_table":
            assert may_take.acquire(timeout=60)

    def log_tables(spool: Spool, *steps: int) -> dict[str, Any]:
        for step in steps:
            spool.log_entry(Table(step, 0.0, "T", [], []), batch_end(step))
        state = spool.state_dict()
        spool.on_commit()
        return state

    slow = Server(wait)
    spool = opened(context, slow)
    state = log_tables(spool, *range(1, 201))
    (directory,) = spool_directories(context)
    everything = sum(file.stat().st_size for file in directory.glob("records-*"))
    may_take.release(150)
    # It always has something left to take.
    wait_for(lambda: sent_and_deleted(directory) == 150, "what it may take, and nothing further, to be deleted")
    assert sum(file.stat().st_size for file in directory.glob("records-*")) < everything / 3
    # As if the process had been killed here.
    second = Server()
    again = go_on(state, second, context)
    log_tables(again, 201)
    again.close()
    assert [table.step for table in slow.others + second.others] == [*range(1, 202)]
    assert sum(file.stat().st_size for file in directory.glob("records-*")) == 0
    may_take.release(100)
    abandon(spool, slow)


def sent_and_deleted(directory: Path) -> int | None:
    """How many records were sent, when those files are gone that are not needed for more."""
    base, _, sent, _ = msgpack.unpackb((directory / "position").read_bytes(), strict_map_key=False)
    bases = [int(file.name.removeprefix("records-")) for file in directory.glob("records-*")]
    return int(sent) if min(bases) == base else None


def test_kept_files_are_deleted_after_delivery(context: RunContext, model: Path) -> None:
    for server in (Server(), Unsafe()):
        spool = opened(context, server)
        state = spool.state_dict()
        spool.log_entry(Upload("model.pt", model, False), batch_end(1))
        assert model.stat().st_nlink == 2
        spool.on_commit()
        spool.close()
        assert server.others == [("model.pt", b"weights", False)]
        assert list(Path(state["path"], "files").iterdir()) == []


def test_a_missing_spool_is_reported(context: RunContext) -> None:
    spool = opened(context, Server())
    state = log_committed(spool, 1)
    spool.close()
    shutil.rmtree(state["path"])
    with pytest.raises(ConfigurationError, match=state["path"]):
        go_on(state, Server(), context)


def test_pending_entries_of_a_destination_are_awaited(context: RunContext) -> None:
    # Like wandb, which takes everything in at once.
    closing, go_on = threading.Event(), threading.Event()

    class Slow(Unsafe):
        drain_seconds, finish_seconds = 0.1, 30.0

        def close(self) -> None:
            closing.set()
            assert go_on.wait(60)
            super().close()

    spool = opened(context, server := Slow())
    log(spool, 1, 2)
    wait_for(lambda: server.steps == [1, 2], "both rows")
    ending = threading.Thread(target=spool.close)
    ending.start()
    assert closing.wait(60)
    # It has longer than one that gets on with nothing.
    ending.join(0.4)
    assert ending.is_alive()
    go_on.set()
    ending.join(60)
    assert (server.closed, server.steps, spool.problem) == (1, [1, 2], None)


def test_nothing_arrives_twice_if_the_position_cannot_be_written(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    failures = iter((OSError(errno.ENOSPC, "No space left on device"),))
    replace = os.replace

    def fail_once(source: Any, target: Any) -> None:
        if Path(target).name == "position" and server.others and (error := next(failures, None)):
            raise error
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_once)
    spool = opened(context, server, no_pause)
    for step in range(1, 6):
        spool.log_entry(Table(step, 0.0, "T", [], []), batch_end(step))
    spool.close()
    assert [table.step for table in server.others] == [*range(1, 6)]
    assert server.opened == 2


class LogsLoss(Callback):
    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        logger.log_metrics({"loss": state.loss})


class Full(LoggerDestination):
    """Has no room for one of the rows."""

    def __init__(self, full_at: int | None, error: Exception | None = None) -> None:
        self.full_at = full_at
        self.error = error or OSError(errno.ENOSPC, "No space left on device")
        self.rows = 0
        self.closed = False

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        if rows[0].step == self.full_at:
            raise self.error
        self.rows += 1

    def close(self) -> None:
        self.closed = True


def test_a_destination_that_fails_gets_no_more_and_is_closed_like_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Broken(Full):
        def close(self) -> None:
            super().close()
            raise OSError("still no space")

    destinations = [Full(2), Broken(2, ValueError("a mistake")), Full(None)]
    statistics = Runner(snapshots_of_training(4), [LogsLoss()], destinations).run()
    assert statistics.failed_destinations == ("Full", "Broken")
    assert [(destination.rows, destination.closed) for destination in destinations] == [(1, True), (1, True), (4, True)]
    told = capsys.readouterr().err
    assert told.count("Traceback") == 1, "of a mistake in the code alone"
    assert "still no space" not in told
