"""Tests of callbacks without a training: ``replay`` and ``MemoryStream``."""

from pathlib import Path
from typing import Any

import pytest
from paths import RECORDINGS

from offloop.bus.errors import ClosedError, FieldNotAvailableError, OffloopError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.recording import Recording
from offloop.bus.types.event import Event
from offloop.consumers import Callback, JsonlLogger, Logger, LoggerDestination, LRMonitor, NaNMonitor, SpeedMonitor
from offloop.consumers.testing import Logged, MemoryStream, replay

EVALUATED = RECORDINGS / "evaluated.mcap"
TRAINERS_OWN = {"system", "seed", "train_samples", "evaluators", "eval_samples", "hyperparameters"}
"""Fields that a training has and a made stream has not."""


class Loss(Callback):
    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        logger.log_metrics({"loss": state.loss})


class Raises(Callback):
    def __init__(self, where: str) -> None:
        self.where = where

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        logger.log_metrics({"batch": state.timestamp.batch.value})
        if self.where == "batch_end":
            raise ValueError("a bug")

    def close(self, state: Snapshot, logger: Logger) -> None:
        if self.where == "close":
            raise ValueError("a bug at the end")


# -- replay -----------------------------------------------------------------------------------------------------------


def test_a_recording_is_replayed_from_a_path_an_object_and_snapshots_alike() -> None:
    sources: list[Any] = [EVALUATED, str(EVALUATED), Recording(EVALUATED), list(Recording(EVALUATED))]
    first, *others = [replay([LRMonitor(), SpeedMonitor(window_size=3)], source) for source in sources]
    assert [step for step, _ in first.metrics["lr-AdamW/group0"]] == list(range(1, 25))
    assert first.last["throughput/batches_per_sec"] == first.metrics["throughput/batches_per_sec"][-1][1]
    assert first.statistics.ending is not None
    assert first.statistics.ending.status == "finished"
    for other in others:
        assert other.rows == first.rows


@pytest.mark.parametrize("where", ["batch_end", "close"])
def test_an_error_of_a_callback_is_raised_with_its_traceback(where: str) -> None:
    stream = MemoryStream()
    stream.train(3)
    with pytest.raises(ValueError, match="a bug") as raised:
        replay([Loss(), Raises(where)], stream)
    assert raised.traceback[-1].name == where
    assert Path(str(raised.traceback[-1].path)) == Path(__file__)
    logged = replay([Loss(), Raises(where)], stream, on_error="continue")
    assert logged.statistics.errors == {"Loss": 0, "Raises": 3 if where == "batch_end" else 1}
    assert [value for _, value in logged.metrics["batch"]] == [1, 2, 3]


def test_a_given_logger_receives_rows_and_its_failure_fails_the_test(tmp_path: Path) -> None:
    class Failing(LoggerDestination):
        def log_rows(self, rows: Any, state: Snapshot) -> None:
            raise RuntimeError("the disk is full")

    stream = MemoryStream()
    stream.train(3)
    logged = replay(Loss(), stream, loggers=[JsonlLogger(tmp_path / "log.jsonl")])
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == len(logged.rows) == 3
    with pytest.raises(OffloopError, match="destination Failing failed"):
        replay(Loss(), stream, loggers=[Failing()])


# -- a made-up training -----------------------------------------------------------------------------------------------


def test_a_simulated_training_equals_a_recorded_one() -> None:
    made = MemoryStream(
        batches_per_epoch=12, batch_size=32, max_duration="2ep", evaluation={"eval": {"MulticlassAccuracy": 0.5}}
    )
    made.train()
    made.finish()
    recorded = list(Recording(EVALUATED))
    base = [one for one in made if one.event in {one.event for one in recorded}]
    for one, other in zip(base, recorded, strict=True):
        assert (one.event, one.dataloader_label, one.dataloader_len) == (
            other.event, other.dataloader_label, other.dataloader_len,
        )  # fmt: skip
        assert one.timestamp.values[1:3] == other.timestamp.values[1:3]
        for before, theirs in [(one.previous_timestamp, other.previous_timestamp)]:
            assert (before and before.batch) == (theirs and theirs.batch)
        assert one.base_seq == other.base_seq
        assert one.timestamp.sample == other.timestamp.sample
        assert set(one.fields) == set(other.fields) - TRAINERS_OWN
    assert [one.seq for one in made] == list(range(1, len(made) + 1))
    times = [one.time_ns for one in made]
    assert times == sorted(times)


def test_losses_rates_fields_and_metrics_are_functions_of_the_batch() -> None:
    stream = MemoryStream(
        loss=lambda batch: 1 / batch,
        lr=lambda batch: {"AdamW": [0.1 * batch, 0.2]},
        fields={"gradient_norm": lambda batch: 10 * batch},
        train_metrics=lambda batch: {"Accuracy": batch / 10},
        evaluation=lambda epoch: {"eval": {"Accuracy": epoch / 2}},
        batches_per_epoch=2,
        seconds_per_batch=0.5,
    )
    stream.train(4)
    ends = [one for one in stream if one.event is Event.BATCH_END]
    assert [one.loss for one in ends] == [1, 1 / 2, 1 / 3, 1 / 4]
    assert [one.lr["AdamW"] for one in ends] == [[0.1 * batch, 0.2] for batch in (1, 2, 3, 4)]
    assert [one.gradient_norm for one in ends] == [10, 20, 30, 40]
    assert [one.train_metrics["Accuracy"] for one in ends] == [0.1, 0.2, 0.3, 0.4]
    evaluations = [one for one in stream if one.event is Event.EVAL_END]
    assert [one.eval_metrics["eval"]["Accuracy"] for one in evaluations] == [0.5, 1.0]
    assert [one.timestamp.total_wct.total_seconds() for one in ends] == [0.5, 1.0, 1.5, 2.0]
    # The evaluation after the first epoch takes as long as a batch, and is not training.
    assert [one.time - 1_700_000_000 for one in ends] == [0.5, 1.0, 2.0, 2.5]


def test_fields_are_sent_only_to_callbacks_that_request_them() -> None:
    class Forgets(Callback):
        def batch_end(self, state: Snapshot, logger: Logger) -> None:
            logger.log_metrics({"norm": state.gradient_norm})

    stream = MemoryStream()
    stream.batch(gradient_norm=1.5)
    with pytest.raises(FieldNotAvailableError, match=r"fields = \('gradient_norm',\)"):
        replay(Forgets(), stream)
    assert replay(NaNMonitor(action="stop"), MemoryStream()).statistics.handled == 0


def test_every_rank_publishes_every_event() -> None:
    class Ranks(Callback):
        all_ranks = True

        def batch_end(self, state: Snapshot, logger: Logger) -> None:
            logger.log_metrics({f"loss/{state.rank}": state.loss, f"size/{state.rank}": state.batch_size})

    stream = MemoryStream(ranks=2, batch_size=7)
    stream.batch(loss=1.0, of_rank={1: {"loss": 2.0}})
    stream.batch()
    logged = replay([Ranks(), LRMonitor()], stream)
    assert [value for _, value in logged.metrics["loss/0"]] == [1.0, 1.0]
    assert [value for _, value in logged.metrics["loss/1"]] == [2.0, 1.0]
    assert (logged.last["size/0"], logged.last["size/1"]) == (4, 3)
    assert len(logged.metrics["lr-SGD/group0"]) == 2
    assert {one.world_size for one in stream} == {2}
    assert [one.seq for one in stream if one.rank == 1] == [one.seq for one in stream if one.rank == 0]


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: MemoryStream(ranks=0),
        lambda: MemoryStream().train(),
        lambda: MemoryStream().emit("batch_ends"),
    ],
)
def test_impossible_trainings_are_refused(mistake: Any) -> None:
    with pytest.raises(OffloopError):
        mistake()


def test_a_finished_training_accepts_nothing() -> None:
    stream = MemoryStream()
    stream.finish("failed", "out of memory")
    with pytest.raises(ClosedError, match="has failed: make a new MemoryStream"):
        stream.batch()
    with pytest.raises(ClosedError):
        stream.finish()

    class Ended(Callback):
        ending: Any = None

        def fit_end(self, state: Snapshot, logger: Logger) -> None:
            raise AssertionError("a training that fails has no such event")

        def run_ended(self, ending: Any) -> None:
            self.ending = ending

    ended = Ended()
    assert isinstance(replay(ended, stream), Logged)
    assert str(ended.ending) == "failed: out of memory"
