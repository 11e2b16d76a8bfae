"""What holds for every adapter: the training is what it is without one, whatever becomes of the run."""

import logging
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from attached_runs import are_same, break_down, ending, kill_broker, snapshots_of, weights_of

from offloop.bus.types.event import Event

pytestmark = pytest.mark.usefixtures("runs_dir")
Weights = dict[str, torch.Tensor]
AfterBatch = Callable[[int], object]
Train = Callable[[dict[str, Any] | None, AfterBatch], Weights]
"""Trains two epochs, of at least 10 dataloader batches together, with options of the adapter, or without a run; calls a
function with the number of dataloader batches after each."""


def _with_accelerate(options: dict[str, Any] | None, after: AfterBatch) -> Weights:
    training = import_module("accelerate_jobs").Training(2)
    training.after_batch = lambda: after(len(training.losses))
    if options is not None:
        training.attach(**options)
    return weights_of(training.train().net)


def _with_ignite(options: dict[str, Any] | None, after: AfterBatch) -> Weights:
    training = import_module("ignite_jobs").Training(2)
    training.after_iteration = lambda: after(len(training.losses))
    if options is not None:
        training.attach(**options)
    return weights_of(training.train().net)


def _with_keras(options: dict[str, Any] | None, after: AfterBatch) -> Weights:
    keras = import_module("test_keras")
    model = keras.make_model()
    attached = [] if options is None else [keras.OffloopCallback(run_name="r", **options)]
    keras.fit(model, *attached, keras.AfterBatch(after))
    return {str(number): torch.as_tensor(one) for number, one in enumerate(model.get_weights())}


def _with_lightning(options: dict[str, Any] | None, after: AfterBatch) -> Weights:
    lit = import_module("test_lightning")
    callback = lit.lightning.Callback() if options is None else lit.OffloopCallback(run_name="r", **options)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    return weights_of(lit.fit(callback, act=lambda module, _: after(len(module.losses)), **options))


def _with_transformers(options: dict[str, Any] | None, after: AfterBatch) -> Weights:
    hugging = import_module("test_transformers")
    at_step = hugging.AtStep(lambda step: after(2 * step))
    trainer = hugging.made(hugging.Trainer, None, at_step, gradient_accumulation_steps=2, num_train_epochs=2)
    if options is not None:
        trainer.add_callback(hugging.OffloopCallback(trainer, run_name="r", **options))
    trainer.train()
    return weights_of(trainer.model)


def _watched(options: dict[str, Any] | None, after: AfterBatch) -> Weights:
    loop = import_module("test_watch").Loop(2)
    loop.after_batch = lambda: after(len(loop.losses))
    return weights_of((loop.plain() if options is None else loop.watched(run_name="r", **options)).model)


FRAMEWORKS = (_with_accelerate, _with_ignite, _with_keras, _with_lightning, _with_transformers, _watched)


@pytest.fixture(params=FRAMEWORKS, ids=lambda one: one.__name__.rpartition("_")[2])
def train(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Train:
    # Each framework's tests have the training that they attach to.
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("kill", [False, True])
def test_weights_are_the_same_with_and_without_even_if_the_broker_is_killed(train: Train, kill: bool) -> None:
    def kill_half_way(batch: int) -> None:
        if kill and batch == 6:
            kill_broker()

    assert are_same(train(None, lambda _: None), train({"record": "all"}, kill_half_way))
    batches = [one.timestamp.batch.value for one in snapshots_of() if one.event is Event.BATCH_END]
    assert batches == list(range(1, len(batches) + 1))
    assert len(batches) >= 5


def test_an_error_of_ours_is_shown_once_and_the_training_continues(
    train: Train, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = train(None, lambda _: None)
    break_down(monkeypatch)
    with caplog.at_level(logging.ERROR, "offloop"):
        assert are_same(plain, train({}, lambda _: None))
    assert ["a defect of ours" in one.message for one in caplog.records if one.name == "offloop"] == [True]
    assert (ending().status, "a defect of ours" in str(ending().error)) == ("failed", True)
