"""Callbacks and loggers that were written for Lightning run in a consumer."""

import pickle
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import lightning.pytorch as lightning
import pytest
import pytorch_lightning
import torch
from commands import Run, command
from consumers_stream import record_run, snapshots_of_training
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from theirs import continued, rows, trained

from offloop.bus.errors import ConfigurationError
from offloop.consumers import CannotWorkError, Logger, TrainerMetrics
from offloop.consumers.adapters.lightning import LightningCallback, LightningLogger
from offloop.consumers.cli.main import main
from offloop.consumers.cli.registry import CALLBACKS
from offloop.consumers.testing import LiveRun, MemoryStream, replay
from offloop.lightning import OffloopCallback

LOSSES = (1.0, 0.9, 0.95, 0.96, 0.5)


def val_losses(epoch: int) -> Any:
    return {"val": {"loss": LOSSES[epoch - 1]}}


class Seen(Callback):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []


def _see(name: str) -> Any:
    def called(self: Seen, trainer: Any, module: Any, *more: Any, **named: Any) -> None:
        if not trainer.sanity_checking:
            metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
            numbers = [one for one in (*more, *named.values()) if isinstance(one, int | str)]
            self.calls.append((name, trainer.global_step, trainer.current_epoch, *numbers, metrics))

    return called


for method in LightningCallback.methods:
    setattr(Seen, method, _see(method))


class Module(lightning.LightningModule):
    """Keeps the losses of its batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = torch.nn.Linear(4, 1)
        self.losses: list[float] = []

    def training_step(self, batch: Any) -> Any:
        loss = self.layer(batch).square().mean()
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any) -> Any:
        self.log("val_loss", self.layer(batch).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


@pytest.mark.slow
# Lightning's advice about dataloaders, and what it uses of torch's trees.
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning")
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
def test_a_callback_sees_what_it_sees_in_their_trainer_and_logs_the_same_rates(tmp_path: Path, runs_dir: Path) -> None:
    torch.manual_seed(4)
    theirs, module = Seen(), Module()
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        callbacks=[theirs, LearningRateMonitor(), OffloopCallback(run_name="run", runs_dir=runs_dir)],
        logger=CSVLogger(tmp_path, "theirs", 0),
        log_every_n_steps=2,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    data = torch.utils.data.DataLoader(torch.randn(20, 4), batch_size=4)
    trainer.fit(module, data, torch.utils.data.DataLoader(torch.randn(20, 4), batch_size=20))

    ours = Seen()
    stream = MemoryStream(batches_per_epoch=5, batch_size=4, max_duration="3ep")
    found = [call[-1] for call in theirs.calls if call[0] == "on_validation_end"]
    callbacks = [LightningCallback(ours), LightningCallback(LearningRateMonitor(), 2)]
    with stream.attach(*callbacks, loggers=[LightningLogger(CSVLogger(tmp_path, "ours", 0))]):
        for number, loss in enumerate(module.losses, 1):
            epoch = (number - 1) // 5
            metrics = {"val": {"val_loss": found[epoch]["val_loss"]}} if number % 5 == 0 else None
            # A batch ends with the rate that the next one takes.
            stream.batch(loss=loss, lr=0.1 * 0.5 ** (number // 5), evaluation=metrics)
        stream.finish()

    recorded = Seen()
    replay(LightningCallback(recorded), runs_dir / "run")
    inner = ("on_train_batch_start", "on_validation_batch_start", "on_validation_batch_end")
    base = [call for call in theirs.calls if call[0] not in inner]
    for calls, expected in ((ours.calls, theirs.calls), (recorded.calls, base)):
        assert [call[:-1] for call in calls] == [call[:-1] for call in expected]
        for call, like in zip(calls, expected, strict=True):
            # In theirs the monitor of rates puts them there, for all callbacks.
            values = {name: value for name, value in like[-1].items() if name != "lr-SGD"}
            assert {name: call[-1][name] for name in values} == pytest.approx(values, abs=1e-6)
    rates = [
        [
            (row["step"], float(row["lr-SGD"]))
            for row in rows(tmp_path / name / "version_0/metrics.csv")
            if row["lr-SGD"]
        ]
        for name in ("ours", "theirs")
    ]
    assert set(rates[1]) <= set(rates[0])


@pytest.mark.parametrize(("patience", "stops"), [(1, 12), (2, 16)])
def test_early_stopping_stops_where_it_would_in_training(patience: int, stops: int) -> None:
    # As a Trainer hands it to the process of its callbacks.
    made = pickle.loads(cloudpickle.dumps(LightningCallback(EarlyStopping("val_loss", patience=patience))))
    logged = trained(made, epochs=5, evaluation=val_losses)
    assert [(one.name, one.decided_at, one.reason) for one in logged.commands] == [
        (
            "stop",
            stops,
            f"EarlyStopping: Monitored metric val_loss did not improve in the last {patience} records. "
            "Best score: 0.900. Signaling Trainer to stop.",
        )
    ]


def test_one_of_several_evaluators_is_looked_at_once() -> None:
    found = {"eval": {"accuracy": 0.5}, "other": {"accuracy": 0.75}}
    made = EarlyStopping("other_accuracy", patience=2, mode="max", check_on_train_epoch_end=False)
    logged = trained(LightningCallback(made), epochs=4, evaluation=found)
    assert [one.decided_at for one in logged.commands] == [12]
    assert made.best_score.item() == 0.75
    unknown = EarlyStopping("loss")
    with pytest.raises(
        RuntimeError, match=r"`loss` which is not available.* `train_loss`, .*`val_accuracy`, `other_acc"
    ):
        trained(LightningCallback(unknown), epochs=1, evaluation=found)


def test_the_timer_takes_the_time_of_the_training() -> None:
    timer = Timer(duration={"seconds": 2}, interval="step")
    stream = MemoryStream(seconds_per_batch=0.25)
    stream.train(12)
    assert [one.decided_at for one in replay(LightningCallback(timer), stream).commands] == [8]
    assert timer.time_remaining() == -1.0


def test_rates_of_groups_go_to_the_consumers_loggers() -> None:
    logged = trained(LightningCallback(LearningRateMonitor("step"), 2), epochs=1, lr={"Adam": [0.1, 0.2], "SGD": [0.3]})
    rates = {"lr-Adam/pg1": 0.1, "lr-Adam/pg2": 0.2, "lr-SGD": 0.3}
    assert [(row.step, row.metrics) for row in logged.rows] == [(1, rates), (3, rates)]
    with pytest.raises(ConfigurationError, match="log_every_n_steps is 0: use 1 or more"):
        CALLBACKS.create("lightning.pytorch.callbacks:LearningRateMonitor", {"log_every_n_steps": "0"})


class Logs(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("double", 2 * trainer.callback_metrics["train_loss"])
        trainer.logger.log_metrics({"triple": 3.0}, step=7)


class OtherLogs(pytorch_lightning.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.log_dict({"loss": outputs["loss"], "batch": batch_idx})


def test_what_a_callback_logs_is_logged_with_both_of_lightnings_packages() -> None:
    logged = trained(LightningCallback(Logs()), LightningCallback(OtherLogs()), epochs=1, loss=0.5)
    assert logged.metrics == {
        "double": [(4, 1.0)],
        "triple": [(7, 3.0)],
        "loss": [(batch, 0.5) for batch in range(1, 5)],
        "batch": [(batch, batch - 1) for batch in range(1, 5)],
    }


def test_loggers_of_lightning_are_destinations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], runs_dir: Path, tmp_path: Path
) -> None:
    consumer: Run = command("consumer", main, monkeypatch, capsys)
    run = record_run(runs_dir, "done", snapshots_of_training())
    names = ("CSVLogger", "TensorBoardLogger")
    loggers = ",".join(f"lightning.pytorch.loggers:{name}" for name in names)
    options = [word for name in names for word in ("-o", f"{name}.save_dir={tmp_path / name}")]
    done = consumer("--replay", run, "--callbacks", "metrics,lr", "--log", loggers, *options)
    assert done.code == 0, done.err
    (file,) = tmp_path.glob("CSVLogger/**/metrics.csv")
    losses = [(int(row["step"]), float(row["loss/train/total"])) for row in rows(file) if row["loss/train/total"]]
    assert losses == [(batch, pytest.approx(1 / (batch + 1))) for batch in range(8)]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = tmp_path.glob("TensorBoardLogger/**/version_0")
    scalars = EventAccumulator(str(folder)).Reload().Scalars("loss/train/total")
    assert [(one.step, pytest.approx(one.value)) for one in scalars] == losses
    assert str(folder) in done.err


def test_hyperparameters_reach_their_loggers(tmp_path: Path) -> None:
    class Hyperparameters(TrainerMetrics):
        def fit_start(self, state: Any, logger: Logger) -> None:
            logger.log_hyperparameters({"width": 3})

    destination = LightningLogger(CSVLogger(tmp_path, version=0))
    stream = MemoryStream()
    stream.train(4)
    replay(Hyperparameters(), stream, loggers=[destination])
    assert (tmp_path / "lightning_logs/version_0/hparams.yaml").read_text() == "width: 3\n"


class Layers(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.model.layers  # noqa: B018  is what it reads


class Parameters(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        list(pl_module.parameters())


class Batch(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        batch[0]


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (Layers(), "Layers uses trainer.model, which a consumer does not have: callback_metrics, .* in the training"),
        (Parameters(), r"Parameters uses pl_module.parameters, .*: log\(\) and log_dict\(\) are there"),
        (Batch(), r"Batch uses the batch\[0\], which a consumer does not have: fields on demand"),
    ],
)
def test_what_needs_the_training_is_refused_at_the_first_touch(callback: Any, message: str) -> None:
    with pytest.raises(CannotWorkError, match=message):
        trained(LightningCallback(callback), epochs=1)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("ModelCheckpoint", "the callback 'checkpoint'"),
        ("StochasticWeightAveraging", "run it in the training"),
        ("ModelPruning", "run it in the training"),
        ("DeviceStatsMonitor", "the callbacks 'memory' and 'system'"),
        ("TQDMProgressBar", "'--log progress'"),
    ],
)
def test_what_cannot_work_at_all_is_refused_at_the_start(name: str, instead: str) -> None:
    message = f"{name} cannot run in a consumer, which has neither the model nor the optimizer: {instead}"
    with pytest.raises(ConfigurationError, match=message):
        CALLBACKS.find(f"lightning.pytorch.callbacks:{name}")
    with pytest.raises(ConfigurationError, match=message):
        CALLBACKS.find(f"pytorch_lightning.callbacks:{name}")


def test_an_object_that_cannot_work_is_refused_too() -> None:
    with pytest.raises(ConfigurationError, match="ModelCheckpoint cannot run in a consumer"):
        LightningCallback(ModelCheckpoint())


@pytest.mark.parametrize("at", [10, 40, 47, 48, 53, 80])
def test_a_consumer_that_continues_knows_what_it_knew(at: int) -> None:
    stream = MemoryStream(max_duration="4ep", evaluation=val_losses)
    stream.train()
    stream.finish()
    whole, _, second = continued(lambda: LightningCallback(EarlyStopping("val_loss", patience=9)), stream, at)
    assert second.state_dict() == whole.state_dict()
    assert (whole.callback.wait_count, whole.callback.best_score.item()) == (2, pytest.approx(0.9))


@pytest.mark.slow
def test_a_live_run_is_stopped(tmp_path: Path) -> None:
    class Stops(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = True

    with LiveRun(tmp_path, "digits", max_duration="1000ep", wait_for="test") as run:
        run.watch(LightningCallback(Stops()))
        assert run.wait().reason == "Stops: it set trainer.should_stop"
