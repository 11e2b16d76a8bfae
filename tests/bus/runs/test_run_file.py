"""``run.json``: its limits, damage, reading while a broker writes it, locks, and entries for readers elsewhere."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from run_folders import write_run

from offloop.bus.errors import RunDirectoryError
from offloop.bus.protocol.order import Ending
from offloop.bus.runs import directory, writing
from offloop.bus.runs import lock as run_lock
from offloop.bus.runs.directory import find_run, list_runs, read_run
from offloop.bus.runs.listing import ListedRun
from offloop.bus.runs.run_file import MAX_BYTES, MAX_TEXT
from offloop.bus.runs.writing import RunDirectory, next_attempt


def change(**values: Any) -> Callable[[Path], None]:
    """Give the newest attempt other values."""

    def write(path: Path) -> None:
        record = json.loads(path.read_text())
        record["attempts"][-1] |= values
        path.write_text(json.dumps(record))

    return write


def write(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


DAMAGE = {
    "infinite": change(started=float("inf")),
    "before 1970": change(ended=-5.0),
    "year 10000": change(paused={"since": 253402300800.0, "batch": 1}),
    "attempt of 65 bits": change(attempt=2**64),
    "fractional attempt": change(attempt=1.5),
    "surrogate": change(reason="\udcff"),
    "status of no attempt": change(status="live"),
    "batch of 71 bits": change(reached={"epoch": 0, "batch": 2**70, "sample": 0, "planned": None}),
    "recording elsewhere": change(recording="../other/recording-1.mcap"),
    "empty": write(b""),
    "attempt is a number": write(b'{"name": "r", "attempts": [5]}'),
    "not UTF-8": write(b'{"name": "\xff", "attempts": []}'),
    "nested": write(b'{"name": "r", "attempts": [], "more": ' + b"[" * 100_000),
    "20 GB": lambda path: os.truncate(path, 20 << 30),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_run_file_that_cannot_be_read_is_named_and_never_written_over(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    run = write_run(tmp_path, "r")
    damage(run / "run.json")
    about = _written(run)
    for use in (lambda: read_run(run), lambda: RunDirectory(tmp_path, "r"), lambda: next_attempt(tmp_path, "r")):
        with pytest.raises(RunDirectoryError, match=rf"{run}/run\.json (is damaged|cannot be read): ") as raised:
            use()
        assert str(raised.value).isprintable()
    assert list_runs(tmp_path) == []
    assert _written(run) == about


def _written(run: Path) -> tuple[int, ...]:
    about = (run / "run.json").stat()  # its access time changes when it is read
    return about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def test_a_description_that_is_wrong_in_one_value_hides_no_run(tmp_path: Path) -> None:
    run = write_run(tmp_path, "r")
    wrong = {"command": {"a": 2}, "versions": [1], "config": 5, "host": 3, "git_commit": []}
    change(info={**wrong, "cwd": "/here", "own": {"a": [1]}, "other": {"run": 1}})(run / "run.json")
    info = read_run(run).last.info
    assert info == {"cwd": "/here", "own": {"a": [1]}, "other": {"run": 1}}


def test_an_attempt_that_would_make_the_file_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "MAX_BYTES_AT_BEGIN", 5000)
    write_run(tmp_path, "r")
    before = (tmp_path / "r" / "run.json").read_bytes()
    directory = RunDirectory(tmp_path, "r")
    number, recording = directory.next_attempt()
    with pytest.raises(RunDirectoryError, match=r"with attempt 2, and 5,000 are allowed: choose another run name"):
        directory.begin_attempt(recording, number, {"text": "x" * 5000}, 1)
    directory.release()
    assert (tmp_path / "r" / "run.json").read_bytes() == before


def test_however_long_an_error_is_the_run_can_be_read(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "r")
    number, recording = directory.next_attempt()
    directory.begin_attempt(recording, number, {"path": "\udcff"}, 1)
    directory.end_attempt(Ending("failed", "x" * (MAX_BYTES + 1), "\udcff"))
    directory.release()
    last = read_run(tmp_path / "r").last
    assert (last.error, last.reason, last.info) == ("x" * MAX_TEXT, "\\udcff", {"path": "\\udcff"})


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


@pytest.mark.parametrize("can_ask", [run_lock.CAN_ASK, False])
def test_one_process_has_the_lock_and_all_may_ask_until_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_ask: bool
) -> None:
    # Also as on a system where a lock cannot be asked about.
    monkeypatch.setattr(run_lock, "CAN_ASK", can_ask)
    first, second = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    asking = os.open(tmp_path / "lock", os.O_RDONLY)
    assert not run_lock.is_held(asking)
    assert run_lock.take(first)
    assert run_lock.is_held(asking)
    assert run_lock.is_held(second)
    assert not run_lock.take(second)
    # Opened and closed again elsewhere in the same process, it stays.
    os.close(os.open(f"/dev/fd/{asking}", os.O_RDONLY))
    assert run_lock.is_held(asking)
    os.close(first)
    assert not run_lock.is_held(asking)
    assert run_lock.take(second)
    os.close(second)
    os.close(asking)


SAID = {"run": "r", "attempt": 1, "status": "live"}


def test_an_entry_of_a_newer_bridge_is_read() -> None:
    said = {**SAID, "reached": {"epoch": 1, "batch": 2, "sample": 3, "unknown": 4}, "unknown": 5}
    known = msgspec.json.decode(json.dumps(said), type=ListedRun)
    assert known.reached is not None
    assert (known.reached.batch, known.reached.planned) == (2, None)
    assert (known.error, known.ranks, known.live, known.bridge, known.is_silent) == (None, (), False, None, True)
