"""Recordings of every released version: this one reads them, and callbacks log the same numbers as ever."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from paths import RECORDINGS

from offloop.bus.recording.recording import Recording
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers import (
    ActivationMonitor,
    Callback,
    EarlyStopper,
    LRMonitor,
    MemoryMonitor,
    NaNMonitor,
    OptimizerMonitor,
    RuntimeEstimator,
    SpeedMonitor,
    StallMonitor,
    ThresholdStopper,
    TrainerMetrics,
)
from offloop.consumers.callbacks.phases import Phases
from offloop.consumers.testing import Golden, Logged

FACTS_OF = {
    f"{facts.parent.name}/{name}": told
    for facts in sorted(RECORDINGS.glob("*/facts.json"))
    for name, told in json.loads(facts.read_text()).items()
}
STOPPERS = {"EarlyStopper", "ThresholdStopper"}


def callbacks() -> list[Callback]:
    """Those that log numbers of the recording, and none of the machine that they run on."""
    return [
        TrainerMetrics(),
        SpeedMonitor(window_size=5),
        LRMonitor(),
        OptimizerMonitor(batch_log_interval=4),
        OptimizerMonitor(batch_log_interval=3, only_global=True),
        ActivationMonitor(interval=4),
        MemoryMonitor(),
        NaNMonitor(),
        RuntimeEstimator(),
        StallMonitor(),
        Phases(every=2, window=3),
        EarlyStopper("MulticlassAccuracy", "eval", min_delta=0.5),
        ThresholdStopper("CrossEntropy", "eval", 1.5, comp="less"),
    ]


def facts_of(path: Path) -> dict[str, Any]:
    """What every version is to find in a recording."""
    recording = Recording(path)
    counts: dict[int, Counter[str]] = {}
    on_demand: Counter[str] = Counter()
    for snapshot in recording:
        on_demand.update(snapshot.on_demand)
        counts.setdefault(snapshot.rank, Counter())[snapshot.event.value] += 1
        last: Timestamp = snapshot.timestamp
    return {
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "run": recording.run_name,
        "attempt": recording.attempt,
        "ending": [recording.ending.status, recording.ending.error] if recording.ending else None,
        "damaged": recording.damage is not None,
        "gaps": [list(gap) for gap in recording.gaps],
        "commands": [
            [str(outcome.command), outcome.event, outcome.batch, outcome.error] for outcome in recording.read_commands()
        ],
        "events": {str(rank): dict(sorted(counts[rank].items())) for rank in sorted(counts)},
        "on_demand": dict(sorted(on_demand.items())),
        "last": list(last.values),
    }


def path_of(name: str) -> Path:
    return RECORDINGS / f"{name}.mcap"


def test_every_recording_has_its_facts() -> None:
    files = {f"{path.parent.name}/{path.stem}" for path in RECORDINGS.glob("*/*.mcap")}
    assert files == set(FACTS_OF) != set()


@pytest.mark.parametrize("name", FACTS_OF)
def test_recordings_of_released_versions_have_unchanged_contents(name: str) -> None:
    found = facts_of(path_of(name))
    assert found.pop("sha256") == FACTS_OF[name]["sha256"], "a recording of a released version is never changed"
    assert found == {fact: value for fact, value in FACTS_OF[name].items() if fact != "sha256"}


@pytest.mark.parametrize("name", FACTS_OF)
def test_callbacks_log_the_same_numbers_for_old_recordings(
    name: str, replay: Callable[..., Logged], golden: Golden
) -> None:
    logged = replay(callbacks(), path_of(name), on_error="continue")
    # They say so when nothing was evaluated before the training was over.
    assert {callback for callback, errors in logged.statistics.errors.items() if errors} <= STOPPERS
    assert logged.rows
    golden.check(logged, f"recordings/{name}")
