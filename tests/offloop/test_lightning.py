"""Lightning's trainers as runs: what is published of them, and what is Lightning's own in that."""

import csv
import os
import pickle
import subprocess
import sys
import time
import types
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from attached_callbacks import StopsAtBatches, StopsAtEvaluations
from attached_runs import (
    RUN,
    Sender,
    are_same,
    ending,
    events_of,
    has_recorded,
    logged_in,
    make_network,
    make_rows,
    snapshots_of,
    values_of,
    weights_of,
)
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from paths import SUPPORT
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import offloop
from offloop.bus import Event, Subscriber
from offloop.bus.recording.recording import Recording
from offloop.bus.runs.directory import find_run
from offloop.lightning import OffloopCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
    pytest.mark.usefixtures("runs_dir"),
]
ROWS, SIZE = 28, 6
BATCHES = 5
DATA = DataLoader(TensorDataset(*make_rows(ROWS)), batch_size=SIZE)


class Mixin:
    """A training as people write it, which notes what happens to it; for the module of either namespace."""

    def __init__(self, lr: float = 0.1, act: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["act"])
        self.net = make_network()
        self.act = act
        self.losses: list[float] = []
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss_of(batch)
        self.losses.append(loss.item())
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        if self.current_epoch == 0:
            self.log("early", loss, on_step=False, on_epoch=True)
        return loss

    def loss_of(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return cross_entropy(self.net(inputs), targets)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss_of(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss_of(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        weights = [one for one in self.parameters() if one.ndim > 1]
        biases = [one for one in self.parameters() if one.ndim == 1]
        optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "lr": 0.01}], lr=self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def configure_gradient_clipping(self, *arguments: Any, **options: Any) -> None:
        self.clip_gradients(*arguments, **options)
        gradients = [one.grad for one in self.parameters() if one.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.act is not None:
            self.act(self, self.trainer)


class Module(Mixin, lightning.LightningModule):
    """The one that most tests train."""


def make_trainer(*callbacks: Any, namespace: Any = lightning, **arguments: Any) -> Any:
    settings = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": any(isinstance(one, ModelCheckpoint) for one in callbacks),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "default_root_dir": os.environ["OFFLOOP_RUNS_DIR"],
    }
    return namespace.Trainer(callbacks=list(callbacks), **(settings | arguments))


def fit(*callbacks: Any, act: Any = None, val: bool = True, ckpt_path: Any = None, **arguments: Any) -> Module:
    module = Module(act=act)
    trainer = make_trainer(*(callbacks or [OffloopCallback(run_name=RUN)]), **arguments)
    trainer.fit(module, DATA, DATA if val else None, ckpt_path=ckpt_path)
    return module


class Observed(lightning.Callback):
    """Requests an event of each batch for a while."""

    def __init__(self) -> None:
        self.hooks: list[bool] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        (ours,) = (one for one in trainer.callbacks if isinstance(one, OffloopCallback))
        self.hooks.append(ours.on_after_backward is not None)
        seen = [kind for kind, _ in groupby(self.hooks)]
        if len(self.hooks) == 5:
            self.subscriber = Subscriber(RUN, events=[Event.AFTER_BACKWARD])
        elif len(seen) == 2 and has_recorded(Event.AFTER_BACKWARD):
            self.subscriber.close()
        elif len(seen) == 3:
            trainer.should_stop = True


def test_hooks_within_a_batch_are_called_while_a_consumer_requests_their_events() -> None:
    observed = Observed()
    fit(OffloopCallback(run_name=RUN), observed, val=False, max_epochs=100_000)
    assert [kind for kind, _ in groupby(observed.hooks)] == [False, True, False]
    assert "after_backward" in events_of()


FETCH = ["before_dataloader", "after_dataloader"]
MICROBATCH = ["before_forward", "after_loss", "before_backward", "after_backward"]
EVALUATION = [
    *("eval_before_all", "eval_start", *["eval_batch_start", "eval_batch_end"] * BATCHES),
    *("eval_end", "eval_after_all"),
]


@pytest.mark.parametrize(("accumulate", "namespace"), [(1, "lightning.pytorch"), (2, "pytorch_lightning")])
def test_every_event_comes_at_its_place(accumulate: int, namespace: str) -> None:
    found = import_module(namespace)
    # The same module, of the other namespace.
    module = types.new_class("Other", (Mixin, found.LightningModule))()
    trainer = make_trainer(
        OffloopCallback(run_name=RUN, record="all"),
        namespace=found,
        max_epochs=1,
        num_sanity_val_steps=2,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(module, DATA, DATA)

    groups = [accumulate] * (BATCHES // accumulate) + [BATCHES % accumulate] * bool(BATCHES % accumulate)
    expected = ["init", "fit_start", "epoch_start"]
    for number, count in enumerate(groups, 1):
        expected += [*FETCH, "batch_start", *MICROBATCH, *[*FETCH, *MICROBATCH] * (count - 1)]
        expected += ["after_train_batch", "batch_end"]
        # Lightning evaluates before its epoch ends.
        expected += [*(EVALUATION if number == len(groups) else []), "batch_checkpoint"]
    assert events_of() == [*expected, "epoch_end", "epoch_checkpoint", "fit_end"]

    unavailable = snapshots_of()[0].fields["unavailable"]
    assert unavailable == find_run(RUN).last.info["unavailable"]
    assert set(unavailable["events"]) == {one.value for one in Event} - set(expected) - set(events_of())
    assert find_run(RUN).last.info["framework"]["name"] == "Lightning"
    assert find_run(RUN).last.info["framework"]["version"] == found.__version__


@pytest.mark.parametrize("accumulate", [1, 2])
def test_loss_rates_and_metrics_are_those_that_lightning_logs(accumulate: int, runs_dir: Path) -> None:
    logger = CSVLogger(runs_dir / "csv")
    module = fit(
        OffloopCallback(run_name=RUN),
        LearningRateMonitor("step"),
        logger=logger,
        accumulate_grad_batches=accumulate,
        val_check_interval=accumulate,
    )
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))

    def column(name: str) -> dict[int, float]:
        return {int(row["step"]): float(row[name]) for row in rows if row[name]}

    parts = [module.losses[:BATCHES], module.losses[BATCHES:]]
    groups = [part[at : at + accumulate] for part in parts for at in range(0, BATCHES, accumulate)]
    means = [sum(group) / len(group) for group in groups]
    assert values_of(Event.BATCH_END, "loss") == pytest.approx(means, abs=1e-6)
    if accumulate == 1:
        assert means == pytest.approx(list(column("loss_step").values()), abs=1e-6)
    logged = logged_in()
    assert logged["metrics/train/loss_step"] == pytest.approx(column("loss_step"), abs=1e-6)
    assert logged["metrics/train/loss_epoch"] == pytest.approx(column("loss_epoch"), abs=1e-6)
    # What is logged in one epoch only is not repeated in the next.
    assert logged["metrics/train/early"] == pytest.approx(column("early"), abs=1e-6)
    evaluations = [one["val"]["val_loss"] for one in values_of(Event.EVAL_END, "eval_metrics")]
    assert evaluations == pytest.approx(list(column("val_loss").values()), abs=1e-6)
    assert len(evaluations) == 2 * (BATCHES // accumulate)
    # What the monitor logs are the rates that a step has used: the last ones that we have published.
    rates = [one["AdamW"] for one in values_of(Event.BATCH_END, "lr")]
    used = zip(column("lr-AdamW/pg1").values(), column("lr-AdamW/pg2").values(), strict=True)
    assert rates[:-1] == [pytest.approx(list(pair), abs=1e-12) for pair in list(used)[1:]]

    last = snapshots_of()[-1]
    assert (last.timestamp.epoch, last.timestamp.batch, last.timestamp.sample) == (2, 2 * len(groups) // 2, 2 * ROWS)
    assert str(last.max_duration) == "2ep"
    (facts,) = values_of(Event.FIT_START, "hyperparameters")
    assert (facts["config/hparams/lr"], facts["config/trainer/accumulate_grad_batches"]) == (0.1, accumulate)
    assert facts["global_train_batch_size"] == SIZE * accumulate
    assert facts["train_batches"] == len(groups) // 2


def sending(*commands: Any, at: int = 3) -> tuple[Sender, Any]:
    sender = Sender(*commands, at=at)

    def act(module: Any, trainer: Any) -> None:
        time.sleep(0.001)
        sender.step(trainer.global_step)

    return sender, act


def test_the_checkpoints_that_lightning_writes_are_listed_with_what_it_compares_them_by(runs_dir: Path) -> None:
    saver = ModelCheckpoint(runs_dir / "saved", monitor="val_loss", save_top_k=2)
    trainer = fit(OffloopCallback(run_name=RUN), saver, max_epochs=3).trainer
    found = {one.path: one for one in offloop.runs()[RUN].checkpoints if one.exists}
    assert found.keys() == saver.best_k_models.keys()
    assert {path: one.value for path, one in found.items()} == pytest.approx(
        {path: float(value) for path, value in saver.best_k_models.items()}
    )
    assert {one.metric for one in found.values()} == {"metrics/val/val_loss"}
    assert [path for path, one in found.items() if one.is_best] == [saver.best_model_path]
    newest = max(found.values(), key=lambda one: one.batch)
    assert (newest.is_latest, newest.epoch, newest.size > 0) == (True, 3, True)
    assert f"step={newest.batch}." in newest.path
    assert "save_checkpoint" not in vars(trainer)


@pytest.mark.parametrize(
    ("callback", "interval", "batches"),
    [
        (StopsAtBatches("batch_end"), BATCHES, 4),
        (StopsAtEvaluations("eval_end"), 2, 4),
    ],
)
def test_a_consumer_that_is_waited_for_stops_at_once(callback: Any, interval: int, batches: int) -> None:
    module = fit(OffloopCallback(run_name=RUN, callbacks=callback, wait_for="callbacks"), val_check_interval=interval)
    assert len(module.losses) == batches
    assert ending().status == "stopped"


def test_what_lightning_cannot_do_is_refused_with_the_reason(runs_dir: Path) -> None:
    sender, act = sending(("set", "eval", "now"), ("checkpoint",), ("stop",))
    fit(act=act, val=False, max_epochs=100_000)
    assert [one.error is None for one in sender.outcomes] == [False, True, True]
    # Without a ModelCheckpoint it is saved where Lightning saves by default.
    assert [one.suffix for one in (runs_dir / "checkpoints").iterdir()] == [".ckpt"]


class Unusual(Module):
    """Things that some modules do."""

    def __init__(self, calls_again: bool) -> None:
        super().__init__()
        self.calls_again = calls_again
        self.save_hyperparameters({"lr": 0.1, "loss": torch.nn.MSELoss(), "rows": torch.ones(2), "path": Path("a")})

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        # The rest of the epoch is left out.
        return -1 if self.current_epoch == 0 and batch_idx == 3 else None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        return None if batch_idx == 1 and not self.calls_again else super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        # It computes loss and gradients several times in a step.
        again = torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=3)
        return again if self.calls_again else super().configure_optimizers()


@pytest.mark.parametrize(("precision", "calls_again"), [("32-true", True), ("bf16-mixed", False)])
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.filterwarnings("ignore:Attribute 'loss' is an instance of `nn.Module`")
def test_unusual_modules_train_as_without(precision: str, calls_again: bool) -> None:
    modules = []
    for callback in (lightning.Callback(), OffloopCallback(run_name=RUN, record="all")):
        module = Unusual(calls_again)
        make_trainer(callback, precision=precision).fit(module, DATA, DATA)
        modules.append(weights_of(module))
    assert are_same(*modules)
    assert find_run(RUN).status == "finished"
    ends = [one for one in snapshots_of() if one.event is Event.BATCH_END]
    assert [int(one.timestamp.batch_in_epoch) for one in ends] == [1, 2, 3, 1, 2, 3, 4, 5]
    without_loss = [] if calls_again else [1, 4]
    assert [at for at, one in enumerate(ends) if one.loss is None] == without_loss
    assert events_of().count("after_train_batch") == len(ends)
    (facts,) = values_of(Event.FIT_START, "hyperparameters")
    assert (facts["config/hparams/path"], facts["config/hparams/loss"], facts["precision"]) == (
        "a",
        "MSELoss",
        precision,
    )


def test_a_second_fit_is_a_new_attempt_and_nothing_else_is_published() -> None:
    callback = OffloopCallback(run_name=RUN, record="all")
    trainer, module = make_trainer(callback, max_epochs=1), Module()
    trainer.fit(module, DATA)
    trainer.validate(module, DATA, verbose=False)
    trainer.test(module, DATA, verbose=False)
    trainer.predict(module, DATA)
    trainer.fit_loop.max_epochs = trainer.max_epochs + 1
    trainer.fit(module, DATA)
    assert [one.status for one in find_run(RUN).attempts] == ["finished", "finished"]
    ends = [[one.timestamp for one in snapshots_of(attempt=n) if one.event is Event.BATCH_END] for n in (1, 2)]
    assert [[one.batch.value for one in part] for part in ends] == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    assert [one.sample.value for one in ends[1]] == [ROWS + one.sample.value for one in ends[0]]
    assert ends[1][0].total_wct > ends[0][-1].total_wct
    assert not any(name.startswith(("eval", "predict")) for name in events_of(attempt=1) + events_of(attempt=2))
    assert [events_of(attempt=number).count("before_dataloader") for number in (1, 2)] == [BATCHES, BATCHES]
    assert len(pickle.dumps(callback)) > 0


@pytest.mark.parametrize(("limits", "stop_at"), [({"max_epochs": 3}, 4), ({"max_epochs": -1, "max_steps": 12}, 5)])
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_training_that_resumes_counts_on(limits: dict[str, int], stop_at: int, runs_dir: Path) -> None:
    fit(OffloopCallback(run_name=RUN), max_steps=stop_at, max_epochs=-1, act=None).trainer.save_checkpoint(
        runs_dir / "last.ckpt"
    )
    fit(ckpt_path=runs_dir / "last.ckpt", **limits)
    first = next(one for one in snapshots_of() if one.event is Event.FIT_START)
    # The last batch of an epoch has fewer rows.
    assert (first.timestamp.batch, first.timestamp.sample) == (stop_at, min(ROWS, stop_at * SIZE))
    ends = [one for one in snapshots_of() if one.event is Event.BATCH_END]
    assert int(ends[0].timestamp.batch) == stop_at + 1
    assert [one.action for one in Recording(find_run(RUN).recording).read_checkpoints()][:1] == ["load"]


def test_with_manual_optimization_a_batch_is_one_in_which_optimizers_have_stepped() -> None:
    class Manual(Module):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            self.automatic_optimization = False
            return [torch.optim.SGD(self.net[0].parameters(), 0.1), torch.optim.Adam(self.net[3].parameters(), 0.01)]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            if batch_idx % 2:
                for optimizer in self.optimizers():
                    optimizer.step()
                    optimizer.zero_grad()
            return loss

    module = Manual()
    module.automatic_optimization = False
    trainer = make_trainer(OffloopCallback(run_name=RUN, record="all"), max_epochs=1)
    trainer.fit(module, DATA)
    trainer.fit_loop.max_epochs = trainer.max_epochs + 1
    trainer.fit(module, DATA)
    ends, later = ([one for one in snapshots_of(attempt=n) if one.event is Event.BATCH_END] for n in (1, 2))
    assert [one.timestamp.sample for one in ends] == [2 * SIZE, 4 * SIZE]
    assert [(one.timestamp.batch, one.timestamp.sample) for one in later] == [(3, 6 * SIZE), (4, 8 * SIZE)]
    means = [sum(module.losses[at : at + 2]) / 2 for at in (0, 2)]
    assert [one.loss for one in ends] == pytest.approx(means, abs=1e-6)
    assert ends[0].lr == {"SGD": [0.1], "Adam": [0.01]}
    assert events_of(attempt=1).count("after_train_batch") == 2


class Unsized(IterableDataset[Any]):
    """Rows whose number nobody knows beforehand."""

    def __iter__(self) -> Any:
        return iter(zip(*make_rows(ROWS), strict=True))


@pytest.mark.parametrize(
    ("limits", "max_duration", "batches"),
    [
        ({"max_epochs": -1, "max_steps": 7}, "7ba", 7),
        ({"max_epochs": None, "max_time": {"seconds": 90}, "limit_train_batches": 2}, "90sec", 4),
    ],
)
def test_the_duration_is_that_of_the_limits(limits: dict[str, Any], max_duration: str, batches: int) -> None:
    def act(module: Any, trainer: Any) -> None:
        trainer.should_stop = trainer.global_step == 4 and "max_time" in limits

    fit(act=act, val=False, **limits)
    ends = [one for one in snapshots_of() if one.event is Event.BATCH_END]
    assert len(ends) == batches
    assert str(ends[0].max_duration) == max_duration
    whole = limits.get("limit_train_batches", BATCHES)
    assert {one.dataloader_len for one in ends} == {whole}
    # An epoch that is left in its middle does not end.
    assert events_of().count("epoch_end") == batches // whole


def test_data_of_unknown_length_is_trained_on_and_evaluated_on_command() -> None:
    sender, act = sending(("set", "eval", "now"), ("stop",))
    module = Module(act=act)
    data = DataLoader(Unsized(), batch_size=SIZE)
    make_trainer(OffloopCallback(run_name=RUN), max_epochs=100_000, check_val_every_n_epoch=100_000).fit(
        module, data, [DATA, data]
    )
    evaluated, _ = sender.outcomes
    first = next(one for one in snapshots_of() if one.event is Event.EVAL_END)
    assert int(first.timestamp.batch) == evaluated.batch
    assert set(first.eval_metrics["val"]) == {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"}


@pytest.mark.slow
def test_spawned_processes_publish_and_one_that_fails_has_failed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SUPPORT / "lightning_ranks.py", tmp_path],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "ZeroDivisionError" in done.stderr
    run = find_run("spawn", tmp_path / "runs")
    batches = [(one.rank, int(one.timestamp.batch)) for one in Recording(run.path) if one.event is Event.BATCH_END]
    assert sorted(batches) == [(rank, batch) for rank in range(2) for batch in range(1, 4)]
    assert (run.status, "the process ended within the training" in str(run.last.error)) == ("failed", True)
