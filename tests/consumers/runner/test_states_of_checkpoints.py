"""What callbacks know continues in an attempt that resumes from a checkpoint, from where that was saved."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from consumers_stream import Collector
from counting import Counter
from paths import SUPPORT
from resumed_callbacks import make

from offloop.bus import Event, Publisher, Timestamp
from offloop.bus.index.manage import rename_run
from offloop.bus.recording.recording import Recording
from offloop.bus.runs.directory import find_run
from offloop.consumers import Callback, LRMonitor, Runner, StallMonitor
from offloop.consumers.runner.checkpoint_states import CheckpointStates
from offloop.consumers.runner.runner import RunnerStatistics

KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
torch.set_num_threads(1)
from offloop.bus import Event
from resumed_callbacks import make
from training import Act
def die(event, state, logger):
    if state.timestamp.batch == 10:
        while not trainer.recorded_all:
            trainer._publisher.wait()
        os.kill(os.getpid(), signal.SIGKILL)
with make(Path(sys.argv[2]), "killed", algorithms=Act(die, Event.BATCH_START)) as trainer:
    trainer.fit()
"""


def counts(path: Path) -> dict[int, dict[str, int]]:
    found: dict[int, dict[str, int]] = {}
    for row in map(json.loads, path.read_text().splitlines()):
        told = {name: value for name, value in row.items() if name.endswith(("count", "evaluations"))}
        if told:
            found.setdefault(row["step"], {}).update(told)
    return found


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_killed_training_resumes_with_the_callback_states_of_the_checkpoint(
    tmp_path: Path, runs_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    watch = [sys.executable, "-m", "offloop.consumers", "--run", "killed", "--runs-dir", str(runs_dir)]
    watch += ["--name", "watcher", "--callbacks", f"{SUPPORT / 'counting.py'}:Counter", "--log", "jsonl", "-o"]
    command = [sys.executable, "-c", KILLED, str(SUPPORT), str(tmp_path)]
    assert subprocess.run(command, timeout=120).returncode == -signal.SIGKILL
    # It has seen batch 10, too, of which the checkpoint knows nothing.
    assert subprocess.run([*watch, f"jsonl.path={tmp_path / '1.jsonl'}"], timeout=60).returncode == 3
    assert len(counts(tmp_path / "1.jsonl")) == 10

    capfd.readouterr()
    with make(tmp_path, "killed") as resumed:
        assert int(resumed.state.timestamp.batch) == 9
        resumed.fit()
    # As a training that nothing interrupts is stopped, with the last evaluation included.
    assert int(resumed.state.timestamp.batch) == 16
    assert resumed.state.stop_reason
    assert subprocess.run([*watch, f"jsonl.path={tmp_path / '2.jsonl'}"], timeout=60).returncode == 0

    watched = {batch: {"count": batch, "evaluations": (batch - 1) // 4} for batch in range(10, 17)}
    own = {batch: told | {f"slow_{name}": n for name, n in told.items()} for batch, told in watched.items()}
    assert counts(find_run("killed").path / "metrics-2.jsonl") == own
    assert counts(tmp_path / "2.jsonl") == watched
    assert "begins anew" not in capfd.readouterr().err


def time_of(batch: int, attempt: int = 1) -> tuple[int, ...]:
    """A batch that is trained again does not take as long as before."""
    return Timestamp(batch=batch, total_wct=timedelta(seconds=batch, microseconds=attempt)).values


def publish(run: str, batches: range, saved: Collection[int] = (), loaded: dict[str, Any] | None = None) -> None:
    with Publisher(run, max_delay=0, resume=True) as publisher:
        publisher.publish(Event.BEFORE_LOAD)
        if loaded is not None:
            publisher.mark_checkpoint("load", **loaded)
        for batch in batches:
            publisher.publish(Event.BATCH_END, batch=batch, loss=1.0)
            if batch in saved:
                publisher.mark_checkpoint("save", time_of(batch, publisher.attempt))


def watch(run: Path, attempt: int, *callbacks: Callback) -> RunnerStatistics:
    return Runner(Recording(run, attempt), callbacks, at_checkpoint=CheckpointStates("watcher").take).run()


@pytest.fixture
def resumed_twice(runs_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose second attempt goes on after batch 4 of the first, and the third one after batch 6 of the second."""
    kept = tmp_path_factory.getbasetemp() / "resumed twice"
    if not kept.exists():
        publish("r", range(1, 8), saved=(2, 4))
        publish("r", range(5, 8), saved=(6,), loaded={"timestamp": time_of(4)})
        publish("r", range(7, 10), loaded={"timestamp": time_of(6, 2)})
        shutil.copytree(runs_dir / "r", kept)
    return Path(shutil.copytree(kept, runs_dir / "r", dirs_exist_ok=True))


def test_each_attempt_continues_from_the_checkpoint(resumed_twice: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    for attempt in (1, 2, 3):
        counter = Counter()
        watch(resumed_twice, attempt, counter)
        seen.append(counter.batches)
    assert seen == [[*range(1, 8)], [*range(1, 8)], [*range(1, 10)]]
    kept = sorted(
        path.name.partition("-")[0] for path in (resumed_twice / "consumers" / "watcher.checkpoints").iterdir()
    )
    assert kept == ["ba2", "ba4", "ba6"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("known", ["", "ba4-"])
def test_a_late_consumer_reads_up_to_the_checkpoint_first(
    resumed_twice: Path, known: str, capsys: pytest.CaptureFixture[str]
) -> None:
    watch(resumed_twice, 1, Counter())
    for path in (resumed_twice / "consumers" / "watcher.checkpoints").iterdir():
        if not (known and path.name.startswith(known)):
            path.unlink()
    loggers = [Collector()]
    counter = Counter()
    states = CheckpointStates("watcher")
    Runner(Recording(resumed_twice, 3), [counter, LRMonitor()], loggers, at_checkpoint=states.take).run()
    assert counter.batches == [*range(1, 10)]
    # What it logs about the other attempts belongs into their files, and is not written here.
    assert [row.metrics["count"] for row in loggers[0].rows] == [7, 8, 9]
    assert len(capsys.readouterr().err.splitlines()) == (1 if known == "ba4-" else 2)


def test_callbacks_without_a_state_start_anew_with_a_warning(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # As of a checkpoint that was saved without a stream.
    publish("r", range(5, 7), loaded={"timestamp": time_of(4)})
    counter = Counter()
    watch(runs_dir / "r", 1, counter, LRMonitor(), StallMonitor())
    assert counter.batches == [5, 6]
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "Counter begins anew: no state was kept for the checkpoint at batch 4 of run r, and no recording"
    )


def test_a_checkpoint_of_another_or_a_renamed_run_brings_its_callback_states(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish("old", range(1, 4), saved=(2,))
    watch(runs_dir / "old", 1, Counter())
    for run, attempt in (("another", 1), ("renamed", 2)):
        if run == "renamed":
            rename_run(runs_dir / "old", "renamed")
        publish(run, range(3, 5), loaded={"timestamp": time_of(2), "run": "old"})
        counter = Counter()
        watch(runs_dir / run, attempt, counter)
        assert counter.batches == [1, 2, 3, 4]
        assert "up to the checkpoint" not in capsys.readouterr().err


def test_a_damaged_state_is_reported_and_rebuilt_from_the_recording(
    resumed_twice: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    watch(resumed_twice, 1, Counter())
    (damaged,) = resumed_twice.glob("consumers/watcher.checkpoints/ba4-*")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    counter = Counter()
    watch(resumed_twice, 2, counter)
    assert counter.batches == [*range(1, 8)]
    first, second = capsys.readouterr().err.splitlines()
    assert str(damaged) in first
    assert "is damaged" in first
    assert second.startswith("watcher: reading ")


def test_states_of_the_newest_checkpoints_are_kept(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offloop.consumers.runner.checkpoint_states._KEPT", 2)
    publish("r", range(1, 6), saved=range(1, 6))
    watch(runs_dir / "r", 1, Counter())
    kept = (runs_dir / "r" / "consumers" / "watcher.checkpoints").iterdir()
    assert sorted(path.name.partition("-")[0] for path in kept) == ["ba4", "ba5"]
