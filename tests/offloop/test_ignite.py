"""A training with Ignite, attached: what is published of it, what can be done to it; and it stays what it was."""

from pathlib import Path
from typing import Any

import ignite
import pytest
import torch
from attached_runs import (
    RUN,
    break_down,
    ending,
    events_of,
    logged_in,
    note_marks,
    snapshots_of,
    values_of,
)
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from ignite_jobs import LENGTH, ROWS, SIZE, Training

from offloop.bus.errors import ConfigurationError
from offloop.bus.runs.directory import find_run
from offloop.bus.types.event import Event
from offloop.ignite import OffloopLogger

pytestmark = pytest.mark.usefixtures("runs_dir")
STEP = ["before_forward", "after_forward", "before_backward", "after_backward"]
EVALUATED = ["eval_before_all", "eval_start", *["eval_batch_start", "eval_batch_end"] * 3, "eval_end", "eval_after_all"]


def expected(accumulate: int) -> list[str]:
    found, iterations, place = ["init", "fit_start"], 0, ""
    for _ in range(2):
        found += [place, "epoch_start"]
        place = ""
        for _ in range(LENGTH):
            found += [
                place,
                "before_dataloader",
                "after_dataloader",
                "" if iterations % accumulate else "batch_start",
                *STEP,
            ]
            iterations += 1
            ends = iterations % accumulate == 0
            found += ["after_train_batch", "batch_end"] if ends else []
            place = "batch_checkpoint" if ends else ""
        found += [place, "epoch_end", *EVALUATED]
        place = "epoch_checkpoint"
    return [name for name in [*found, place, "fit_end"] if name]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_events_loss_rates_and_training_time_are_those_of_the_trainer(accumulate: int) -> None:
    training = Training(accumulate).attach(record="all", config={"depth": 3}).train()
    assert events_of() == expected(accumulate)

    steps = 2 * LENGTH // accumulate
    ends = [one for one in snapshots_of() if one.event is Event.BATCH_END]
    means = [sum(training.losses[at * accumulate : (at + 1) * accumulate]) / accumulate for at in range(steps)]
    assert [one.loss for one in ends] == pytest.approx(means, abs=1e-6)
    assert [one.lr["AdamW"][0] for one in ends] == pytest.approx(training.rates, abs=1e-12)
    assert [one.timestamp.batch.value for one in ends] == list(range(1, steps + 1))
    assert {one.dataloader_len for one in ends} == {None if LENGTH % accumulate else LENGTH // accumulate}
    last = snapshots_of()[-1]
    assert (last.timestamp.epoch.value, str(last.max_duration)) == (2, "2ep")
    if accumulate == 1:
        assert last.timestamp.sample.value == 2 * ROWS
        # A metric of an epoch is logged when it is computed.
        assert list(logged_in()["metrics/train/mean"]) == [9, 19]
    evaluations = [one.eval_metrics["val"]["accuracy"] for one in snapshots_of() if one.event is Event.EVAL_END]
    assert evaluations == training.accuracies
    smooth = logged_in()["metrics/train/smooth"]
    assert smooth[max(smooth)] == pytest.approx(training.trainer.state.metrics["smooth"], abs=1e-6)

    first = snapshots_of()[0]
    assert set(first.unavailable["events"]) == {event.value for event in Event} - set(events_of())
    info = find_run(RUN).last.info
    assert info["unavailable"] == first.unavailable
    assert info["framework"] == {"name": "Ignite", "version": ignite.__version__}
    known = snapshots_of()[1].hyperparameters
    assert (known["config/depth"], known["config/gradient_accumulation_steps"]) == (3, accumulate)


def test_the_model_has_hooks_only_until_its_precision_is_known() -> None:
    training = Training().attach()
    has_hooks: list[bool] = []
    net = training.net
    training.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: has_hooks.append(bool(net._forward_hooks)))
    training.train()
    assert has_hooks == [True] + [False] * (2 * LENGTH - 1)
    assert snapshots_of()[-1].precision == "fp32"


def test_an_output_of_any_kind_becomes_the_loss_and_metrics() -> None:
    net = torch.nn.Linear(2, 1)
    optimizers = [torch.optim.SGD([one], lr=0.1) for one in net.parameters()]

    def step(engine: Engine, batch: Any) -> Any:
        loss = net(batch).mean()
        loss.backward()
        for one in optimizers:
            one.step()
        return net(batch), loss, "text"

    trainer = Engine(step)

    def transform(output: Any) -> dict[str, Any]:
        return {"loss": output[1] * float("nan"), "mean": output[0].mean(), "text": output[2], "rows": output[0]}

    logger = OffloopLogger(run_name=RUN).attach(trainer, optimizers, output_transform=transform)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: logger.log(more=2))
    trainer.run([torch.ones(3, 2)] * 4)
    losses = values_of(Event.BATCH_END, "loss")
    assert len(losses) == 4
    assert all(loss != loss for loss in losses)
    assert set(logged_in()) == {"metrics/train/mean", "more"}
    assert list(logged_in()["more"]) == list(logged_in()["metrics/train/mean"]) == [0, 1, 2, 3]


@pytest.mark.parametrize("where", ["function", "handler"])
@pytest.mark.parametrize("is_handled", [False, True])
def test_the_last_batch_before_an_error_has_no_output_of_another(where: str, is_handled: bool) -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def fail(engine: Engine, place: str) -> None:
        if engine.state.iteration == 3 and where == place:
            raise ZeroDivisionError

    def step(engine: Engine, batch: Any) -> Any:
        loss = net(batch).mean()
        loss.backward()
        optimizer.step()
        fail(engine, "function")
        return float(engine.state.iteration)

    trainer = Engine(step)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, fail, "handler")
    if is_handled:
        trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda error: (_ for _ in ()).throw(error))
    OffloopLogger(run_name=RUN).attach(trainer, optimizer)
    with pytest.raises(ZeroDivisionError):
        trainer.run([torch.ones(3, 2)] * 4)
    assert values_of(Event.BATCH_END, "loss") == [1.0, 2.0, 3.0][: 2 + (where == "handler" and not is_handled)]


def test_iterations_are_counted_after_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Training(2).attach().train().logger.state_dict()
    break_down(monkeypatch, "add_loss")
    training = Training(2).attach().train()
    assert training.logger.run.detached
    assert training.logger.state_dict()["timestamp"][:10] == counted["timestamp"][:10]


def test_a_training_resumes_from_a_checkpoint_of_ignite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = note_marks(monkeypatch)
    training = Training().attach()

    def parts(one: Training) -> dict[str, Any]:
        return {"trainer": one.trainer, "model": one.net, "optimizer": one.optimizer, "offloop": one.logger}

    saver = Checkpoint(parts(training), DiskSaver(str(tmp_path)), n_saved=None)
    training.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=13), saver)
    training.train()
    (path,) = tmp_path.iterdir()

    again = Training().attach()
    Checkpoint.load_objects(parts(again), checkpoint=torch.load(path))
    again.train()
    assert marks == [("save", 13), ("load", 13)]
    started, *ends = (one for one in snapshots_of(attempt=2) if one.event in (Event.FIT_START, Event.BATCH_END))
    assert (started.timestamp.batch.value, started.timestamp.batch_in_epoch.value) == (13, 3)
    assert started.timestamp.sample.value == ROWS + 3 * SIZE
    assert [one.timestamp.batch.value for one in ends] == list(range(14, 21))
    assert [name for name in events_of(attempt=2) if name in ("epoch_start", "epoch_end")] == ["epoch_end"]
    assert snapshots_of(attempt=2)[-1].timestamp.epoch.value == 2


def test_a_second_run_of_the_trainer_is_another_attempt_that_counts_on() -> None:
    training = Training().attach().train(1).train(2)
    assert events_of(attempt=1)[-1] == events_of(attempt=2)[-1] == "fit_end"
    assert [one.timestamp.batch.value for one in snapshots_of(attempt=2) if one.event is Event.BATCH_END] == list(
        range(11, 21)
    )
    training.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=23), lambda: training.trainer.terminate(True))
    training.train(3)
    assert snapshots_of(attempt=3)[-1].timestamp.batch.value == 23
    assert ending().status == "finished"
    # Nothing stays in what was watched.
    assert not training.net._forward_pre_hooks
    training.evaluator.run(training.loader)


def test_what_cannot_be_attached_to_is_refused_at_once() -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = Engine(lambda engine, batch: None)
    with pytest.raises(ConfigurationError, match="uses 0 models with parameters of the optimizer: give the one to"):
        OffloopLogger().attach(trainer, optimizer)
    with pytest.raises(ConfigurationError, match=r"val is list: give an ignite.engine.Engine"):
        OffloopLogger().attach(trainer, optimizer, {"val": []}, model=net)  # type: ignore[dict-item]
