"""Every adapter leaves the training as it is, whatever becomes of the run, and does what consumers want."""

import gzip
import json
import logging
import math
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from attached_callbacks import Requests
from attached_runs import (
    Sender,
    are_same,
    break_down,
    ending,
    kill_broker,
    snapshots_of,
    values_of,
    weights_of,
)
from fake_gpu import FakeGpu, reads

from offloop.bus.errors import ConfigurationError
from offloop.bus.index.index import read_entry
from offloop.bus.runs.directory import find_run, list_runs
from offloop.bus.types.event import Event

Weights = dict[str, torch.Tensor]
AfterBatch = Callable[[int], object]


class Trained(NamedTuple):
    weights: Weights
    norms: list[float]
    """Of the gradients of each step."""


Train = Callable[..., Trained]
"""Trains two epochs, or as many as are given, of at least 10 dataloader batches together, with options of the adapter
or, for None, without a run; calls a function with the number of dataloader batches after some."""


def _with_accelerate(options: dict[str, Any] | None, after: AfterBatch, epochs: int = 2) -> Trained:
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(os.environ["SAVED"], automatic_checkpoint_naming=True)
    training = import_module("accelerate_jobs").Training(2, project_config=project)
    training.after_batch = lambda: after(len(training.losses))
    if options is not None:
        training.attach(evaluate=training.evaluate, **options)
    return Trained(weights_of(training.train(epochs).net), training.norms)


def _with_ignite(options: dict[str, Any] | None, after: AfterBatch, epochs: int = 2) -> Trained:
    training = import_module("ignite_jobs").Training(2)
    training.after_iteration = lambda: after(len(training.losses))
    if options is not None:
        rows = [(torch.ones(4, 8), torch.ones(4, dtype=torch.long))]
        training.attach(evaluate=lambda: training.evaluator.run(rows), checkpoint=lambda: None, **options)
    return Trained(weights_of(training.train(epochs).net), training.norms)


def _with_keras(options: dict[str, Any] | None, after: AfterBatch, epochs: int = 2) -> Trained:
    keras = import_module("test_keras")
    keras.keras.utils.clear_session()  # which counts the names of layers
    model = keras.make_model()
    norms: list[float] = []

    def after_batch(batch: int) -> None:
        norms.append(float(torch.nn.utils.get_total_norm([one.value.grad for one in model.trainable_weights])))
        after(batch)

    watching = [] if options is None else [keras.OffloopCallback(save_folder=os.environ["SAVED"], **options)]
    keras.fit(model, *watching, keras.AfterBatch(after_batch), epochs=epochs)
    trained = {name: one.detach().clone() for name, one in model.named_parameters() if one.requires_grad}
    return Trained(trained, norms)


def _with_lightning(options: dict[str, Any] | None, after: AfterBatch, epochs: int = 2) -> Trained:
    lit = import_module("test_lightning")
    callbacks = [lit.ModelCheckpoint(os.environ["SAVED"], save_top_k=0)]
    callbacks += [] if options is None else [lit.OffloopCallback(**options)]
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": epochs}
    module = lit.fit(*callbacks, act=lambda module, _: after(len(module.losses)), **settings)
    return Trained(weights_of(module), module.norms)


def _with_transformers(options: dict[str, Any] | None, after: AfterBatch, epochs: int = 2) -> Trained:
    hugging = import_module("test_transformers")
    torch.manual_seed(3)
    settings = {"gradient_accumulation_steps": 2, "num_train_epochs": epochs, "max_grad_norm": 0.0}
    settings |= {"output_dir": os.environ["SAVED"], "lr_scheduler_type": "constant"}
    at_step = hugging.AtStep(lambda step: after(2 * step))
    trainer = hugging.made(hugging.Trainer, hugging.Classifier(), at_step, eval_dataset=hugging.rows_of(8), **settings)
    if options is not None:
        trainer.add_callback(hugging.OffloopCallback(trainer, **options))
    trainer.train()
    return Trained(weights_of(trainer.model), hugging.logs_of(trainer, "grad_norm"))


def _watched(options: dict[str, Any] | None, after: AfterBatch, epochs: int = 2) -> Trained:
    loop = import_module("watched_loop").Loop(2)
    loop.after_batch = lambda: after(len(loop.losses))
    if options is None:
        return Trained(weights_of(loop.plain(epochs).model), loop.norms)

    def after_batch() -> None:
        loop.run.log(half=torch.tensor(0.5))
        after(len(loop.losses))

    def evaluate() -> None:
        with loop.run.evaluating("val") as metrics:
            metrics["accuracy"] = torch.tensor(0.75)

    loop.after_batch = after_batch
    loop.watched(epochs, evaluate=evaluate, checkpoint=lambda: loop.run.checkpoint_saved(), **options)
    return Trained(weights_of(loop.model), loop.norms)


WITH_TRAINERS = [_with_ignite, _with_lightning, _with_transformers]
"""Those in which errors of the training come to the adapter. For loops of one's own they end the program; Keras shows
those of its step alone."""
WITH_PATHS = [_with_accelerate, _with_keras, _with_lightning, _with_transformers]
"""Those that name the checkpoints that they write."""
FRAMEWORKS = [*WITH_PATHS, _with_ignite, _watched]


def _name(train: Train) -> str:
    return train.__name__.rpartition("_")[2]


@pytest.fixture(params=FRAMEWORKS, ids=_name, scope="module")
def train(request: pytest.FixtureRequest) -> Iterator[Train]:
    def named(options: dict[str, Any] | None, after: AfterBatch = lambda _: None, epochs: int = 2) -> Trained:
        options = None if options is None else {"run_name": "r", **options}
        return request.param(options, after, epochs)  # type: ignore[no-any-return]

    named.framework = request.param  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        # Each framework's tests have the training that they attach to.
        patch.syspath_prepend(Path(__file__).parent)
        yield named


@pytest.fixture(scope="module")
def plain(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("OFFLOOP_RUNS_DIR", "SAVED"):
            patch.setenv(variable, str(tmp_path_factory.mktemp(variable.lower())))
        return train(None).weights


@pytest.fixture(autouse=True)
def _folders(runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAVED", str(tmp_path / "saved"))


@pytest.mark.slow
def test_weights_are_the_same_although_the_broker_is_killed(train: Train, plain: Weights) -> None:
    assert are_same(plain, train({"record": "all"}, lambda batch: batch == 6 and kill_broker()).weights)
    batches = [one.timestamp.batch.value for one in snapshots_of() if one.event is Event.BATCH_END]
    assert batches == list(range(1, len(batches) + 1))
    assert len(batches) >= 5


@pytest.mark.slow
def test_an_error_of_ours_is_shown_once_and_the_training_continues(
    train: Train, plain: Weights, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_down(monkeypatch)
    with caplog.at_level(logging.ERROR, "offloop"):
        assert are_same(plain, train({}).weights)
    assert ["a defect of ours" in one.message for one in caplog.records if one.name == "offloop"] == [True]
    assert (ending().status, "a defect of ours" in str(ending().error)) == ("failed", True)


@pytest.mark.slow
@pytest.mark.parametrize("train", WITH_TRAINERS, ids=_name, indirect=True, scope="module")
@pytest.mark.parametrize("error", [ZeroDivisionError("the user's"), KeyboardInterrupt()])
def test_an_error_of_the_training_reaches_the_caller_and_the_next_training_is_another_run(
    train: Train, error: BaseException
) -> None:
    def fail(batch: int) -> None:
        if batch == 6:
            raise error

    handler = signal.getsignal(signal.SIGINT)
    # Lightning ends the program after Ctrl-C.
    with pytest.raises((type(error), SystemExit)) as raised:
        train({}, fail)
    signal.signal(signal.SIGINT, handler)
    is_interrupted = isinstance(error, KeyboardInterrupt)
    assert is_interrupted or raised.value is error
    expected = ("stopped", None) if is_interrupted else ("failed", "ZeroDivisionError: the user's")
    assert (ending().status, ending().error) == expected
    train({})
    assert find_run("r-2").status == "finished"


@pytest.mark.slow
def test_every_command_is_done_after_the_batch_in_which_it_comes(train: Train) -> None:
    framework = train.framework  # type: ignore[attr-defined]
    heat: list[float] = []
    sender = Sender(
        *(("pause",), ("set", "lr", 0.5), ("set", "heat", 3), ("set", "heat", "hot"), ("set", "cold", 1)),
        *(("resume",), ("set", "eval", "now"), ("profile", "2ba"), ("checkpoint",), ("stop",)),
        at=4,
    )
    train({"on_set": {"heat": lambda value: heat.append(float(value))}}, sender.step, 100_000)
    pause, rate, *_, resume, evaluation, profile, checkpoint, stop = sender.outcomes
    # What the metrics of its epoch have added up would be forgotten.
    refused = {3, 4, 6} if framework is _with_keras else {3, 4}
    assert {at for at, one in enumerate(sender.outcomes) if one.error is not None} == refused
    assert heat == [3.0]
    ends = {one.timestamp.batch.value: one.lr for one in snapshots_of() if one.event is Event.BATCH_END}
    assert list(ends) == list(range(1, stop.batch + 1))
    # With the schedule, which takes its part.
    (after,) = {values[0] for values in ends[rate.batch + 1].values()}
    assert 0.4 < after <= 0.5
    # All that comes in a pause takes effect at its batch.
    assert pause.batch == rate.batch == resume.batch
    if framework is not _with_keras:
        evaluated = [one.timestamp.batch.value for one in snapshots_of() if one.event is Event.EVAL_END]
        assert evaluation.batch in evaluated
    trace = json.loads(gzip.decompress(Path(str(profile.done)).read_bytes()))["traceEvents"]
    marks = {one["name"] for one in trace if one["name"].startswith("ProfilerStep#")}
    assert marks == {f"ProfilerStep#{profile.batch - before}" for before in (1, 2)}
    if framework in WITH_PATHS:
        (saved,) = [one for one in read_entry(find_run("r")).checkpoints if one.batch == checkpoint.batch]
        assert Path(saved.path).exists()
        assert str(checkpoint) == f"'checkpoint' wrote {saved.path} at batch {checkpoint.batch}"
    assert (ending().status, "stop" in str(ending().reason)) == ("stopped", True)
    assert snapshots_of()[-1].event is Event.FIT_END


@pytest.mark.slow
def test_fields_on_demand_are_what_the_model_has(train: Train) -> None:
    names = ("gradient_norm", "gradient_norms", "parameter_norm", "moment_norms", "update_norms", "phases", "weights")
    trained = train({"callbacks": Requests(*names, "memory_stats")})
    assert values_of(Event.BATCH_END, "gradient_norm") == pytest.approx(trained.norms, rel=1e-6)
    *_, last = [one for one in snapshots_of() if one.event is Event.BATCH_END]
    assert last.gradient_norms.keys() == last.moment_norms.keys() == last.update_norms.keys() == trained.weights.keys()
    assert min(last.update_norms.values()) > 0
    norm = math.hypot(*(float(one.norm()) for one in trained.weights.values()))
    assert last.parameter_norm == pytest.approx(norm, rel=1e-6)
    # Keras has the state of its random numbers among them.
    weights = {name: torch.from_numpy(last.weights[name].numpy().copy()) for name in trained.weights}
    assert are_same(weights, trained.weights)
    # Keras calls nothing of ours within a step.
    phases = ["data"] if train.framework is _with_keras else ["forward", "backward", "optimizer", "publishing"]  # type: ignore[attr-defined]
    assert {*phases} <= {name for name, _, _ in last.phases["spans"]}
    # Without a GPU there is nothing that tells them.
    assert ("memory_stats" in last.fields) != ("memory_stats: " in last.fields.get("not_sent", ""))


@pytest.mark.slow
def test_no_gpu_is_waited_for_in_the_course_of_the_batches(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr("offloop.attached.training.get_device", lambda _: gpu)
    counts: dict[int, Counter[str]] = {}
    looks_at_numbers = []
    for options in (None, {"record": "all"}):
        with reads() as found:

            def look(batch: int) -> None:
                counts[batch] = Counter(found)
                assert gpu.waits == 0
                if batch == 10:
                    gpu.run()

            # No epoch ends between them.
            train(options, lambda batch: batch in (6, 10) and look(batch))
        looks_at_numbers.append(counts[10] - counts[6])
    assert looks_at_numbers[0] == looks_at_numbers[1]
    assert all(loss is not None for loss in values_of(Event.BATCH_END, "loss"))


def test_disabled_it_leaves_the_training_as_it_is(
    train: Train, plain: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOOP_DISABLED", "1")
    assert are_same(plain, train({"record": "all"}).weights)
    assert list_runs() == []


def test_an_option_that_does_not_exist_is_refused_at_once(train: Train) -> None:
    with pytest.raises(ConfigurationError, match="'run_nam': did you mean run_name"):
        train({"run_nam": "x"})
