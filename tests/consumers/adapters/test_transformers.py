"""Callbacks that were written for Hugging Face Transformers run in a consumer."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

import cloudpickle  # type: ignore[import-untyped]
import torch
from commands import Run, command
from consumers_stream import record_run, snapshots_of_training
from theirs import continued, trained
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.consumers import CannotWorkError
from offloop.consumers.adapters.transformers import TransformersCallback
from offloop.consumers.cli.main import main
from offloop.consumers.cli.registry import CALLBACKS
from offloop.consumers.testing import LiveRun, MemoryStream, replay
from offloop.transformers import OffloopCallback

METHODS = [name for name in TransformersCallback.methods if name != "on_predict"]


class Seen(TrainerCallback):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if name not in METHODS:
            return super().__getattribute__(name)

        def called(args: Any, state: Any, control: Any, **more: Any) -> None:
            values = more.get("logs") or more.get("metrics") or {}
            self.calls.append((name, round(state.epoch, 6), state.global_step, state.max_steps, dict(values)))

        return called


# Overridden, as far as anyone who looks at the class can see.
for method in METHODS:
    setattr(Seen, method, lambda self, args, state, control, **more: None)


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: Any, labels: Any) -> Any:
        return {"loss": ((self.layer(x)[:, 0] - labels) ** 2).mean()}


class Watched(Trainer):
    """Keeps the losses and rates of its steps."""

    losses: list[float]
    rates: list[float]

    def training_step(self, *arguments: Any, **options: Any) -> Any:
        loss = super().training_step(*arguments, **options)
        self.losses.append(loss.item())
        return loss


class Rates(TrainerCallback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rates.append(kwargs["lr_scheduler"].get_last_lr()[0])


@pytest.mark.slow
def test_a_callback_sees_what_it_sees_in_their_trainer(tmp_path: Path, runs_dir: Path) -> None:
    torch.manual_seed(4)
    data = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(20)]
    args = TrainingArguments(
        str(tmp_path),
        num_train_epochs=2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=20,
        logging_steps=2,
        logging_first_step=True,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=0.1,
    )
    theirs, rates = Seen(), Rates()
    trainer = Watched(Tiny(), args, train_dataset=data, eval_dataset=data, callbacks=[rates, theirs])  # type: ignore[arg-type]
    trainer.losses = []
    theirs.calls.clear()
    trainer.add_callback(OffloopCallback(trainer, run_name="run", runs_dir=runs_dir))
    trainer.train()

    ours = Seen()
    stream = MemoryStream(batches_per_epoch=5, batch_size=4, max_duration="2ep", lr=0.1)
    found = [values for name, *_, values in theirs.calls if name == "on_evaluate"]
    names = {"logging_steps": 2, "logging_first_step": True, "eval_strategy": "epoch"}
    with stream.attach(TransformersCallback(ours, names)):
        for number, (loss, rate) in enumerate(zip(trainer.losses, rates.rates, strict=True), 1):
            metrics = {name: value for name, value in found[number // 5 - 1].items() if name != "epoch"}
            stream.batch(loss=loss, lr=rate, evaluation={"eval": metrics} if number % 5 == 0 else None)
        stream.finish()

    expected = [call for call in theirs.calls if call[0] != "on_init_end"]
    assert [call[:4] for call in ours.calls[1:]] == [call[:4] for call in expected]
    for call, like in zip(ours.calls[1:], expected, strict=True):
        theirs_values = {
            name: value
            for name, value in like[4].items()
            if name not in ("grad_norm", "total_flos") and not name.startswith("train_")
        }
        values = {name: value for name, value in call[4].items() if not name.startswith("train_")}
        assert values == pytest.approx(theirs_values, abs=1e-6)
    assert ours.calls[-2][4]["train_loss"] == pytest.approx(expected[-2][4]["train_loss"], abs=1e-6)
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [1, 2, 4, 6, 8, 10]

    # The recording of that training has what it logs by itself, and its arguments.
    recorded = Seen()
    replay(TransformersCallback(recorded), runs_dir / "run")
    inner = ("on_step_begin", "on_pre_optimizer_step", "on_prediction_step")
    logs: dict[int, dict[str, Any]] = {}
    for call in recorded.calls:
        if call[0] == "on_log" and {"loss", "grad_norm"} & call[4].keys():
            logs[call[2]] = logs.get(call[2], {}) | call[4]
    assert logs == {
        call[2]: pytest.approx(call[4], abs=1e-6) for call in expected if call[0] == "on_log" and "loss" in call[4]
    }
    assert [call[:4] for call in recorded.calls[1:] if call[0] != "on_log"] == [
        call[:4] for call in expected if call[0] not in (*inner, "on_log")
    ]


def test_the_printer_and_the_progress_bar_show_a_replay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], runs_dir: Path
) -> None:
    consumer: Run = command("consumer", main, monkeypatch, capsys)
    run = record_run(runs_dir, "done", snapshots_of_training())
    chosen = "transformers:PrinterCallback,transformers:ProgressCallback"
    options = ["-o", "PrinterCallback.args=logging_steps=4", "-o", "ProgressCallback.max_str_len=50"]
    done = consumer("--replay", run, "--callbacks", chosen, "--log", "csv", *options)
    assert done.code == 0, done.err
    logs = [line for line in done.out.splitlines() if line.startswith("{'loss'")]
    assert logs == [
        f"{{'loss': '{sum(1 / batch for batch in range(begin, begin + 4)) / 4:.4g}', 'learning_rate': '0.1', "
        f"'epoch': {epoch}}}"
        for begin, epoch in ((1, "'1'"), (5, "'2'"))
    ]
    assert "{'eval_accuracy': '0.75', 'epoch': '2'}" in done.out
    assert "'train_runtime': '2'" in done.out


LOSSES = (1.0, 0.9, 0.95, 0.96, 0.5)


@pytest.mark.parametrize(("patience", "stops"), [(1, 12), (2, 16)])
def test_early_stopping_stops_where_it_would_in_training(patience: int, stops: int) -> None:
    # As a Trainer hands it to the process of its callbacks.
    callback = pickle.loads(cloudpickle.dumps(TransformersCallback(EarlyStoppingCallback(patience))))
    logged = trained(callback, epochs=5, evaluation=lambda epoch: {"eval": {"loss": LOSSES[epoch - 1]}})
    assert [(one.name, one.decided_at, one.reason) for one in logged.commands] == [
        ("stop", stops, "EarlyStoppingCallback: it set control.should_training_stop")
    ]
    assert {Event.EVAL_END, Event.EPOCH_END} <= set(callback.barrier_events)


def test_the_metric_comes_from_the_options_or_from_what_the_run_says_of_itself() -> None:
    accuracy = {"eval": {"accuracy": 0.5}}
    chosen = ["metric_for_best_model=accuracy", "early=1"]
    by_option = trained(TransformersCallback(EarlyStoppingCallback(1), chosen), epochs=3, evaluation=accuracy)
    said = Snapshot.build(Event.INIT, hyperparameters={"args": {"metric_for_best_model": "accuracy"}})
    stream = MemoryStream(evaluation=accuracy)
    stream.train(12)
    by_run = replay(TransformersCallback(EarlyStoppingCallback(1)), [said, *stream])
    assert [one.decided_at for one in (*by_option.commands, *by_run.commands)] == [8, 8]
    with pytest.raises(ConfigurationError, match="invalid training argument 'fast': use NAME=VALUE"):
        TransformersCallback(EarlyStoppingCallback(1), ["fast"])


def test_a_second_training_begins_anew() -> None:
    seen = Seen()
    streams = [MemoryStream(loss=loss, max_duration="1ep") for loss in (1.0, 3.0)]
    for stream in streams:
        stream.train()
        stream.finish()
    replay(TransformersCallback(seen, {"logging_steps": 4}), [snapshot for stream in streams for snapshot in stream])
    values = [logs.get("loss", logs.get("train_loss")) for name, *_, logs in seen.calls if name == "on_log"]
    assert values == [1.0, 1.0, 3.0, 3.0]


class Commands(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_save = state.global_step == 2
        control.should_evaluate = state.global_step == 3
        return control


def test_what_is_set_in_control_becomes_commands() -> None:
    logged = trained(TransformersCallback(Commands()), epochs=1)
    assert [(one.name, one.arguments, one.decided_at) for one in logged.commands] == [
        ("checkpoint", (), 2),
        ("set", ("eval", "now"), 3),
    ]


class Norms(TrainerCallback):
    fields = ("gradient_norm",)

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(logs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = state.global_step == 3
        assert len(kwargs["train_dataloader"]) == 4
        assert not hasattr(kwargs["model"], "config")


def test_fields_that_it_asks_for_and_what_the_training_logged_are_logs() -> None:
    made = TransformersCallback(Norms())
    stream = MemoryStream(fields={"gradient_norm": 1.5})
    with stream.attach(made):
        stream.batch()
        stream.batch(logged=[[0, {"metrics/train/reward": 0.25, "epoch": 7}]])
        stream.train(2)
    assert made.callback.logs == [
        {"reward": 0.25, "epoch": 0.25},
        {"loss": 1.0, "grad_norm": 1.5, "learning_rate": 0.1, "epoch": 0.75},
    ]


class Weights(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.parameters()


class EndsEpochs(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = True


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (Weights(), "Weights uses the model.parameters, which a consumer does not have: args, .* in the training"),
        (EndsEpochs(), "EndsEpochs sets control.should_epoch_stop: an epoch cannot be ended from a consumer"),
    ],
)
def test_what_needs_the_training_is_refused_at_the_first_touch(callback: Any, message: str) -> None:
    with pytest.raises(CannotWorkError, match=message):
        trained(TransformersCallback(callback), epochs=1)


class Saves(TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


def test_what_cannot_work_at_all_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigurationError, match="Saves has none of the methods of Transformers's callbacks that a"):
        TransformersCallback(Saves())
    with pytest.raises(ConfigurationError, match=r"DefaultFlowCallback cannot run in a consumer, .* decides itself"):
        CALLBACKS.find("transformers:DefaultFlowCallback")
    with pytest.raises(ConfigurationError, match=r"dict is not a callback of Transformers: .* transformers\.\.\.T"):
        TransformersCallback({})


@pytest.mark.parametrize("at", [20, 40])
def test_a_consumer_that_continues_knows_what_it_knew(at: int) -> None:
    stream = MemoryStream(max_duration="4ep", evaluation=lambda epoch: {"eval": {"loss": LOSSES[epoch - 1]}})
    stream.train()
    whole, _, second = continued(lambda: TransformersCallback(EarlyStoppingCallback(5)), stream, at)
    assert second.state_dict() == whole.state_dict()
    assert whole.callback.early_stopping_patience_counter == 2


def test_a_framework_that_is_not_installed_is_named_with_what_installs_it(tmp_path: Path) -> None:
    # A process of its own, in which these cannot be imported.
    code = (
        "import sys\n"
        "class Hides:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name in ('transformers', 'keras', 'lightning', 'torch'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hides())\n"
        "from offloop.consumers.cli.registry import CALLBACKS, LOGGERS\n"
        "for find, name in ((CALLBACKS, 'transformers:PrinterCallback'), (CALLBACKS, 'keras.callbacks:CSVLogger'),\n"
        "                   (LOGGERS, 'lightning.pytorch.loggers:CSVLogger')):\n"
        "    try: find.find(name)\n"
        "    except ValueError as error: print(error)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.rpartition(": ")[2] for line in told] == [
        "pip install transformers torch",
        "pip install keras torch",
        "pip install lightning",
    ]


@pytest.mark.slow
def test_a_live_run_is_stopped(tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step >= 3

    with LiveRun(tmp_path, "digits", max_duration="1000ep", wait_for="test") as run:
        run.watch(TransformersCallback(Stops()))
        assert run.wait().reason == "Stops: it set control.should_training_stop"


def test_trackers_write_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers.integrations import TensorBoardCallback

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    trained(TransformersCallback(TensorBoardCallback(), {"logging_steps": 2}), epochs=2, loss=lambda batch: 1 / batch)
    files = EventAccumulator(str(tmp_path)).Reload()
    assert [(one.step, one.value) for one in files.Scalars("train/loss")] == [
        (2, 0.75),
        (4, pytest.approx((1 / 3 + 1 / 4) / 2)),
        (6, pytest.approx((1 / 5 + 1 / 6) / 2)),
        (8, pytest.approx((1 / 7 + 1 / 8) / 2)),
    ]
