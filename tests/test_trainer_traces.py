"""Every event at its place, with its training time: row for row as in the recorded traces."""

import json

import pytest
from gold import GoldMLP, gold_loader, gold_optimizer
from helpers import REFERENCE

from bus.event import Event
from trainer import Algorithm, Evaluator, State, Trainer

TRACES = sorted(path.stem for path in REFERENCE.glob("trace_0*.json"))
STOPPED = sorted(path.stem for path in REFERENCE.glob("trace_11*.json"))
COUNTERS = {"epoch": 1, "batch": 2, "batch_in_epoch": 7, "sample": 3, "sample_in_epoch": 8}
COUNTERS |= {"iteration": 0, "epoch_in_iteration": 5}


def row_of(event: Event, state: State) -> dict[str, object]:
    """The state in the columns of a trace."""
    row: dict[str, object] = {name: state.timestamp.values[index] for name, index in COUNTERS.items()}
    for kind, timestamp in (("eval", state.eval_timestamp), ("predict", state.predict_timestamp)):
        row |= {f"{kind}_batch": timestamp.values[2], f"{kind}_sample": timestamp.values[3]}
    previous = state.previous_timestamp
    return row | {
        "event": event.name,
        "prev_batch": None if previous is None else previous.values[2],
        "dataloader_label": state.dataloader_label,
        "dataloader_len": state.dataloader_len,
        "rows_in_state_batch": None if state.batch is None else len(state.batch[0]),
        "max_duration": None if state.max_duration is None else str(state.max_duration),
    }


class Recorder(Algorithm):
    """Notes the state at every event, after stopping the training if it is to stop there."""

    def __init__(self, stop=None):
        self.rows = []
        self._stop = stop and (Event(stop["event"]), stop["batch"])

    def match(self, event, state):
        return True

    def apply(self, event, state, logger):
        if self._stop == (event, int(state.timestamp.batch)):
            state.stop_training()
        self.rows.append(row_of(event, state))


def train_as(config):
    """Trains the recorded job and returns the rows of its events."""
    recorder = Recorder(config.get("stop"))
    model = GoldMLP()
    trainer = Trainer(
        model=model,
        train_dataloader=gold_loader("train", config["n_train"], config["batch_size"]),
        eval_dataloader=[
            Evaluator(label, gold_loader(label, loader["n"], loader["batch_size"]))
            for label, loader in config.get("evaluators", {}).items()
        ],
        optimizers=gold_optimizer(model),
        max_duration=config["max_duration"],
        eval_interval=config.get("eval_interval", 1),
        algorithms=recorder,
        seed=config["seed"],
        device="cpu",
        device_train_microbatch_size=config.get("device_train_microbatch_size"),
        publish=False,
        progress_bar=False,
    )
    with trainer:
        trainer.fit()
    return recorder.rows


def rows_of(trace):
    events = [row for row in trace["trace"] if row[0] in Event.__members__]
    return [dict(zip(trace["columns"], row, strict=True)) for row in events]


@pytest.mark.parametrize("name", TRACES)
def test_events_fire_where_the_trace_shows_them(name):
    trace = json.loads((REFERENCE / f"{name}.json").read_text())
    assert train_as(trace["config"]) == rows_of(trace)


@pytest.mark.parametrize("name", STOPPED)
def test_stopping_finishes_the_batch_and_the_evaluations_that_are_due(name):
    trace = json.loads((REFERENCE / f"{name}.json").read_text())
    assert train_as(trace["config"]) == rows_of(trace)


def test_every_trace_is_there():
    assert len(TRACES) == 8
    assert len(STOPPED) == 2
