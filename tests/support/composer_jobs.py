"""Trainings with Composer, in a process that has it: ``composer_jobs.py FOLDER JOB...``.

A job is a function of a folder of its own, in which its runs are. What it returns is written to ``JOB/result.json``.
"""

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import composer
import torch
from attached_runs import RUN, Sender, make_network, make_rows
from brokers import broker_pid
from composer.models import ComposerClassifier
from field_stream import Stream
from torch.utils.data import DataLoader, TensorDataset

from offloop.attached.training import AttachedTraining
from offloop.bus.publisher.publisher import Publisher
from offloop.bus.runs.directory import find_run
from offloop.bus.types.demand import BASE_EVENTS, Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.composer import OffloopCallback
from offloop.trainer.stream.run_stream import TrainingStream

ROWS, SIZE = 40, 8


class Witness(composer.Callback):
    """Sees what Composer itself says of its events."""

    def __init__(self, function: Callable[[int], object] = lambda _: None) -> None:
        self.function = function
        self.events: list[str] = []
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.times: list[list[int]] = []
        self.metrics: list[float] = []
        self.evaluated: list[float] = []
        self.evaluated_at: list[int] = []

    def run_event(self, event: Any, state: Any, logger: Any) -> None:
        self.events.append(event.value)
        if event is composer.Event.BATCH_END:
            now = state.timestamp
            self.losses.append(state.total_loss_dict["loss/train/total"])
            self.rates.append(state.optimizers[0].param_groups[0]["lr"])
            self.times.append(
                [int(now.epoch), int(now.batch), int(now.sample), round(now.total_wct.total_seconds() * 1e6)]
            )
            self.metrics.append(float(state.train_metric_values.get("MulticlassAccuracy", 0)))
            self.function(int(now.batch))
        elif event is composer.Event.EVAL_END:
            self.evaluated_at.append(int(state.timestamp.batch))
            self.evaluated.append(float(state.eval_metric_values["MulticlassAccuracy"]))


class WithoutMetrics(ComposerClassifier):
    def get_metrics(self, is_train: bool = False) -> Any:
        return {} if is_train else super().get_metrics(is_train)


def loader(rows: int = ROWS) -> Any:
    return DataLoader(TensorDataset(*make_rows(rows)), batch_size=SIZE)


def train(*callbacks: Any, duration: str = "2ep", fit: bool = True, **options: Any) -> tuple[Any, Any]:
    network = make_network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.05)
    options = {"train_dataloader": loader(), "seed": 3, "progress_bar": False, "device": "cpu", **options}
    model = options.pop("model", ComposerClassifier)
    schedule = options.pop("schedulers", torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    trainer = composer.Trainer(
        model=model(network, num_classes=4),
        max_duration=duration,
        callbacks=list(callbacks),
        optimizers=optimizer,
        schedulers=schedule,
        step_schedulers_every_batch=True,
        **options,
    )
    if fit:
        trainer.fit()
        trainer.close()
    return trainer, network


def weights(network: torch.nn.Module) -> list[Any]:
    return [one.detach().tolist() for one in network.parameters()]


def events(folder: Path) -> Any:
    seen = {}
    for size in (8, 3):
        witness = Witness()
        watching = OffloopCallback(run_name=f"microbatches-of-{size}", record="all")
        train(witness, watching, device_train_microbatch_size=size, eval_dataloader=loader(16))
        seen[watching._options["run_name"]] = [
            *(witness.events, witness.losses, witness.rates, witness.times, witness.metrics, witness.evaluated),
        ]
    return seen


def kept(folder: Path) -> Any:
    counts: list[int] = []
    publish_kept, gathers_until = AttachedTraining.publish_kept, Publisher.gathers_until

    def count(training: AttachedTraining) -> None:
        if training.kept:
            counts.append(len(training.kept))
        publish_kept(training)

    AttachedTraining.publish_kept = count  # type: ignore[method-assign]
    Publisher.gathers_until = property(lambda _: 1 << 62)  # type: ignore[assignment,method-assign]
    witness = Witness()
    train(witness, OffloopCallback(run_name="kept"), model=WithoutMetrics, eval_dataloader=loader(16))
    AttachedTraining.publish_kept = publish_kept  # type: ignore[method-assign]
    Publisher.gathers_until = gathers_until  # type: ignore[method-assign]
    base = [one for one in witness.events if one in BASE_EVENTS]
    return counts, base, witness.losses, witness.rates, witness.times


def same(folder: Path) -> Any:
    has_outputs = []

    def kill(batch: int) -> None:
        has_outputs.append(watching._composer.outputs is watching._training.state.outputs)
        if batch == 5:
            os.kill(broker_pid(find_run(RUN).path), signal.SIGKILL)

    watching = OffloopCallback(run_name=RUN)
    return [weights(train(*callbacks)[1]) for callbacks in ([], [watching, Witness(kill)])], all(has_outputs)


def commands(folder: Path) -> Any:
    heat: list[float] = []

    def set_heat(value: Any) -> None:
        heat.append(float(value))

    sent = [("pause",), ("set", "lr", 0.5), ("set", "heat", 3), ("set", "heat", "hot"), ("set", "eval", "now")]
    sender = Sender(*sent, ("checkpoint",), ("resume",), ("stop",))
    witness = Witness(sender.step)
    watching = OffloopCallback(run_name=RUN, on_set={"heat": set_heat})
    trainer, _ = train(
        *(witness, watching),
        duration="100000ep",
        eval_dataloader=loader(16),
        eval_interval=0,
        save_folder=str(folder / "saved"),
        save_interval="100000ep",
    )
    refusing = Sender(("set", "eval", "now"), ("checkpoint",), ("stop",), run="refusing")
    train(Witness(refusing.step), OffloopCallback(run_name="refusing"), duration="100000ep")
    return {
        "errors": [one.error for one in sender.outcomes],
        "batches": [one.batch for one in sender.outcomes],
        "refused": [one.error for one in refusing.outcomes],
        "heat": heat,
        "rates": witness.rates,
        "done": witness.times[-1][1],
        "evaluated": witness.evaluated_at,
        "saved": sorted(one.name for one in (folder / "saved").iterdir() if not one.is_symlink()),
        "intervals": [one.eval_interval(trainer.state, composer.Event.BATCH_END) for one in trainer.state.evaluators],
    }


def resuming(folder: Path) -> Any:
    saving = {"save_folder": str(folder / "saved"), "save_interval": "1ep"}
    train(OffloopCallback(run_name=RUN), **saving)
    (path,) = (folder / "saved").glob("ep1-*")
    train(OffloopCallback(run_name=RUN), duration="3ep", load_path=str(path))
    again, _ = train(OffloopCallback(run_name="again"), fit=False)
    for _ in range(2):
        again.fit(duration="1ep")
    again.close()
    return None


def fields(folder: Path) -> Any:
    names = (
        "gradient_norm",
        "gradient_norms",
        "parameter_norm",
        "moment_norms",
        "update_norms",
        "phases",
        "memory_stats",
    )
    stream = Stream(Demand({Event.BATCH_END: EventDemand(1, dict.fromkeys(names, 1))}))
    stream.run_name, stream.answer, stream.poll = "w", None, None  # type: ignore[attr-defined]
    start_publisher = TrainingStream._start_publisher
    TrainingStream._start_publisher = lambda *_: stream  # type: ignore[assignment,method-assign,return-value]
    found: list[dict[str, float]] = []
    norm = torch.nn.utils.get_total_norm

    class Look(composer.Callback):
        def after_train_batch(self, state: Any, logger: Any) -> None:
            found.append({"gradient_norm": float(norm([one.grad for one in state.model.parameters()]))})
            self.before = [one.detach().clone() for one in state.model.parameters()]

        def batch_end(self, state: Any, logger: Any) -> None:
            now = [one.detach() for one in state.model.parameters()]
            kept = [state.optimizers[0].state[one]["exp_avg"] for one in state.model.parameters()]
            updates = [new - old for new, old in zip(now, self.before, strict=True)]
            found[-1] |= {
                "parameter_norm": float(norm(now)),
                "moment": float(norm(kept)),
                "update": float(norm(updates)),
            }

    train(OffloopCallback(), Look(), duration="1ep")
    TrainingStream._start_publisher = start_publisher  # type: ignore[method-assign]
    return found, [sent for event, _, sent in stream.sent if event is Event.BATCH_END]


def failing(folder: Path) -> Any:
    def fail(batch: int) -> None:
        if batch == 4:
            raise ZeroDivisionError("the user's")

    shown: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offloop").addHandler(handler)
    plain = weights(train()[1])
    batch_end = AttachedTraining.batch_end

    def break_down(*_: Any, **__: Any) -> None:
        raise RuntimeError("a defect of ours")

    AttachedTraining.batch_end = break_down  # type: ignore[method-assign]
    watching = OffloopCallback(run_name="defect")
    watched = weights(train(watching)[1])
    AttachedTraining.batch_end = batch_end  # type: ignore[method-assign]
    lines, detached = [*shown], watching.detached
    again = weights(train(watching)[1])
    (folder / "result.json").write_text(json.dumps([plain == watched == again, lines, detached]))
    # The program ends here.
    train(OffloopCallback(run_name=RUN), Witness(fail))


JOBS = {one.__name__: one for one in (events, kept, same, commands, resuming, fields, failing)}

if __name__ == "__main__":
    for name in sys.argv[2:]:
        place = Path(sys.argv[1]) / name
        place.mkdir(parents=True, exist_ok=True)
        os.environ["OFFLOOP_RUNS_DIR"] = str(place / "runs")
        (place / "result.json").write_text(json.dumps(JOBS[name](place), default=float))
