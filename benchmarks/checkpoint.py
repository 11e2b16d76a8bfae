"""Pauses for a checkpoint: by a consumer, ``torch.save`` and ``async_save``, in copies of that much memory.

A save is timed from the event at which it is due until the training continues; writing is not waited for. The first
save of each kind is reported separately: it gets its memory from the system. The trainer starts to allocate it after
the first batch; a large save that is due before it is there comes after a later batch."""

import contextlib
import functools
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from common import Report, argument_parser, consumer_process, run, wait_until, wait_until_attached
from torch import Tensor, nn

from offloop.bus import Event
from offloop.trainer import Algorithm, AlgorithmLogger, State, Trainer
from offloop.trainer.device.device import get_device

EVERY = 2
CACHES = 200_000_000  # more than any cache holds
SIZES = {"10 MB": 10_000_000, "100 MB": 100_000_000, "1 GB": 1_000_000_000}


class Weights(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        count = size // 12
        rows = max(1, count // 1_000_000) * 4
        self.layers = nn.ParameterList(torch.full((rows, count // rows // 4), 0.5) for _ in range(4))

    def forward(self, batch: Any) -> Tensor:
        return torch.stack([layer[0].mean() for layer in self.layers])

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.square().mean()


class Watch(Algorithm):
    def __init__(
        self, wait: Callable[[int], object], before_first: Callable[[], object], settle: Callable[[], object]
    ) -> None:
        self.stalls: list[float] = []
        self.idle: list[float] = []
        self._wait = wait
        self._before_first = before_first
        self._settle = settle
        self._began = 0.0
        self._batch = 0

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.BATCH_CHECKPOINT, Event.BEFORE_DATALOADER)

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        if event is Event.BATCH_CHECKPOINT:
            self._batch = state.timestamp.values.batch
            self._settle()
            self._began = time.perf_counter()
        elif self._batch:
            self._settle()
            took = time.perf_counter() - self._began
            is_due = self._batch % EVERY == 0
            (self.stalls if is_due else self.idle).append(took)
            if is_due:
                self._wait(self._batch)
            elif self._batch == 1:
                self._before_first()
            self._batch = 0


def settled() -> None:
    pass


def consumed(
    size: int, runs_dir: Path, saves: int, at_once: bool, device: str = "cpu", settle: Callable[[], object] = settled
) -> tuple[list[float], int]:
    folder = runs_dir / "consumed"
    latest = folder / "latest"

    def wait(batch: int) -> None:
        if at_once:
            return  # it is written after a later batch if its memory is still being allocated
        name = f"ba{batch}.safetensors"
        wait_until(lambda: publisher.wait() or (latest.is_symlink() and os.readlink(latest) == name), name)
        assert trainer._stream.sharing is not None  # it publishes
        trainer._stream.sharing.drain()

    def go_on() -> None:
        assert trainer._stream.sharing is not None  # it publishes
        pool = trainer._stream.sharing._pool
        wait_until(lambda: at_once or pool.size > 0, "memory for checkpoints")

    watch, model = Watch(wait, go_on, settle), Weights(size)
    trainer = Trainer(
        model,
        [torch.zeros(1)] * (EVERY * saves + 1),
        optimizers=torch.optim.Adam(model.parameters()),
        max_duration="1ep",
        algorithms=[watch],
        publish=True,
        runs_dir=runs_dir,
        device=device,
        progress_bar=False,
    )
    options = {
        "folder": folder,
        "filename": "ba{batch}.safetensors",
        "latest_filename": "latest",
        "remote_file_name": "none",
    }
    options |= {"save_interval": f"{EVERY}ba", "num_checkpoints_to_keep": 1}
    told = [part for name, value in options.items() for part in ("-o", f"checkpoint.{name}={value}")]
    publisher = trainer._publisher
    assert publisher is not None  # it publishes
    names = ("--run", trainer.state.run_name, "--runs-dir", str(runs_dir), "--callbacks", "checkpoint", *told)
    with consumer_process(*names) as consumer:
        wait_until_attached(consumer)
        wait_until(lambda: publisher.wait() or publisher.demand, "what the consumer asks for")
        trainer.fit()
        trainer.close()
    nbytes = latest.stat().st_size
    shutil.rmtree(folder)
    idle = statistics.median(watch.idle)
    return [stall - idle for stall in watch.stalls], nbytes


def in_loop(
    size: int,
    folder: Path,
    saves: int,
    save: Callable[[dict[str, Any], Path], Callable[[], object]],
    device: str = "cpu",
    settle: Callable[[], object] = settled,
) -> list[float]:
    model = Weights(size).to(get_device(device).torch_device)
    optimizer = torch.optim.Adam(model.parameters())
    model.loss(model(None), None).backward()
    optimizer.step()
    times = []
    for number in range(saves):
        path = folder / f"save{number}"
        settle()
        began = time.perf_counter()
        done = save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        settle()
        times.append(time.perf_counter() - began)
        done()
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return times


def torch_save(state: dict[str, Any], path: Path) -> Callable[[], object]:
    torch.save(state, path)
    return lambda: None


def async_save(state: dict[str, Any], path: Path) -> Callable[[], object]:
    from torch.distributed.checkpoint import async_save

    saving: Any = async_save(state, checkpoint_id=str(path))
    return saving.result  # type: ignore[no-any-return]


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def plain_copy(nbytes: int, times: int = 5) -> float:
    count = max(1, -(-CACHES // nbytes)) + 1
    source, target = np.ones(count * nbytes, np.uint8), np.zeros(count * nbytes, np.uint8)
    taken = []
    for number in range(count + times):
        part = slice(number % count * nbytes, (number % count + 1) * nbytes)
        began = time.perf_counter()
        np.copyto(target[part], source[part])
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[count:])


def measure_size(report: Report, runs_dir: Path, quick: bool, name: str) -> None:
    size, saves = (2_000_000, 2) if quick else (SIZES[name], 5)
    with process_group():
        copies = [plain_copy(size)]
        report.progress(f"{name}: by a consumer, at once")
        at_once, _ = consumed(size, runs_dir, 1, at_once=True)
        copies.append(plain_copy(size))
        report.progress(f"{name}: by a consumer")
        stalls, nbytes = consumed(size, runs_dir, saves, at_once=False)
        copies.append(plain_copy(nbytes))
        report.progress(f"{name}: torch.save")
        saved = in_loop(size, runs_dir, 2, torch_save)
        copies.append(plain_copy(size))
        report.progress(f"{name}: async_save")
        asynchronous = in_loop(size, runs_dir, saves, async_save)
        copies.append(plain_copy(size))
    copy = statistics.median(copies)
    report.add(f"{name}: plain copy", [one * 1000 for one in copies], "ms")
    report.add(f"{name}: consumer, a save after the second batch", at_once[0] / copy, "copies")
    report.add(f"{name}: consumer, first save", stalls[0] / copy, "copies", 1.3)
    report.add(f"{name}: consumer, later saves", [stall / copy for stall in stalls[1:]], "copies", 1.3)
    report.add(f"{name}: torch.save in the loop", [one / copy for one in saved], "copies")
    report.add(f"{name}: async_save, first", asynchronous[0] / copy, "copies")
    report.add(f"{name}: async_save, later", [one / copy for one in asynchronous[1:]], "copies")


PARTS = {name.replace(" ", ""): functools.partial(measure_size, name=name) for name in SIZES}

if __name__ == "__main__":
    run("checkpoint", PARTS, argument_parser(__doc__, PARTS).parse_args())
