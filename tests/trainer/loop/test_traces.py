"""Every event at its place, with its training time: row for row as in the recorded traces."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gold import GoldMLP, gold_loader
from helpers import REFERENCE
from training import Act, fitted, gold_evaluators, gold_trainer

from offloop.bus.errors import ClosedError, ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.recording import Recording
from offloop.bus.runs.directory import find_run
from offloop.bus.types.event import Event
from offloop.trainer import State, Trainer

# Those of one call of fit(); the others are played below.
SEVERAL_CALLS = {"trace_06_standalone_eval", "trace_07_predict", "trace_08_two_fits", "trace_09_resume_mid_epoch"}
ONE_CALL = {path.stem for path in REFERENCE.glob("trace_0*.json")} - SEVERAL_CALLS
STOPPED = [path.stem for path in REFERENCE.glob("trace_11*.json")]
NAMES = sorted([*ONE_CALL, *STOPPED, "trace_12_iteration_length_1ep"])
assert len(NAMES) == 11


def load(name: str) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads((REFERENCE / f"{name}.json").read_text())
    return trace


def rows_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    events = [row for row in trace["trace"] if row[0] in Event.__members__]
    return [dict(zip(trace["columns"], row, strict=True)) for row in events]


def row_of(state: State | Snapshot, event: Event, rows_in_batch: int | None) -> dict[str, Any]:
    """Return the state, or what is seen of it, in the columns of a trace."""
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


def trainer_as(config: dict[str, Any], rows: list[dict[str, Any]], **arguments: Any) -> Trainer:
    """Return a trainer of the recorded job, which appends the rows that an algorithm sees."""
    stop = config.get("stop")

    def note(event: Event, state: State, logger: object) -> None:
        if stop and (event.name, int(state.timestamp.batch)) == (stop["event"], stop["batch"]):
            state.stop_training()
        rows.append(row_of(state, event, None if state.batch is None else len(state.batch[0])))

    settings = {
        "max_duration": config["max_duration"],
        "eval_dataloader": gold_evaluators(config.get("evaluators", {})),
        "eval_interval": config.get("eval_interval", 1),
        "device_train_microbatch_size": config.get("device_train_microbatch_size"),
        "iteration_length": config.get("_iteration_length"),
        "algorithms": Act(note),
    }
    return gold_trainer(config["n_train"], config["batch_size"], **(settings | arguments))


def train_as(config: dict[str, Any], **arguments: Any) -> list[dict[str, Any]]:
    """Trains the recorded job and returns the rows that an algorithm sees."""
    rows: list[dict[str, Any]] = []
    with trainer_as(config, rows, **arguments) as trainer:
        trainer.fit()
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_events_fire_where_the_trace_shows_them_and_are_recorded(name: str, runs_dir: Path) -> None:
    trace = load(name)
    assert train_as(trace["config"], publish=True, run_name="traced", record="all") == rows_of(trace)
    recorded = [row_of(state, state.event, state.batch_size) for state in Recording(runs_dir / "traced")]
    assert recorded == rows_of(trace)


def test_evaluations_by_themselves_are_those_of_the_trace() -> None:
    trace = load("trace_06_standalone_eval")
    rows: list[dict[str, Any]] = []
    with trainer_as(trace["config"], rows) as trainer:
        first = trainer.eval()
        trainer.fit()
        trainer.eval()
        other = trainer.eval(gold_loader("eval_b", 8, 4))
    assert rows == rows_of(trace)
    assert set(first) == {"eval_a", "eval_b"}
    assert other["eval"] == trainer.state.eval_metric_values["eval_b"]


def test_predictions_are_those_of_the_trace() -> None:
    trace = load("trace_07_predict")
    rows: list[dict[str, Any]] = []
    loader = gold_loader("predict", 7, 3)
    with trainer_as(trace["config"], rows) as trainer:
        before = trainer.predict(loader)
        trainer.fit()
        after = trainer.predict(loader, subset_num_batches=2)
    assert rows == rows_of(trace)
    for ours, theirs in ((before, "predict_outputs_before_fit"), (after, "predict_outputs_after_fit_first2")):
        expected = trace[theirs]
        assert len(ours) == len(expected)
        for outputs, values in zip(ours, expected, strict=True):
            assert torch.allclose(outputs, torch.tensor(values), atol=1e-6)


def test_outputs_can_be_passed_to_a_function() -> None:
    taken: list[tuple[int, tuple[int, ...]]] = []
    with gold_trainer() as trainer:
        kept = trainer.predict(
            gold_loader("predict", 7, 3), on_outputs=lambda batch, outputs: taken.append((len(batch[0]), outputs.shape))
        )
    assert kept == []
    assert taken == [(3, (3, 4)), (3, (3, 4)), (1, (1, 4))]


def test_several_fits_continue_where_the_last_one_ended() -> None:
    trace = load("trace_08_two_fits")
    rows: list[dict[str, Any]] = []
    with trainer_as(trace["config"], rows) as trainer:
        for duration in ("1ep", "1ep", "3ba", "1ep", "5sp"):
            trainer.fit(duration=duration)
        with pytest.raises(ConfigurationError, match="'77sp'"):
            trainer.fit()
        trainer.fit(duration="1ep", reset_time=True)
    assert rows == rows_of(trace)


def test_a_training_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    trace = load("trace_09_resume_mid_epoch")
    config = trace["config"]
    settings = {"save_folder": tmp_path, "save_interval": config["save_interval"]}
    expected = [dict(zip(trace["run_a_trace_columns"], row, strict=True)) for row in trace["run_a_trace"]]
    rows: list[dict[str, Any]] = []
    with trainer_as(config, rows, max_duration="6ba", **settings) as trainer:
        trainer.fit()
    assert rows == [row for row in expected if row["event"] in Event.__members__]
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(
        name.removesuffix(".pt") for name in trace["run_a_files"]
    )

    rows.clear()
    checkpoint = tmp_path / "ep1-ba6-rank0.safetensors"
    with trainer_as(config, rows, max_duration="3ep", load_path=checkpoint) as trainer:
        trainer.fit()
    assert rows == rows_of(trace)


def test_an_exception_in_the_loop_arrives_unchanged_and_ends_the_run_as_failed(runs_dir: Path) -> None:
    trace = load("trace_10_exception_in_forward")
    rows: list[dict[str, Any]] = []

    class Failing(GoldMLP):
        calls = 0

        def forward(self, batch: Any) -> Any:
            self.calls += 1
            if self.calls == 3:
                raise ValueError("boom in forward")
            return super().forward(batch)

    trainer = trainer_as(trace["config"], rows, model=Failing(), publish=True, run_name="broken")
    with pytest.raises(ValueError, match=r"^boom in forward$"):
        trainer.fit()
    trainer.close()
    trainer.close()
    assert rows == rows_of(trace)
    ending = find_run("broken").last
    assert (ending.status, ending.error) == ("failed", "ValueError: boom in forward")
    with pytest.raises(ClosedError):
        trainer.fit()


MATRIX = json.loads((REFERENCE / "interval_matrix.json").read_text())["matrix"]


@pytest.mark.slow
@pytest.mark.parametrize("case", MATRIX, ids=[f"{one['max_duration']}-{one['interval']}" for one in MATRIX])
def test_evaluations_and_checkpoints_come_when_those_of_the_reference_come(
    case: dict[str, Any], tmp_path: Path
) -> None:
    saves: list[list[Any]] = []
    evaluations: list[list[Any]] = []
    seen: set[str] = set()

    def look(event: Event, state: State, logger: object) -> None:
        if event is Event.EVAL_BEFORE_ALL:
            evaluations.append([last[0], *state.timestamp.values[1:4]])
        # A checkpoint of an event is there at the next one.
        files = {path.name for path in tmp_path.glob("ep*")}
        if files - seen:
            saves.append(last[:])
        seen.update(files)
        last[:] = [event.name, *state.timestamp.values[1:4]]

    last: list[Any] = []
    fitted(
        20,
        max_duration=case["max_duration"],
        eval_dataloader=gold_evaluators({"eval_b": {"n": 8, "batch_size": 4}}),
        eval_interval=case["interval"],
        save_folder=tmp_path,
        save_interval=case["interval"],
        algorithms=Act(look),
    )
    assert saves == case["checkpoint_saves"]
    assert evaluations == case["eval_runs"]
