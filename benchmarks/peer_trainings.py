"""The trainings of ``peers.py``, each in a separate process, with a tool used as its documentation says.

``python peer_trainings.py ORDER`` trains. ``--found READER FOLDER...`` prints how many steps the tool's own reader
finds in each folder."""

import contextlib
import gc
import json
import logging
import mmap
import os
import statistics
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cores import MARK, marked, pin_apart, pin_nowhere
from models import MEDIUM, TINY, Made
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

HERE = Path(__file__).parent
PROGRESS = struct.Struct("qqd")  # process id of the training, number of started steps, monotonic time of the last start
SAVE_EVERY = 4
PAUSE = 0.1  # seconds in which the other processes of a tool finish their start, before steps are measured
_MEGABYTE = 1_000_000


class Layers(torch.nn.Module):
    def __init__(self, megabytes: int) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.zeros(1000, megabytes * 250 // 4) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mean = torch.stack([layer.mean() for layer in self.layers]).sum()
        return torch.stack([mean.expand(len(inputs)), -mean.expand(len(inputs))], 1)


def layers(megabytes: int) -> Callable[[int], Made]:
    rows = lambda batches: TensorDataset(torch.zeros(batches, 1), torch.zeros(batches, dtype=torch.long))  # noqa: E731
    return lambda batches: (Layers(megabytes), DataLoader(rows(batches), batch_size=1))


JOBS = {"tiny": TINY, "medium": MEDIUM, "100 MB": layers(100), "1 GB": layers(1000)}


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs.flatten(0, -2), targets.flatten())


class Training:
    def __init__(
        self, order: SimpleNamespace, job: str, steps: int, where: Path, progress: mmap.mmap, observe: bool
    ) -> None:
        self.order, self.where = order, where
        self.job, self.steps = job, steps
        self.ticks: list[float] = []
        self.own: list[float] = []
        self.usage: dict[str, float] = {}
        self.wait_until_ready: Callable[[], object] = lambda: None
        self._progress = progress
        self._observe = observe
        # Before the first measured save.
        first, half = min(SAVE_EVERY if order.save else 10, steps // 4), steps // 2
        # The steps after a change, by the cell that they are measured for.
        self._changes = {first: ("apart", pin_apart), half: ("tiny", pin_nowhere)}
        if job != "tiny":
            self._changes = {first: (job, lambda: None)}
        where.mkdir(parents=True)
        PROGRESS.pack_into(progress, 0, os.getpid(), 0, time.monotonic())

    def make(self) -> tuple["Ticking", DataLoader, torch.optim.Optimizer]:
        net, loader = JOBS[self.job](self.steps)
        model = Ticking(net, self)
        return model, loader, torch.optim.SGD(model.parameters(), lr=0.01)

    def tick(self) -> None:
        now = time.monotonic()
        self.ticks.append(now)
        self.own.append(time.thread_time())
        done = len(self.ticks)
        PROGRESS.pack_into(self._progress, 0, os.getpid(), done, now)
        if done == self.steps // 2:
            if self._observe:
                self.usage = usage()
            if self.order.disk:
                fill(Path(self.order.disk))
        if done in self._changes:
            self.wait_until_ready()
            _, pin = self._changes[done]
            pin()
            time.sleep(PAUSE)

    def rest(self) -> None:
        if self.order.slow:
            time.sleep(0.05)

    def result(self) -> dict[str, Any]:
        gaps = [after - before for before, after in zip(self.ticks, self.ticks[1:], strict=False)]
        half = len(gaps) // 2
        starts = [*self._changes, self.steps]
        speeds, own = {}, {}
        for (begin, (cell, _)), end in zip(self._changes.items(), starts[1:], strict=True):
            # The pause is in the gap before the first, and slows the steps after it.
            first, last = begin + max(2, self.steps // 50), end - 1
            speeds[cell] = (last - first) / (self.ticks[last] - self.ticks[first])
            own[cell] = (self.own[last] - self.own[first]) / (last - first) * 1e6
        return {
            "speeds": speeds,
            "own": own,
            "halves": [statistics.median(gaps[:half]), statistics.mean(gaps[half:])],
            "gaps": gaps,
            **self.usage,
        }


class Ticking(torch.nn.Module):
    def __init__(self, net: torch.nn.Module, training: Training) -> None:
        super().__init__()
        self.net = net
        self._tick = training.tick

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._tick()
        outputs: torch.Tensor = self.net(inputs)
        return outputs


def usage() -> dict[str, float]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    page, others = os.sysconf("SC_PAGE_SIZE") / _MEGABYTE, 0.0
    for process in marked(os.environ[MARK]):
        with contextlib.suppress(OSError):
            if process != os.getpid():
                others += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * page
    threads = int(status["Threads"])
    return {"threads": threads, "memory": int(status["VmRSS"].split()[0]) * 1024 / _MEGABYTE, "others": others}


def fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass


# -- the tools in a plain loop: each gives a function that logs one step -----------------------------------------------

Log = Callable[[int, float, float], object]


@contextlib.contextmanager
def alone(training: Training) -> Iterator[Log]:
    kept: list[tuple[float, float]] = []
    yield lambda step, loss, rate: (kept.append((loss, rate)), training.rest())


@contextlib.contextmanager
def tensorboard(training: Training) -> Iterator[Log]:
    # https://docs.pytorch.org/docs/stable/tensorboard.html
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(training.where) as writer:

        def log(step: int, loss: float, rate: float) -> None:
            writer.add_scalar("loss", loss, step)
            writer.add_scalar("lr", rate, step)

        yield log


@contextlib.contextmanager
def wandb(training: Training) -> Iterator[Log]:
    # https://docs.wandb.ai/models/track/log
    import wandb

    mode = "online" if training.order.server else "offline"
    with wandb.init(project="peers", dir=training.where, mode=mode) as run:
        yield lambda step, loss, rate: run.log({"loss": loss, "lr": rate}, step=step)


@contextlib.contextmanager
def mlflow(training: Training) -> Iterator[Log]:
    # https://mlflow.org/docs/latest/ml/tracking/
    import mlflow

    mlflow.set_tracking_uri(training.order.server or f"sqlite:///{training.where}/mlflow.db")
    mlflow.set_experiment("peers")
    with mlflow.start_run():
        yield lambda step, loss, rate: mlflow.log_metrics({"loss": loss, "lr": rate}, step=step)


@contextlib.contextmanager
def trackio(training: Training) -> Iterator[Log]:
    # https://huggingface.co/docs/trackio
    # Trackio reads its folder once.
    os.environ.setdefault("TRACKIO_DIR", str(training.where))
    import trackio

    server = {"server_url": f"{training.order.server}?write_token=x"} if training.order.server else {}
    trackio.init(project="peers", name=f"run-{training.where.name}", **server)
    yield lambda step, loss, rate: trackio.log({"loss": loss, "lr": rate}, step=step)
    trackio.finish()


@contextlib.contextmanager
def aim(training: Training) -> Iterator[Log]:
    # https://aimstack.readthedocs.io/en/latest/quick_start/setup.html
    from aim import Run

    # Aim needs host and port.
    server = training.order.server and training.order.server.replace("http://", "aim://")
    run = Run(repo=server or str(training.where))

    def log(step: int, loss: float, rate: float) -> None:
        run.track(loss, name="loss", step=step)
        run.track(rate, name="lr", step=step)

    yield log
    run.close()


LOGS = {"alone": alone, "tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow, "trackio": trackio, "aim": aim}


# -- the loops and trainers --------------------------------------------------------------------------------------------


def plain(training: Training, tool: str) -> None:
    model, loader, optimizer = training.make()
    with LOGS[tool](training) as log:
        for step, (inputs, targets) in enumerate(loader):
            loss = loss_of(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(step, loss.item(), optimizer.param_groups[0]["lr"])
            if training.order.save and (step + 1) % SAVE_EVERY == 0:
                save_plainly(training, tool, model, optimizer)


def save_plainly(training: Training, tool: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, training.where / "saved.pt")


def async_save(training: Training, _: str) -> None:
    # https://docs.pytorch.org/docs/stable/distributed.checkpoint.html
    from torch.distributed.checkpoint import async_save

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model, loader, optimizer = training.make()
    saving: Any = None
    for step, (inputs, targets) in enumerate(loader):
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        if (step + 1) % SAVE_EVERY == 0:
            if saving is not None:
                saving.result()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            saving = async_save(state, checkpoint_id=str(training.where / f"saved-{step}"))
    saving.result()
    torch.distributed.destroy_process_group()


def traceml(training: Training, _: str) -> None:
    # https://traceopt-ai.github.io/traceml/user_guide/quickstart/
    import traceml_ai

    traceml_ai.init(mode="auto")
    model, loader, optimizer = training.make()
    kept = []
    for inputs, targets in loader:
        with traceml_ai.trace_step(model):
            loss = loss_of(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        kept.append(loss.item())


@contextlib.contextmanager
def consumer(training: Training) -> Iterator[dict[str, Any]]:
    from common import consumer_process

    order, options = training.order, ["--callbacks", "metrics,lr", "--log", "jsonl"]
    if order.slow:
        options = ["--callbacks", f"{HERE / 'callbacks.py'}:Sleeper"]
    elif order.server:
        options = ["--callbacks", "metrics,lr", "--log", "mlflow", "-o", f"mlflow.tracking_uri={order.server}"]
    elif order.save:
        given = {"folder": training.where / "saved", "save_interval": f"{SAVE_EVERY}ba", "num_checkpoints_to_keep": 1}
        given |= {"weights_only": str(order.host != "trainer").lower()}
        options = [
            "--callbacks",
            "checkpoint",
            *(part for name, value in given.items() for part in ("-o", f"checkpoint.{name}={value}")),
        ]
    with consumer_process("--runs-dir", str(training.where), *options) as process:
        assert process.stderr is not None
        said = [process.stderr.readline()]
        while "waiting for a run" not in said[-1]:
            if not said[-1]:
                raise RuntimeError(f"the consumer ended: {''.join(said[-2:]).strip()}")
            said.append(process.stderr.readline())
        attached = threading.Event()

        def read() -> None:
            # To the end, because it would block otherwise.
            for line in process.stderr or ():
                if "attached" in line:
                    attached.set()

        threading.Thread(target=read, daemon=True).start()
        # With a server that hangs it may never attach.
        training.wait_until_ready = lambda: attached.wait(2 if order.server else 30)
        yield {"run_name": "peers", "runs_dir": training.where}


def watch(training: Training, _: str) -> None:
    import offloop

    model, loader, optimizer = training.make()
    with consumer(training) as options, offloop.watch(model, optimizer, **options) as run:
        for inputs, targets in run.batches(loader):
            loss = loss_of(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)


def trainer(training: Training, _: str) -> None:
    from offloop.trainer import Trainer

    model, loader, optimizer = training.make()

    class Task(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: Any) -> torch.Tensor:
            outputs: torch.Tensor = self.model(batch[0])
            return outputs

        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return loss_of(outputs, batch[1])

    with consumer(training) as options:
        ours = Trainer(
            Task(), loader, optimizers=optimizer, max_duration="1ep", progress_bar=False, device="cpu", **options
        )
        ours.fit()
        ours.close()


def lightning(training: Training, tool: str) -> None:
    # https://lightning.ai/docs/pytorch/stable/
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    model, loader, optimizer = training.make()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = loss_of(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            self.log("lr", optimizer.param_groups[0]["lr"])
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    class Slow(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            training.rest()

    with contextlib.ExitStack() as stack:
        callbacks: list[Any] = []
        if tool == "offloop":
            from offloop.lightning import OffloopCallback

            callbacks = [OffloopCallback(**stack.enter_context(consumer(training)))]
        elif training.order.slow:
            callbacks = [Slow()]
        elif training.order.save:
            callbacks = [ModelCheckpoint(training.where, every_n_train_steps=SAVE_EVERY)]
        loggers: dict[str, Any] = {"csv": CSVLogger, "tensorboard": TensorBoardLogger}
        L.Trainer(
            max_epochs=1,
            logger=loggers[tool](training.where) if tool in loggers else False,
            callbacks=callbacks,
            log_every_n_steps=1,
            accelerator="cpu",
            enable_progress_bar=False,
            enable_checkpointing=training.order.save,
            enable_model_summary=False,
            default_root_dir=training.where,
        ).fit(Module(), loader)


def transformers(training: Training, tool: str) -> None:
    # https://huggingface.co/docs/transformers/main_classes/trainer
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    model, loader, optimizer = training.make()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            outputs = self.net(inputs)
            return {"loss": loss_of(outputs, labels), "logits": outputs}

    class Slow(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            training.rest()

    theirs = Trainer(
        Model(),
        TrainingArguments(
            output_dir=str(training.where),
            num_train_epochs=1,
            per_device_train_batch_size=loader.batch_size or 1,
            report_to="tensorboard" if tool == "tensorboard" else "none",
            save_strategy="steps" if training.order.save else "no",
            save_steps=SAVE_EVERY,
            save_total_limit=1,
            use_cpu=True,
            disable_tqdm=True,
            logging_steps=1,
        ),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)),
        train_dataset=[{"inputs": inputs, "labels": labels} for inputs, labels in loader.dataset],
    )
    theirs.remove_callback(PrinterCallback)
    with contextlib.ExitStack() as stack:
        if tool == "offloop":
            from offloop.transformers import OffloopCallback

            theirs.add_callback(OffloopCallback(theirs, **stack.enter_context(consumer(training))))
        else:
            theirs.add_callback(Slow())
        theirs.train()


def accelerate(training: Training, tool: str) -> None:
    # https://huggingface.co/docs/accelerate/usage_guides/tracking
    from accelerate import Accelerator

    tracker = {"log_with": "tensorboard", "project_dir": training.where} if tool == "tensorboard" else {}
    accelerator = Accelerator(cpu=True, **tracker)
    if tracker:
        accelerator.init_trackers("peers")
    model, optimizer, loader = (lambda net, data, its: accelerator.prepare(net, its, data))(*training.make())
    with contextlib.ExitStack() as stack:
        if tool == "offloop":
            from offloop.accelerate import attach

            attach(accelerator, **stack.enter_context(consumer(training)))
        for step, (inputs, targets) in enumerate(loader):
            loss = loss_of(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if tracker:
                accelerator.log({"loss": loss.item(), "lr": optimizer.param_groups[0]["lr"]}, step=step)
            elif tool == "alone":
                loss.item()
            if training.order.save and (step + 1) % SAVE_EVERY == 0:
                accelerator.save_state(training.where / "saved")
        accelerator.end_training()


def composer(training: Training, tool: str) -> None:
    # https://docs.mosaicml.com/projects/composer/
    from composer import Callback, Trainer
    from composer.callbacks import LRMonitor
    from composer.loggers import TensorboardLogger
    from composer.models import ComposerModel

    model, loader, optimizer = training.make()

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, batch: Any) -> torch.Tensor:
            return self.net(batch[0])

        def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return loss_of(outputs, batch[1])

    class Slow(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            training.rest()

    with contextlib.ExitStack() as stack:
        callbacks: list[Any] = [Slow()]
        if tool == "offloop":
            from offloop.composer import OffloopCallback

            callbacks = [OffloopCallback(**stack.enter_context(consumer(training)))]
        elif tool == "tensorboard":
            callbacks = [LRMonitor()]
        saving = {"save_folder": str(training.where / "saved"), "save_interval": f"{SAVE_EVERY}ba"}
        saving |= {"save_num_checkpoints_to_keep": 1}
        theirs = Trainer(
            model=Model(),
            train_dataloader=loader,
            optimizers=optimizer,
            max_duration="1ep",
            callbacks=callbacks,
            loggers=[TensorboardLogger(str(training.where))] if tool == "tensorboard" else [],
            progress_bar=False,
            device="cpu",
            **(saving if training.order.save else {}),
        )
        theirs.fit()
        theirs.close()


HOSTS: dict[str, Callable[[Training, str], None]] = {
    one.__name__: one
    for one in (plain, async_save, traceml, watch, trainer, lightning, transformers, accelerate, composer)
}


# -- the tools' own readers --------------------------------------------------------------------------------------------


def found_in_events(where: Path) -> int:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    most = 0
    for folder in {path.parent for path in where.rglob("events.out.tfevents.*")}:
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        most = max([most, *(len(events.Scalars(tag)) for tag in events.Tags()["scalars"] if "loss" in tag)])
    return most


def found_in_csv(where: Path) -> int:
    import csv

    (path,) = where.rglob("metrics.csv")
    with path.open() as file:
        return sum(bool(row["loss"]) for row in csv.DictReader(file))


def found_in_wandb(where: Path) -> int:
    # A LevelDB log: its own reader needs a server or a terminal.
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = where.rglob("run-*.wandb")
    data, place, whole, found = path.read_bytes(), 7, b"", 0
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        if kind == 0 or place + 7 + length > len(data):
            break
        place += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(whole)
            found, whole = found + (record.WhichOneof("record_type") == "history"), b""
    return found


def found_in_mlflow(where: Path) -> int:
    from mlflow import MlflowClient

    (path,) = where.rglob("mlflow.db")
    client = MlflowClient(f"sqlite:///{path}")
    experiments = [one.experiment_id for one in client.search_experiments()]
    (run,) = client.search_runs(experiments)
    return len(client.get_metric_history(run.info.run_id, "loss"))


def found_in_trackio(where: Path) -> int:
    (path,) = where.rglob("peers.db")
    command = [str(Path(sys.executable).with_name("trackio")), "get", "metric", "--json"]
    command += ["--project", "peers", "--metric", "loss", "--run", "run-tool-0-0"]
    out = subprocess.run(command, env={**os.environ, "TRACKIO_DIR": str(path.parent)}, capture_output=True, check=True)
    return len(json.loads(out.stdout)["values"])


def found_in_aim(where: Path) -> int:
    # Its documentation asks for a new index after a run that ended early.
    from aim import Repo, Run

    (path,) = (one.parent for one in where.rglob(".aim"))
    command = [str(Path(sys.executable).with_name("aim")), "storage", "--repo", str(path), "reindex"]
    subprocess.run(command, input=b"y\n", capture_output=True, check=True)
    repo = Repo(str(path))
    (name,) = repo.list_all_runs()
    values = [
        one.values.sparse_list()[0] for one in Run(name, repo=repo, read_only=True).metrics() if one.name == "loss"
    ]
    return sum(map(len, values))


def found_in_traceml(where: Path) -> int:
    (path,) = where.rglob("final_summary.json")
    return int(json.loads(path.read_text())["step_time"]["metadata"]["training_total_steps"])


def found_in_recording(where: Path) -> int:
    from offloop.bus import Event, Recording

    (path,) = where.rglob("*.mcap")
    return sum(1 for _ in Recording(path).snapshots([Event.BATCH_END]))


def silence() -> None:
    warnings.simplefilter("ignore")
    for noisy in ("lightning", "pytorch_lightning", "lightning.pytorch", "transformers", "composer"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def main() -> None:
    silence()
    if sys.argv[1] == "--found":
        print(*(globals()[f"found_in_{sys.argv[2]}"](Path(folder)) for folder in sys.argv[3:]))
        return
    torch.set_num_threads(1)
    order = SimpleNamespace(**json.loads(sys.argv[1]))
    with Path(order.progress).open("r+b") as file:
        progress = mmap.mmap(file.fileno(), 0)
    bare = SimpleNamespace(**{**vars(order), "slow": False, "server": None, "disk": None, "save": False})
    for number, (job, steps, least, most, seconds) in enumerate(order.jobs):
        begin, turn = time.monotonic(), 0
        # The first pair of the process warms up and measures the memory; the last training has the tool.
        while turn < least or (turn < most and time.monotonic() - begin < seconds):
            warms_up = number == turn == 0 and most > 1
            for side in order.sides:
                its, (host, tool) = (bare, order.bare) if side == "bare" else (order, (order.host, order.tool))
                where = Path(order.where) / f"{side}-{number}-{turn}"
                count = min(steps, 2 * SAVE_EVERY) if side == "bare" and order.save else steps
                training = Training(its, job, count, where, progress, observe=number == turn == 0)
                HOSTS[host](training, tool)
                pin_nowhere()
                with Path(order.results).open("a") as results:
                    found = {"job": job, "side": side, "turn": turn, "warms_up": warms_up, **training.result()}
                    results.write(json.dumps(found) + "\n")
                del training
                gc.collect()
            turn += 1


if __name__ == "__main__":
    main()
