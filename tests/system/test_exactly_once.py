"""Consumers with a name: killed at any moment and started again, their files come out as if nothing had happened."""

import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from consumers_stream import batch_end, record_run, snapshots_of_training
from helpers import wait_for
from hypothesis import given, settings
from hypothesis import strategies as st
from logged import Photographer
from run_folders import write_run
from training import Act, gold_trainer

from offloop.bus import Event
from offloop.bus.errors import ConfigurationError, RecordingError, RunDirectoryError
from offloop.bus.protocol.order import Gap
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import RunStream
from offloop.consumers import (
    Callback,
    CsvLogger,
    JsonlLogger,
    Logger,
    LRMonitor,
    Runner,
    SpeedMonitor,
    TrainerMetrics,
)
from offloop.consumers.api.logger import RunContext
from offloop.consumers.delivery.commit import Committed
from offloop.consumers.runner.dispatcher import CallbackError
from offloop.consumers.runner.state_file import StateFile
from offloop.consumers.runner.statistics import RunnerStatistics

FILES = ("metrics.jsonl", "metrics.csv")


class Averages(Callback):
    """Logs running averages of what a snapshot has in ``rows``, and a summary at the end."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.count = 0

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        self.count += 1
        for name, value in state.fields.get("rows", {}).items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            logger.log_metrics({name: self.sums[name] / self.count})

    def close(self, state: Snapshot, logger: Logger) -> None:
        logger.log_metrics({"batches": self.count})

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums, self.count = state["sums"], state["count"]


def run_named(
    stream: Any,
    directory: Path,
    photographer: Photographer | None = None,
    commit_every: int = 1,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> RunnerStatistics:
    """A consumer of that stream with all its files in a directory."""
    made = callbacks or [SpeedMonitor(window_size=3), Averages(), TrainerMetrics()]
    loggers = [
        JsonlLogger(str(directory / "metrics.jsonl")),
        photographer or Photographer(),
        CsvLogger(str(directory / "metrics.csv")),
    ]
    with StateFile(directory, "mine", "run", 1) as progress:
        statistics = Runner(stream, made, loggers, progress=progress, commit_every=commit_every, **options).run()
    # Where they wrote differs between the directories of a test.
    return dataclasses.replace(statistics, written={})


def contents(directory: Path) -> list[bytes]:
    return [(directory / name).read_bytes() for name in FILES]


ROWS = st.lists(st.dictionaries(st.sampled_from(["a", "b", "c,d", 'e"\n']), st.floats(-9, 9), max_size=3), max_size=6)


@settings(max_examples=15, deadline=None)
@given(rows=ROWS, commit_every=st.integers(1, 4))
def test_a_consumer_killed_at_any_moment_resumes_to_equal_bytes(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, float]], commit_every: int
) -> None:
    stream = [batch_end(batch, rows=row) for batch, row in enumerate(rows, 1)]
    directory = tmp_path_factory.mktemp("killed") / "undisturbed"
    directory.mkdir()
    photographer = Photographer(directory)
    statistics = run_named(stream, directory, photographer, commit_every)
    for copy in photographer.copies:
        assert run_named(stream, copy, None, commit_every) == statistics
        assert contents(copy) == contents(directory)


class Breaks(Averages):
    def __init__(self, at: Sequence[int]) -> None:
        super().__init__()
        self.at = at

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        super().batch_end(state, logger)
        if state.timestamp.batch.value in self.at:
            raise ValueError("not this one")


def test_a_corrected_callback_resumes_before_the_event_that_stopped_it(tmp_path: Path) -> None:
    stream = [batch_end(batch, rows={"a": batch}) for batch in range(1, 9)]
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
    with pytest.raises(CallbackError):
        run_named(stream, tmp_path / "bad", commit_every=3, callbacks=[Breaks([5])], on_error="stop")
    mended = run_named(stream, tmp_path / "bad", callbacks=[Breaks([])], on_error="stop")
    assert run_named(stream, tmp_path / "good", callbacks=[Breaks([])]) == mended
    assert contents(tmp_path / "bad") == contents(tmp_path / "good")


@pytest.mark.parametrize(("on_error", "errors"), [("continue", 3), ("disable", 1)])
def test_errors_are_counted_over_restarts_and_shown_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], on_error: str, errors: int
) -> None:
    stream = [batch_end(batch, rows={"a": batch}) for batch in range(1, 9)]
    run_named(stream[:4], tmp_path, callbacks=[Breaks([3, 5, 7])], on_error=on_error)
    assert "Traceback" in capsys.readouterr().err
    statistics = run_named(stream, tmp_path, callbacks=[Breaks([3, 5, 7])], on_error=on_error)
    assert statistics.errors == {"Breaks": errors}
    assert "Traceback" not in capsys.readouterr().err


def test_a_failed_destination_gets_everything_after_a_restart(tmp_path: Path) -> None:
    class Full(Photographer):
        def log_rows(self, rows: Any, state: Snapshot) -> None:
            if state.seq == 4:
                raise OSError("no space left on device")

    Full.__name__ = Photographer.__name__
    stream = [batch_end(batch, rows={"a": batch}) for batch in range(1, 9)]
    for name in ("full", "good"):
        (tmp_path / name).mkdir()
    assert run_named(stream, tmp_path / "full", Full(None)).failed_destinations == ("Photographer",)
    assert run_named(stream, tmp_path / "full").problems == []
    run_named(stream, tmp_path / "good")
    assert contents(tmp_path / "full") == contents(tmp_path / "good")


class Store(StateFile):
    """Counts the commits, and refuses some."""

    def __init__(self, directory: Path, *fail_at: int) -> None:
        super().__init__(directory, "store", "run", 1)
        self.fail_at = fail_at
        self.attempts = 0
        self.handled: list[int] = []

    def load(self) -> None:
        return None

    def commit(self, committed: Committed) -> None:
        self.attempts += 1
        if self.attempts in self.fail_at:
            raise RunDirectoryError("the disk is full")
        self.handled.append(committed.handled)


@pytest.mark.parametrize(
    ("seconds", "handled"),
    [(0.0, [0, 4, 8, 10]), (0.5, [0, 2, 4, 6, 8, 10, 10]), (1.0, [*range(11), 10])],
)
def test_a_consumer_commits_after_commit_every_events_or_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, handled: list[int]
) -> None:
    clock = [100.0]

    class Works(Callback):
        def batch_end(self, state: Snapshot, logger: Logger) -> None:
            clock[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with Store(tmp_path) as store:
        Runner([batch_end(batch) for batch in range(1, 11)], [Works()], progress=store, commit_every=4).run()
    assert store.handled == handled


def test_a_state_that_cannot_be_written_is_reported_and_retried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = [batch_end(batch) for batch in range(1, 6)]

    def run(*fail_at: int) -> RunnerStatistics:
        with Store(tmp_path, *fail_at) as store:
            return Runner(stream, [LRMonitor()], progress=store, commit_every=1).run()

    assert run(2, 3).problems == []
    assert capsys.readouterr().err.count("the disk is full") == 1
    assert run(*range(2, 99)).problems == ["the disk is full"]
    with pytest.raises(RunDirectoryError):
        run(1)


def test_gaps_seen_before_a_kill_are_in_the_last_report(tmp_path: Path) -> None:
    class WithGaps(RunStream):
        def __init__(self, snapshots: list[Snapshot], gaps: list[Gap]) -> None:
            super().__init__(snapshots)
            self._gaps = gaps

        @property
        def gaps(self) -> list[Gap]:
            return self._gaps

    first, second = Gap(0, 3, 4), Gap(0, 7, 7)
    run_named(WithGaps([batch_end(1), batch_end(2), batch_end(5)], [first]), tmp_path)
    statistics = run_named(WithGaps([batch_end(6), batch_end(8)], [first, second]), tmp_path)
    assert statistics.gaps == (first, second)


# -- files that are not as they were left -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("metrics.jsonl", lambda path: os.truncate(path, path.stat().st_size // 2)),
        ("metrics.csv", lambda path: path.write_bytes(b"step,time\nmy own notes," + path.read_bytes())),
    ],
    ids=["shorter", "changed"],
)
def test_a_changed_output_file_is_refused_and_left_unchanged(
    tmp_path: Path, name: str, spoil: Callable[[Path], None]
) -> None:
    run_named([batch_end(1, rows={"a": 1}), batch_end(2, rows={"a": 1})], tmp_path)
    spoil(tmp_path / name)
    found = (tmp_path / name).read_bytes()
    with pytest.raises(ConfigurationError, match=name):
        run_named([batch_end(3, rows={"b": 1})], tmp_path)
    assert (tmp_path / name).read_bytes() == found


def test_a_file_written_by_another_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics"

    def logged() -> Iterator[Snapshot]:
        for batch in (1, 2):
            yield batch_end(batch, rows={f"column {batch}": 1})
            with pytest.raises(ConfigurationError, match="metrics is being written by another process"):
                JsonlLogger(str(path), overwrite=True).open(RunContext("run", 1, None))

    Runner(logged(), [Averages()], [JsonlLogger(str(path))]).run()
    assert "column 2" in path.read_text()


# -- the state file ---------------------------------------------------------------------------------------------------


def test_each_attempt_has_a_private_state_file(tmp_path: Path) -> None:
    for attempt in (1, 2):
        with StateFile(tmp_path / "consumers", "mine", "run", attempt) as progress:
            Runner([batch_end(1)], [LRMonitor()], progress=progress).run()
    assert {path.name for path in (tmp_path / "consumers").iterdir()} == {
        *("mine-1.state", "mine-2.state", "mine.lock")
    }
    assert (tmp_path / "consumers").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "consumers").iterdir())


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    run_named([batch_end(1, rows={"a": 1})], tmp_path)
    path = tmp_path / "mine-1.state"
    whole = path.read_bytes()
    odd = [zlib.crc32(bad).to_bytes(4) + bad for bad in (b"", b"\xc1", b"\x90")]
    flipped = [whole[:at] + bytes([whole[at] ^ 64]) + whole[at + 1 :] for at in range(0, len(whole), 20)]
    with StateFile(tmp_path, "mine", "run", 1) as progress:
        for damaged in (*odd, *flipped, whole[:-1], b""):
            path.write_bytes(damaged)
            with pytest.raises(RecordingError):
                _ = progress.found


def test_a_name_used_for_another_run_of_the_same_name_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state"
    for losses in ([1.0, 0.5], [9.0]):
        run = write_run(tmp_path, "r", losses)
        command = ("--replay", str(run), "--name", "x", "--state-dir", str(state), "--callbacks", "metrics")
        done = subprocess.run([sys.executable, "-m", "offloop", "consume", *command], capture_output=True, text=True)
        shutil.rmtree(run)
    assert done.returncode == 1
    assert "x-1.state is of another run that was named 'r': choose another '--name'" in done.stderr


def test_a_name_used_with_other_callbacks_is_refused(tmp_path: Path) -> None:
    run_named([batch_end(1)], tmp_path)
    with pytest.raises(ConfigurationError):
        run_named([batch_end(2)], tmp_path, callbacks=[LRMonitor()])


# -- the command ------------------------------------------------------------------------------------------------------

CALLBACKS = """
from offloop.consumers import Callback

class Summary(Callback):
    "Counts batches and logs the number at the end."
    def __init__(self):
        self.count = 0
    def batch_end(self, state, logger):
        self.count += 1
        if self.count % 500 == 0:
            logger.log_metrics({f"column {self.count}": self.count})
    def close(self, state, logger):
        logger.log_metrics({"batches": self.count})
    def state_dict(self):
        return {"count": self.count}
    def load_state_dict(self, state):
        self.count = state["count"]
"""


@pytest.fixture
def command(tmp_path: Path, runs_dir: Path) -> Callable[..., list[str]]:
    """The consumer's command line with files of the given prefix."""
    (tmp_path / "mine.py").write_text(CALLBACKS)

    def make(prefix: str, *arguments: object) -> list[str]:
        paths = [f"{name}.path={tmp_path / f'{prefix}.{name}'}" for name in ("jsonl", "csv")]
        options = [word for option in ("speed.window_size=5", *paths) for word in ("-o", option)]
        callbacks = f"metrics,speed,lr,{tmp_path / 'mine.py'}:Summary"
        words = ["--callbacks", callbacks, "--log", "jsonl,csv", *options, *map(str, arguments)]
        return [sys.executable, "-m", "offloop.consumers", *words]

    return make


def finish(command: list[str]) -> tuple[int, list[str]]:
    """Runs a command to its end: exit code and lines of standard error."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    return done.returncode, done.stderr.splitlines()


def outputs(tmp_path: Path, prefix: str) -> list[bytes]:
    return [(tmp_path / f"{prefix}.{name}").read_bytes() for name in ("jsonl", "csv")]


def kill_when_written(command: list[str], path: Path, size: int) -> None:
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: path.exists() and path.stat().st_size >= size, f"{size} bytes in {path.name}")
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [3, pytest.param(25, marks=pytest.mark.soak)])
def test_kills_during_a_live_run_leave_equal_bytes(
    command: Callable[..., list[str]], runs_dir: Path, tmp_path: Path, kills: int
) -> None:
    named = command("killed", "--run", "r", "--name", "mine", "--commit-every", 20)
    path = tmp_path / "killed.jsonl"

    def kill_many_times() -> None:
        written = 0
        for _ in range(kills):
            kill_when_written(named, path, written + random.randrange(1, 20_000))
            written = path.stat().st_size

    def stop_when_done(event: Any, state: Any, logger: Any) -> None:
        # However long the kills take, the consumers are not far behind.
        time.sleep(0.005)
        if killing.done():
            state.stop_training()

    stop = [Act(stop_when_done, Event.BATCH_END)]
    trainer = gold_trainer(60, 6, max_duration="9999ep", algorithms=stop, publish=True, run_name="r")
    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill_many_times)
        trainer.fit()
        killing.result()
    last = subprocess.Popen(named, stderr=subprocess.PIPE, text=True)
    trainer.close()
    _, err = last.communicate(timeout=100)
    assert last.returncode == 0, err
    assert finish(command("undisturbed", "--replay", runs_dir / "r"))[0] == 0
    assert outputs(tmp_path, "killed") == outputs(tmp_path, "undisturbed")


def test_a_lost_run_is_continued_when_more_events_appear(
    command: Callable[..., list[str]], runs_dir: Path, tmp_path: Path
) -> None:
    directory = record_run(runs_dir, "r", snapshots_of_training(batches=40))
    recording = directory / "recording-1.mcap"
    whole = recording.read_bytes()
    recording.write_bytes(whole[: len(whole) // 2])
    named = command("lost", "--replay", directory, "--name", "mine")
    assert finish(named)[0] == 3
    recording.write_bytes(whole)
    code, lines = finish(named)
    assert (code, lines[-1]) == (0, "run r finished: 64 events handled")
    finish(command("undisturbed", "--replay", directory))
    assert outputs(tmp_path, "lost") == outputs(tmp_path, "undisturbed")


def test_a_second_consumer_of_one_name_is_refused(
    command: Callable[..., list[str]], runs_dir: Path, tmp_path: Path
) -> None:
    directory = record_run(runs_dir, "r", snapshots_of_training())
    with StateFile(directory / "consumers", "mine", "r", 1):
        code, lines = finish(command("second", "--run", "r", "--name", "mine"))
    assert (code, len(lines)) == (1, 1)
    assert not list(tmp_path.glob("second.*"))
