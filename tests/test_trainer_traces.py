"""Every event at its place, with its training time: row for row as in the recorded traces."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import REFERENCE
from training import Act, gold_evaluators, gold_trainer

from bus.event import Event
from bus.recording import Recording
from bus.snapshot import Snapshot
from trainer import State

NAMES = sorted(path.stem for path in REFERENCE.glob("trace_0*.json"))
STOPPED = sorted(path.stem for path in REFERENCE.glob("trace_11*.json"))


def load(name: str) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads((REFERENCE / f"{name}.json").read_text())
    return trace


def rows_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    events = [row for row in trace["trace"] if row[0] in Event.__members__]
    return [dict(zip(trace["columns"], row, strict=True)) for row in events]


def row_of(state: State | Snapshot, event: Event, rows_in_batch: int | None) -> dict[str, Any]:
    """The state, or what is seen of it, in the columns of a trace."""
    names = ("epoch", "batch", "batch_in_epoch", "sample", "sample_in_epoch", "iteration", "epoch_in_iteration")
    row: dict[str, Any] = {name: int(getattr(state.timestamp, name)) for name in names}
    for kind, timestamp in (("eval", state.eval_timestamp), ("predict", state.predict_timestamp)):
        row |= {f"{kind}_batch": int(timestamp.batch), f"{kind}_sample": int(timestamp.sample)}
    previous = state.previous_timestamp
    return row | {
        "event": event.name,
        "prev_batch": None if previous is None else int(previous.batch),
        "dataloader_label": state.dataloader_label,
        "dataloader_len": state.dataloader_len,
        "rows_in_state_batch": rows_in_batch,
        "max_duration": None if state.max_duration is None else str(state.max_duration),
    }


def train_as(config: dict[str, Any], **arguments: Any) -> list[dict[str, Any]]:
    """Trains the recorded job and returns the rows that an algorithm sees."""
    rows = []
    stop = config.get("stop")

    def note(event: Event, state: State, logger: object) -> None:
        if stop and (event.name, int(state.timestamp.batch)) == (stop["event"], stop["batch"]):
            state.stop_training()
        rows.append(row_of(state, event, None if state.batch is None else len(state.batch[0])))

    trainer = gold_trainer(
        config["n_train"],
        config["batch_size"],
        max_duration=config["max_duration"],
        eval_dataloader=gold_evaluators(config.get("evaluators", {})),
        eval_interval=config.get("eval_interval", 1),
        device_train_microbatch_size=config.get("device_train_microbatch_size"),
        algorithms=Act(note),
        **arguments,
    )
    with trainer:
        trainer.fit()
    return rows


def test_every_trace_is_there() -> None:
    assert len(NAMES) == 8
    assert len(STOPPED) == 2


@pytest.mark.parametrize("name", NAMES)
def test_events_fire_where_the_trace_shows_them(name: str) -> None:
    trace = load(name)
    assert train_as(trace["config"]) == rows_of(trace)


@pytest.mark.parametrize("name", STOPPED)
def test_stopping_finishes_the_batch_and_the_evaluations_that_are_due(name: str) -> None:
    trace = load(name)
    assert train_as(trace["config"]) == rows_of(trace)


@pytest.mark.parametrize("name", NAMES)
def test_the_recording_holds_the_rows_of_the_trace(name: str, runs_dir: Path) -> None:
    trace = load(name)
    train_as(trace["config"], publish=True, run_name="traced", record="all")
    recorded = [row_of(state, state.event, state.batch_size) for state in Recording(runs_dir / "traced")]
    assert recorded == rows_of(trace)
