"""What ``run.json`` may hold, and what becomes of one that is damaged."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_folders import write_run

from offloop.bus.errors import RunDirectoryError
from offloop.bus.protocol.order import Ending
from offloop.bus.runs import writing
from offloop.bus.runs.directory import Origin, list_runs, read_run
from offloop.bus.runs.run_file import MAX_BYTES, MAX_TEXT
from offloop.bus.runs.writing import RunDirectory, next_attempt


def change(**values: Any) -> Callable[[Path], None]:
    """Gives the newest attempt other values."""

    def write(path: Path) -> None:
        record = json.loads(path.read_text())
        record["attempts"][-1] |= values
        path.write_text(json.dumps(record))

    return write


def write(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


DAMAGE = {
    "infinite": change(started=float("inf")),
    "not a number": change(started=float("nan")),
    "no date": change(started=1e300),
    "negative": change(started=-1e300),
    "before 1970": change(ended=-5.0),
    "many digits": change(started=10**400),
    "year 10000": change(paused={"since": 253402300800.0, "batch": 1}),
    "attempt of 65 bits": change(attempt=2**64),
    "negative attempt": change(attempt=-1),
    "boolean attempt": change(attempt=True),
    "attempt in words": change(attempt="1"),
    "fractional attempt": change(attempt=1.5),
    "map as error": change(error={"a": 1}),
    "surrogate": change(reason="\udcff"),
    "list as status": change(status=["finished"]),
    "status of no attempt": change(status="live"),
    "number as publisher": change(publishers=[5]),
    "batch of 71 bits": change(reached={"epoch": 0, "batch": 2**70, "sample": 0, "planned": None}),
    "nothing reached": change(reached={"epoch": 0}),
    "ranks in words": change(world_size="two"),
    "list as description": change(info=[]),
    "recording elsewhere": change(recording="../other/recording-1.mcap"),
    "empty": write(b""),
    "list": write(b"[]"),
    "attempts are a number": write(b'{"name": "r", "attempts": 5}'),
    "attempt is a number": write(b'{"name": "r", "attempts": [5]}'),
    "not UTF-8": write(b'{"name": "\xff", "attempts": []}'),
    "nested": write(b'{"name": "r", "attempts": [], "more": ' + b"[" * 100_000),
    "zeros": write(bytes(4096)),
    "20 GB": lambda path: os.truncate(path, 20 << 30),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_run_file_that_cannot_be_read_is_named_and_never_written_over(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    run = write_run(tmp_path, "r")
    damage(run / "run.json")
    about = _written(run)
    for use in (
        lambda: read_run(run),
        lambda: RunDirectory(tmp_path, "r"),
        lambda: next_attempt(tmp_path, "r"),
    ):
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
    change(info={**wrong, "cwd": "/here", "own": {"a": [1]}, "replay_of": {"run": 1, "attempt": "x", "path": 3}})(
        run / "run.json"
    )
    info = read_run(run).last.info
    assert info == {"cwd": "/here", "own": {"a": [1]}, "replay_of": {"run": 1, "attempt": "x", "path": 3}}
    assert Origin.of(info) is None


def test_what_later_versions_add_is_kept_when_another_attempt_begins(tmp_path: Path) -> None:
    run = write_run(tmp_path, "r")
    change(later={"a": [1, None]})(run / "run.json")
    write_run(tmp_path, "r")
    first, second = json.loads((run / "run.json").read_text())["attempts"]
    assert (first["later"], second["attempt"]) == ({"a": [1, None]}, 2)


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
