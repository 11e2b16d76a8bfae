"""Keras, attached to: what is published of ``fit()``, what can be done to it, and that it is not changed by that."""

import os
import pickle
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import pytest
import torch
from attached_runs import (
    RUN,
    Sender,
    ending,
    events_of,
    logged_in,
    make_rows,
    snapshots_of,
    values_of,
)

from offloop.bus.errors import ConfigurationError
from offloop.bus.runs.directory import find_run
from offloop.bus.types.event import Event
from offloop.consumers import CheckpointSaver
from offloop.keras import OffloopCallback

BATCHES, SIZE = 5, 8
INPUTS, TARGETS = (one.numpy() for one in make_rows(BATCHES * SIZE))

pytestmark = pytest.mark.usefixtures("runs_dir")


def make_model(optimizer: Any = None, dropout: float = 0.2, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(16, activation="tanh"), keras.layers.Dropout(dropout), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    options = {"loss": loss, "metrics": ["accuracy"], **options}
    model.compile(optimizer=optimizer or keras.optimizers.Adam(0.01), **options)
    return model


def fit(model: Any, *callbacks: Any, epochs: int = 2, **options: Any) -> Any:
    keras.utils.set_random_seed(3)
    options = {"x": INPUTS, "y": TARGETS, "batch_size": SIZE, "verbose": 0, **options}
    return model.fit(epochs=epochs, callbacks=list(callbacks), **options)


class AfterBatch(keras.callbacks.Callback):
    """Calls a function with the number of batches so far after each of them."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.count = 0
        self.function = function

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1
        self.function(self.count)


FETCH = ["before_dataloader", "after_dataloader"]
VALIDATION = ["eval_before_all", "eval_start", *["eval_batch_start", "eval_batch_end"] * 2, "eval_end"]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_every_event_comes_at_its_place_and_the_others_are_known_to_be_missing(accumulation: int) -> None:
    # Two of five batches make a step: the second step begins in one epoch and ends in the next, as Keras does it.
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulation if accumulation > 1 else None)
    held_out = (INPUTS[: 2 * SIZE], TARGETS[: 2 * SIZE])
    fit(make_model(optimizer), OffloopCallback(run_name=RUN, record="all"), validation_data=held_out)
    expected, done = ["init", "fit_start"], 0
    for _ in range(2):
        expected.append("epoch_start")
        for _ in range(BATCHES):
            expected += [*FETCH, *["batch_start"] * (done % accumulation == 0)]
            done += 1
            expected += ["batch_end", "batch_checkpoint"] * (done % accumulation == 0)
        expected += ["before_dataloader", *VALIDATION, "eval_after_all", "epoch_end", "epoch_checkpoint"]
    seen = events_of()
    assert seen == [*expected, "fit_end"]
    missing = {event.value for event in Event} - set(seen)
    assert set(snapshots_of()[0].unavailable["events"]) == missing
    assert set(values_of(Event.BATCH_END, "batch_size")) == {SIZE * accumulation}
    assert snapshots_of()[-1].timestamp.values[:4] == (0, 2, 2 * BATCHES // accumulation, 2 * BATCHES * SIZE)


@pytest.mark.parametrize("accumulation", [None, 2])
def test_loss_rates_and_metrics_are_those_of_keras(accumulation: int | None) -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    model = make_model(keras.optimizers.SGD(schedule, gradient_accumulation_steps=accumulation))
    rates: list[float] = []
    weights = np.linspace(0.5, 2, len(INPUTS))
    steps = AfterBatch(lambda _: rates.append(float(model.optimizer.learning_rate)))
    history = fit(model, steps, OffloopCallback(run_name=RUN), sample_weight=weights, validation_split=0.2).history
    losses = values_of(Event.BATCH_END, "loss")
    # Keras shows the mean of the epoch so far.
    each = 4 // (accumulation or 1)
    means = [np.mean(losses[first : first + each]) for first in (0, each)]
    assert means == pytest.approx(history["loss"], abs=1e-6)
    every = slice((accumulation or 1) - 1, None, accumulation)
    assert [one["SGD"][0] for one in values_of(Event.BATCH_END, "lr")] == pytest.approx(rates[every], abs=1e-6)
    shown = logged_in()["metrics/train/accuracy"]
    assert [shown[each - 1], shown[2 * each - 1]] == pytest.approx(history["accuracy"], abs=1e-6)
    found = [one["eval"] for one in values_of(Event.EVAL_END, "eval_metrics")]
    assert [one["loss"] for one in found] == pytest.approx(history["val_loss"], abs=1e-6)
    assert [one["accuracy"] for one in found] == pytest.approx(history["val_accuracy"], abs=1e-6)


def test_a_schedule_of_ones_own_may_change_at_any_time() -> None:
    class Own(keras.optimizers.schedules.LearningRateSchedule):
        rate = 1 / 8

        def __call__(self, step: Any) -> float:
            return self.rate

        def get_config(self) -> Any:
            return {}

    schedule = Own()

    def change(batch: int) -> None:
        schedule.rate = 1 / 8 / (batch + 1)

    fit(make_model(keras.optimizers.SGD(schedule)), OffloopCallback(run_name=RUN), AfterBatch(change), epochs=1)
    rates = [one["SGD"][0] for one in values_of(Event.BATCH_END, "lr")]
    assert rates == [1 / 8 / batch for batch in range(1, 6)]


def test_what_is_not_a_number_is_seen_and_a_step_of_ones_own_is_watched() -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.tracker = keras.metrics.Mean(name="loss")

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs)

        @property
        def metrics(self) -> list[Any]:
            return [self.tracker]

        def train_step(self, data: Any) -> Any:
            self.zero_grad()
            loss = self(data[0]).mean() * (float("nan") if self.optimizer.iterations == 2 else 1)
            loss.backward()
            with torch.no_grad():
                self.optimizer.apply([torch.zeros_like(one.value) for one in self.weights[:2]], self.weights[:2])
            self.tracker.update_state(loss)
            return {"loss": self.tracker.result()}

    model = Own()
    model.compile(keras.optimizers.SGD(0.1))
    fit(model, OffloopCallback(run_name=RUN), epochs=1)
    losses = values_of(Event.BATCH_END, "loss")
    assert [loss != loss for loss in losses] == [False, False, True, False, False]
    assert losses[0] == pytest.approx(float(model(INPUTS[:SIZE]).mean().detach()), abs=10)


def test_a_rate_of_a_schedule_and_a_checkpoint_without_a_folder_are_refused() -> None:
    sender = Sender(("set", "lr", 0.5), ("checkpoint",), ("stop",))
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    model = make_model(keras.optimizers.SGD(schedule))
    fit(model, OffloopCallback(run_name=RUN), AfterBatch(sender.step), epochs=100_000)
    assert [one.error is None for one in sender.outcomes] == [False, False, True]


def test_a_consumer_gets_the_weights_and_learns_what_cannot_be_had(tmp_path: Path) -> None:
    model = make_model(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    saver = CheckpointSaver(str(tmp_path / "weights"), save_interval="1ep", weights_only=True)
    fit(model, OffloopCallback(run_name=RUN, callbacks=saver), epochs=1)
    assert list((tmp_path / "weights").glob("ep1-*.safetensors"))
    unavailable = snapshots_of()[0].unavailable["fields"]
    gradients = {"gradient_norm", "gradient_norms", "optimizer_norms", "gradient_histograms"}
    assert set(unavailable) == {"activations", "outputs", "checkpoint", *gradients}
    assert unavailable["gradient_norm"] == "Keras adds up the gradients of microbatches within its optimizer"


def test_errors_of_the_step_are_the_users_own_and_end_the_run() -> None:
    def rows() -> Any:
        for batch in range(4):
            yield INPUTS[:SIZE], TARGETS[:SIZE] if batch < 3 else None

    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("the user's")

    model = make_model(loss=lambda truth, said: fail() if model.optimizer.iterations == 3 else said.mean(), metrics=[])
    with pytest.raises(ZeroDivisionError, match="the user's"):
        fit(model, pickle.loads(pickle.dumps(OffloopCallback(run_name=RUN))))
    assert ending().status == "failed"
    assert len(values_of(Event.BATCH_END, "loss")) == 3
    assert "Offloop" not in repr(model.train_function)


def test_a_fit_that_was_left_is_ended_by_the_next_one_and_a_second_fit_is_a_run_of_its_own() -> None:
    class Leave(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise ZeroDivisionError("of another callback")

    model = make_model()
    with pytest.raises(ZeroDivisionError):
        fit(model, OffloopCallback(run_name=RUN), Leave())
    # One without a callback of ours.
    fit(model)
    assert find_run(RUN).status == "failed"
    assert len(values_of(Event.BATCH_END, "loss")) == BATCHES
    watching = OffloopCallback(run_name=RUN)
    for _ in range(2):
        fit(model, watching)
    for run in (f"{RUN}-2", f"{RUN}-3"):
        assert (find_run(run).status, len(values_of(Event.BATCH_END, "loss", run))) == ("finished", 10)
    assert {"train_function", "test_function", "save", "save_weights"} & vars(model).keys() <= {
        "train_function",
        "test_function",
    }


def test_a_training_that_is_resumed_counts_on(tmp_path: Path) -> None:
    class Leave(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise ZeroDivisionError

    for first in (True, False):
        model = make_model()
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
        if first:
            with pytest.raises(ZeroDivisionError):
                fit(model, OffloopCallback(run_name=RUN), backup, Leave(), epochs=4)
        else:
            fit(model, OffloopCallback(run_name=RUN), backup, epochs=4)
    (begin,) = [one for one in snapshots_of(attempt=2) if one.event is Event.FIT_START]
    assert (begin.timestamp.epoch.value, begin.timestamp.batch.value) == (2, 10)
    assert snapshots_of(attempt=2)[-1].timestamp.values[1:3] == (4, 20)


def test_a_second_fit_that_begins_with_a_later_epoch_counts_on() -> None:
    model, watching = make_model(), OffloopCallback(run_name=RUN)
    fit(model, watching)
    fit(model, watching, initial_epoch=2, epochs=3)
    end, begin = snapshots_of(attempt=1)[-1], snapshots_of(attempt=2)[1]
    assert (end.event, begin.event) == (Event.FIT_END, Event.FIT_START)
    assert begin.timestamp.values[:4] == (0, 2, 10, 10 * SIZE)
    assert begin.timestamp == end.timestamp
    # Another model has other weights.
    fit(make_model(), watching, initial_epoch=1, epochs=2)
    assert snapshots_of(attempt=3)[1].timestamp.sample == 0


def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(ConfigurationError, match=r"Keras runs on jax.*set KERAS_BACKEND=torch before"):
        OffloopCallback()
