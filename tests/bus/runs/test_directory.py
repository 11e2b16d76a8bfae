"""What is read of a run's directory while its broker writes there."""

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from offloop.bus.protocol.order import Ending
from offloop.bus.runs import directory
from offloop.bus.runs.directory import find_run, host_name
from offloop.bus.runs.writing import RunDirectory
from offloop.bus.types.units import lasted


@pytest.mark.parametrize("files_before_the_end", range(3))
def test_a_run_that_ends_while_it_is_read_is_live_or_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files_before_the_end: int
) -> None:
    broker = RunDirectory(tmp_path, "r")
    number, recording = broker.next_attempt()
    broker.begin_attempt(recording, number, info={}, world_size=1)
    broker.announce(number, "ipc://control", "ipc://stream")
    read_record, read = directory.read_record, 0

    def read_while_it_ends(path: Path, descriptor: int, form: type[Any]) -> Any:
        nonlocal read
        if read == files_before_the_end:
            broker.end_attempt(Ending("finished"))
            broker.release()
        read += 1
        return read_record(path, descriptor, form)

    monkeypatch.setattr(directory, "read_record", read_while_it_ends)
    run = find_run("r", tmp_path)
    broker.release()
    assert (run.live, run.status) == ((False, "finished") if files_before_the_end < 2 else (True, "live"))


@pytest.mark.parametrize("is_resumed", [False, True])
def test_an_attempt_never_lasted_less_than_nothing_although_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_resumed: bool
) -> None:
    broker = RunDirectory(tmp_path, "r")
    number, recording = broker.next_attempt()
    broker.begin_attempt(recording, number, info={}, world_size=1)
    if is_resumed:
        broker.resume_attempt(number)
    began, steady = time.time(), time.monotonic()
    monkeypatch.setattr(time, "time", lambda: began - 3600)
    monkeypatch.setattr(time, "monotonic", lambda: steady + 7)
    broker.end_attempt(Ending("finished"))
    broker.release()
    last = find_run("r", tmp_path).last
    assert last.ended is not None
    # A broker that was started again does not know when the attempt began by its own clock.
    assert last.ended - last.started == pytest.approx(0 if is_resumed else 7, abs=1)


@pytest.mark.parametrize(("started", "ended", "live"), [(3600.0, 1.4, False), (1e11, None, True)])
def test_what_ended_before_it_began_took_no_time(started: float, ended: float | None, live: bool) -> None:
    assert lasted(started, ended, live=live) == lasted(0, 0, live=False)


def test_a_host_is_called_as_the_environment_says_or_as_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFLOOP_HOST", raising=False)
    assert host_name() == socket.gethostname()
    monkeypatch.setenv("OFFLOOP_HOST", "node-7")
    assert host_name() == "node-7"
