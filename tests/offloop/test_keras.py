"""Keras, attached to: what is published of ``fit()``, what can be done to it, and that it is not changed by that."""

import json
import os
import pickle
import subprocess
import sys
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
from field_stream import Stream
from helpers import wait_for
from paths import ROOT

from offloop.bus.errors import ConfigurationError
from offloop.bus.index.index import read_entry
from offloop.bus.runs.directory import find_run, list_runs
from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.consumers import CheckpointSaver
from offloop.keras import OffloopCallback
from offloop.trainer.stream.run_stream import TrainingStream

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


def same(one: Any, other: Any) -> bool:
    return all(np.array_equal(left, right) for left, right in zip(one.get_weights(), other.get_weights(), strict=True))


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


# Of Keras's step, when it is compiled.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_steps_are_watched_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_(function, backend="eager"))
    model = make_model(keras.optimizers.SGD(0.1), dropout=0.0, jit_compile=True)
    history = fit(model, OffloopCallback(run_name=RUN)).history
    losses = values_of(Event.BATCH_END, "loss")
    assert [np.mean(losses[:5]), np.mean(losses[5:])] == pytest.approx(history["loss"], abs=1e-6)


def test_commands_are_done_and_what_cannot_be_done_is_refused_with_the_reason(tmp_path: Path) -> None:
    heat: list[float] = []
    sender = Sender(
        *(("pause",), ("set", "lr", 0.5), ("set", "heat", 3), ("set", "eval", "now"), ("checkpoint",)),
        *(("set", "lr", -1), ("resume",), ("stop",)),
    )

    def set_heat(value: Any) -> None:
        heat.append(float(value))

    model = make_model(keras.optimizers.SGD(0.1))
    watching = OffloopCallback(run_name=RUN, on_set={"heat": set_heat}, save_folder=tmp_path / "saved")
    last: list[Any] = []
    history = fit(model, watching, AfterBatch(lambda count: (sender.step(count), last.append(count))), epochs=1000)
    errors = [one.error for one in sender.outcomes]
    assert errors[:3] + errors[4:5] + errors[6:] == [None] * 6
    assert errors[3] == (
        "cannot evaluate on command: evaluate() would forget what the metrics of this epoch have added up"
    )
    assert "at least 0" in str(errors[5])
    assert heat == [3.0]
    assert float(model.optimizer.learning_rate) == 0.5
    (saved,) = (tmp_path / "saved").glob("ba*.keras")
    assert [str(sender.outcomes[4])] == [f"'checkpoint' wrote {saved} at batch {sender.outcomes[4].batch}"]
    assert [one.path for one in read_entry(find_run(RUN)).checkpoints] == [str(saved)]
    assert keras.saving.load_model(saved).optimizer.learning_rate == 0.5
    assert ending().status == "stopped"
    assert len(history.epoch) < 1000
    assert len(values_of(Event.BATCH_END, "loss")) == last[-1]
    assert events_of()[-1] == "fit_end"


def test_a_rate_of_a_schedule_and_a_checkpoint_without_a_folder_are_refused() -> None:
    sender = Sender(("set", "lr", 0.5), ("checkpoint",), ("stop",))
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    model = make_model(keras.optimizers.SGD(schedule))
    fit(model, OffloopCallback(run_name=RUN), AfterBatch(sender.step), epochs=1000)
    assert [one.error for one in sender.outcomes] == [
        "cannot set lr: it follows a schedule; give the optimizer a number to set it later",
        "cannot save a checkpoint on command: give OffloopCallback() a save_folder",
        None,
    ]


NAMES = ("gradient_norm", "gradient_norms", "parameter_norm", "moment_norms", "update_norms", "phases", "memory_stats")


def test_fields_are_what_the_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(Demand({Event.BATCH_END: EventDemand(1, dict.fromkeys(NAMES, 1))}))
    stream.run_name, stream.answer, stream.poll = "w", None, None  # type: ignore[attr-defined]
    monkeypatch.setattr(TrainingStream, "_start_publisher", lambda *_: stream)
    model = make_model()
    found: list[dict[str, float]] = []
    before = [one.value.detach().clone() for one in model.trainable_weights]

    def look(_: int) -> None:
        weights = [one.value for one in model.trainable_weights]
        moments = [one.value for one in model.optimizer.variables if one.name.endswith("_momentum")]
        updates = [new.detach() - old for new, old in zip(weights, before, strict=True)]
        norm = torch.nn.utils.get_total_norm
        found.append(
            {
                "gradient_norm": float(norm([one.grad for one in weights])),
                "parameter_norm": float(norm([one.detach() for one in weights])),
                "moment": float(norm([one.detach() for one in moments])),
                "update": float(norm(updates)),
            }
        )
        before[:] = [one.detach().clone() for one in weights]

    fit(model, OffloopCallback(), AfterBatch(look), epochs=1)
    sent = [fields for event, _, fields in stream.sent if event is Event.BATCH_END]
    for name in ("gradient_norm", "parameter_norm"):
        assert [one[name] for one in sent[1:]] == pytest.approx([one[name] for one in found[1:]], rel=1e-5)
    for field, name in (("moment_norms", "moment"), ("update_norms", "update")):
        totals = [np.linalg.norm(list(one[field].values())) for one in sent[1:]]
        assert totals == pytest.approx([one[name] for one in found[1:]], rel=1e-4)
    assert [name for name, _, _ in sent[2]["phases"]["spans"]][:1] == ["data"]
    assert "memory_stats" in sent[2]["not_sent"]


def test_a_consumer_gets_the_weights_and_learns_what_cannot_be_had(tmp_path: Path) -> None:
    model = make_model(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    saver = CheckpointSaver(str(tmp_path / "weights"), save_interval="1ep", weights_only=True)
    fit(model, OffloopCallback(run_name=RUN, callbacks=saver), epochs=1)
    assert list((tmp_path / "weights").glob("ep1-*.safetensors"))
    unavailable = snapshots_of()[0].unavailable["fields"]
    gradients = {"gradient_norm", "gradient_norms", "optimizer_norms"}
    assert set(unavailable) == {"activations", "outputs", "checkpoint", *gradients}
    assert unavailable["gradient_norm"] == "Keras adds up the gradients of microbatches within its optimizer"


@pytest.mark.parametrize(
    ("error", "status"), [(ZeroDivisionError("the user's"), "failed"), (KeyboardInterrupt(), "stopped")]
)
def test_errors_of_the_step_are_the_users_own_and_end_the_run(error: BaseException, status: str) -> None:
    def rows() -> Any:
        for batch in range(4):
            yield INPUTS[:SIZE], TARGETS[:SIZE] if batch < 3 else None

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    model = make_model(loss=lambda truth, said: fail() if model.optimizer.iterations == 3 else said.mean(), metrics=[])
    with pytest.raises(type(error)):
        fit(model, OffloopCallback(run_name=RUN))
    assert ending().status == status
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


@pytest.mark.slow
def test_a_program_that_ends_with_an_error_outside_of_a_step_ends_its_run(runs_dir: Path) -> None:
    script = """
import numpy as np, keras
from offloop.keras import OffloopCallback
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("sgd", loss="mse")
def rows():
    for _ in range(4):
        yield np.ones((4, 8)), np.ones((4, 1))
    raise ValueError("torn file")
model.fit(rows(), steps_per_epoch=3, epochs=2, verbose=0, callbacks=[OffloopCallback(run_name="r")])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert "torn file" in done.stderr
    wait_for(lambda: not find_run(RUN).live, "the run's end")
    assert (ending().status, ending().error) == ("failed", "ValueError: torn file")


@pytest.mark.slow
def test_two_ranks_stop_and_save_at_the_same_step(tmp_path: Path) -> None:
    script = """
import json, os, sys
import numpy as np, keras, torch.distributed as dist
from attached_runs import Sender
from offloop.keras import OffloopCallback
folder, rank = sys.argv[1], int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
sender = Sender(("pause",), ("checkpoint",), ("set", "eval", "now"), ("resume",), ("stop",), at=3)
class Count(keras.callbacks.Callback):
    count = 0
    def on_train_batch_end(self, batch, logs=None):
        self.count += 1
        rank or sender.step(self.count)
saved = []
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("sgd", loss="mse")
count = Count()
watching = OffloopCallback(run_name="r", save_folder=folder + "/saved")
save = watching._save
watching._save = lambda: (saved.append(watching._training.state.timestamp.values.batch), save())
model.fit(np.ones((16, 8)), np.ones((16, 1)), batch_size=4, epochs=2000, verbose=0, callbacks=[count, watching])
errors = None if rank else [one.error for one in sender.outcomes]
print(json.dumps([count.count, saved, errors]))
dist.destroy_process_group()
"""
    environment = {**os.environ, "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT / "tests" / "support")}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    (steps, saved, errors), other = (json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in ranks)
    assert other == [steps, saved, None]
    assert steps < 8000
    assert [one is None for one in errors] == [True, True, False, True, True]
    assert [file.name for file in (tmp_path / "saved").iterdir()] == [f"ba{saved[0]}.keras"]
    for rank in range(2):
        assert len(values_of(Event.BATCH_END, "loss", rank=rank)) == steps


def test_the_callback_can_be_pickled_before_it_trains() -> None:
    fit(make_model(), pickle.loads(pickle.dumps(OffloopCallback(run_name=RUN))), epochs=1)
    assert len(values_of(Event.BATCH_END, "loss")) == BATCHES


def test_mistakes_are_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="there is no option 'run_nam': did you mean run_name"):
        OffloopCallback(run_nam="w")  # type: ignore[call-arg]
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(ConfigurationError, match=r"Keras runs on jax.*set KERAS_BACKEND=torch before"):
        OffloopCallback()


@pytest.mark.slow
def test_another_backend_that_is_not_installed_is_named_on_import() -> None:
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    done = subprocess.run(
        [sys.executable, "-c", "import offloop.keras"], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.stderr.strip().splitlines()[-1] == (
        "ModuleNotFoundError: Keras needs tensorflow; offloop.keras attaches to its torch backend: set "
        "KERAS_BACKEND=torch before Keras is imported"
    )


def test_a_disabled_callback_leaves_the_model_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, watched = make_model(), make_model()
    fit(plain, AfterBatch(lambda _: None))
    monkeypatch.setenv("OFFLOOP_DISABLED", "1")
    functions: set[Any] = set()
    fit(watched, OffloopCallback(run_name=RUN), AfterBatch(lambda _: functions.add(watched.train_function.__name__)))
    assert functions == {plain.train_function.__name__}
    assert same(plain, watched)
    assert list_runs() == []
