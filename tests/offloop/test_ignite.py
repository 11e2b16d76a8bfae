"""A training with Ignite, attached: what is published of it, what can be done to it; and it stays what it was."""

import importlib
import logging
import sys
from pathlib import Path
from typing import Any

import ignite
import pytest
import torch
from attached_callbacks import Requests
from attached_runs import (
    RUN,
    Sender,
    are_same,
    break_down,
    ending,
    events_of,
    logged_in,
    note_marks,
    run_two_ranks,
    snapshots_of,
    values_of,
    weights_of,
)
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from ignite_jobs import LENGTH, ROWS, SIZE, Training

from offloop.bus.errors import ConfigurationError
from offloop.bus.runs.directory import find_run, list_runs
from offloop.bus.types.commands import Command
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


@pytest.mark.parametrize("accumulate", [1, 2, 3])
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


def test_commands_are_done_and_what_cannot_be_done_is_refused_with_the_reason() -> None:
    heat: list[float] = []

    def set_heat(value: Any) -> None:
        heat.append(float(value))

    def evaluate() -> None:
        training.evaluator.run([(torch.ones(4, 8), torch.ones(4, dtype=torch.long))])

    training = Training().attach(evaluate, on_set={"heat": set_heat})
    commands = [("pause",), ("resume",), ("set", "lr", 0.5), ("set", "heat", 3), ("set", "heat", "hot")]
    sender = Sender(*commands, ("set", "eval", "now"), ("checkpoint",), ("stop",))
    training.after_iteration = lambda: sender.step(len(training.losses))
    training.train(100_000)
    errors = [one.error for one in sender.outcomes]
    assert [errors[index] for index in (0, 1, 2, 3, 5, 7)] == [None] * 6
    assert "could not convert" in str(errors[4])
    assert errors[6] == "cannot save a checkpoint on command: give OffloopLogger.attach() a function checkpoint="
    assert heat == [3.0]
    assert max(training.rates) == 0.5 * 0.9
    evaluated = [one for one in snapshots_of() if one.event is Event.EVAL_END and one.eval_timestamp.batch.value == 1]
    assert [one.timestamp.batch.value for one in evaluated] == [sender.outcomes[5].batch]
    assert len(training.rates) == sender.outcomes[-1].batch == len(values_of(Event.BATCH_END, "loss"))
    assert ending().status == "stopped"
    assert training.logger.run.stop_reason is not None


def test_stop_ends_the_training_after_the_iteration() -> None:
    training = Training().attach()

    def stop() -> None:
        if len(training.losses) == 5:
            training.logger.run._training._control.take(Command("stop", (), id="stop"))

    training.after_iteration = stop
    training.train()
    assert len(training.losses) == len(values_of(Event.BATCH_END, "loss")) == 5
    assert events_of()[-1] == "fit_end"


def test_fields_on_demand_are_what_the_model_has() -> None:
    training = Training(2).attach(
        callbacks=Requests("gradient_norm", "parameter_norm", "moment_norms", "update_norms", "phases", "weights")
    )
    norms: list[float] = []
    training.after_iteration = lambda: norms.append(
        float(torch.nn.utils.get_total_norm(list(training.net.parameters())))
    )
    training.train(1)
    assert values_of(Event.BATCH_END, "gradient_norm") == pytest.approx(training.norms, rel=1e-6)
    assert values_of(Event.BATCH_END, "parameter_norm") == pytest.approx(norms[1::2], rel=1e-6)
    last = next(one for one in reversed(snapshots_of()) if one.event is Event.BATCH_END)
    parameters = {name for name, _ in training.net.named_parameters()}
    assert set(last.update_norms) == set(last.moment_norms) == parameters
    assert min(last.update_norms.values()) > 0
    weights = {name: torch.from_numpy(value.numpy().copy()) for name, value in last.weights.items()}
    assert are_same(weights, weights_of(training.net))
    assert {"data", "forward", "backward", "optimizer"} <= {name for name, _, _ in last.phases["spans"]}


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


@pytest.mark.parametrize("method", ["__init__", "batch_start", "add_loss", "epoch_end"])
def test_an_error_of_ours_is_shown_once_and_the_training_continues_and_is_counted(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = weights_of(Training(2).train().net)
    counted = Training(2).attach().train().logger.state_dict()

    break_down(monkeypatch, method)
    with caplog.at_level(logging.ERROR, "offloop"):
        training = Training(2).attach().train()
    assert are_same(plain, weights_of(training.net))
    assert sum("a defect of ours" in one.message for one in caplog.records) == 1
    assert training.logger.run.detached
    assert training.logger.state_dict()["timestamp"][:10] == counted["timestamp"][:10]
    if method != "__init__":
        assert "a defect of ours" in str(ending(f"{RUN}-2").error)


@pytest.mark.parametrize(("error", "status"), [(ValueError("wrong"), "failed"), (KeyboardInterrupt(), "stopped")])
def test_an_error_of_the_training_reaches_the_caller_and_ends_the_run(error: BaseException, status: str) -> None:
    training = Training().attach()

    def fail() -> None:
        if len(training.losses) == 5:
            raise error

    training.after_iteration = fail
    with pytest.raises(type(error)):
        training.train()
    assert ending().status == status
    # As the cell of a notebook does that is run again.
    Training().attach().train(1)
    assert ending(f"{RUN}-2").status == "finished"


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


@pytest.mark.slow
def test_two_ranks_do_what_they_are_commanded_at_the_same_batch(tmp_path: Path) -> None:
    (zero, one), _ = run_two_ranks("ignite_jobs", tmp_path)
    assert zero.pop("errors") == [None] * 6
    assert one.pop("errors") is None
    assert zero == one
    assert [what for what, _ in zero["seen"]] == ["heat", "evaluate", "checkpoint"]
    for rank in (0, 1):
        ends = [one for one in snapshots_of(rank=rank) if one.event is Event.BATCH_END]
        assert [one.timestamp.batch.value for one in ends] == list(range(1, zero["stopped_at"] + 1))
        assert ends[0].timestamp.sample.value == 2 * 2 * SIZE


def test_what_cannot_be_attached_to_is_refused_at_once() -> None:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = Engine(lambda engine, batch: None)
    with pytest.raises(ConfigurationError, match="uses 0 models with parameters of the optimizer: give the one to"):
        OffloopLogger().attach(trainer, optimizer)
    with pytest.raises(ConfigurationError, match=r"val is list: give an ignite.engine.Engine"):
        OffloopLogger().attach(trainer, optimizer, {"val": []}, model=net)  # type: ignore[dict-item]
    with pytest.raises(ConfigurationError, match="there is no option 'run_nam': did you mean run_name"):
        OffloopLogger(run_nam="r")  # type: ignore[call-arg]


def test_ignite_is_named_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "offloop.ignite")
    monkeypatch.setitem(sys.modules, "ignite.engine", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"offloop.ignite needs ignite; install it with: pip install pytorch-ig"
    ):
        importlib.import_module("offloop.ignite")


def test_a_disabled_logger_leaves_the_engines_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Training().train()
    monkeypatch.setenv("OFFLOOP_DISABLED", "1")
    training = Training().attach().train()
    assert vars(training.trainer).keys() == vars(plain.trainer).keys()
    assert are_same(weights_of(plain.net), weights_of(training.net))
    assert training.logger.run is None
    assert list_runs() == []
