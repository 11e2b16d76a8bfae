"""RuntimeEstimator: the reference's numbers, live, in a replay, and after the consumer was killed."""

import json
from datetime import timedelta

import pytest
from callback_calls import calls_of, goes_on_alike
from helpers import REFERENCE
from reference_options import OPTIONS, snapshots_of_run

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers.callbacks.runtime_estimator import RuntimeEstimator

GOLDEN = json.loads((REFERENCE / "cb_runtime_estimator.json").read_text())
RUNS = GOLDEN["runs"]


def snapshots_of(run: str) -> list[Snapshot]:
    return [Snapshot.build(Event.INIT), *snapshots_of_run(GOLDEN["input_columns"], RUNS[run]["inputs"])]


@pytest.mark.parametrize("run", RUNS)
def test_estimates_are_those_of_the_reference_also_of_a_consumer_that_goes_on(run: str) -> None:
    calls = calls_of(RuntimeEstimator(**OPTIONS[run]), snapshots_of(run))
    assert calls.calls == RUNS[run]["logged"]
    assert calls.hyperparameters == RUNS[run]["hyperparameters"]
    goes_on_alike(lambda: RuntimeEstimator(**OPTIONS[run]), snapshots_of(run), step=3)


def test_a_recording_without_batch_start_counts_from_the_end_of_the_batch_before() -> None:
    snapshots = [one for one in snapshots_of("sp_skip0_hours") if one.event is not Event.BATCH_START]
    calls = calls_of(RuntimeEstimator(time_unit="seconds"), snapshots).calls
    assert [step for step, _, _ in calls] == [2, 3, 4, 5, 6, 7, 8]
    # The second batch took 0.6875 s with its wait for the data, and brought a run of 8 batches from 1/8 to 2/8.
    assert calls[0][2]["time/remaining_estimate"] == pytest.approx(0.6875 / (1 / 8) * (6 / 8))
    assert calls[-1][2]["time/remaining_estimate"] == 0


def test_a_loop_without_durations_of_batches_counts_from_its_first_counted_batch() -> None:
    def batch(number: int) -> Snapshot:
        now, before = (Timestamp(batch=one, total_wct=timedelta(seconds=one)) for one in (number, number - 1))
        times = {"timestamp": now, "previous_timestamp": before, "time_ns": number * 10**9}
        return Snapshot.build(Event.BATCH_END, max_duration="10ba", **times)

    calls = calls_of(RuntimeEstimator(time_unit="seconds"), map(batch, range(1, 11))).calls
    assert [metrics["time/remaining_estimate"] for _, _, metrics in calls] == pytest.approx([*range(7, -1, -1)])


def test_a_run_without_a_duration_says_once_that_nothing_can_be_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    stream = [Snapshot.build(event) for event in (Event.BATCH_START, Event.BATCH_END, Event.EVAL_END) * 3]
    assert calls_of(RuntimeEstimator(), stream).calls == []
    assert capsys.readouterr().err.count("max_duration") == 1
