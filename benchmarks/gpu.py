"""Costs on a GPU: training speed against bare loops, waits for the GPU, pauses for checkpoints, memory.

One bare loop reads its loss in each step, as many loggers do. ``make gpu`` runs it. ``--device cpu`` only tests it."""

import contextlib
import functools
import os
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from checkpoint import async_save, consumed, in_loop, process_group, torch_save
from common import Report, argument_parser, microseconds, ratios, run
from hot_loop import attached, fit
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import offloop
from offloop.bus import Event
from offloop.bus.errors import ConfigurationError
from offloop.bus.tensors.segments import SegmentPool
from offloop.trainer import Algorithm, AlgorithmLogger, Classifier, State, Trainer
from offloop.trainer.device.device import get_device
from offloop.trainer.stream.tensor_sharing import pin

MIB = 1 << 20
WITH_FIELDS = "speed,lr,optimizer,activations,phases"  # with fields that are computed on the GPU
DISTINCT = 8  # number of different batches


class Job(NamedTuple):
    widths: tuple[int, ...]
    rows: int
    batches: int
    alone: float  # least share of the bare loop's speed without a stream
    watched: float  # the same with a consumer that runs speed,lr


JOBS = {
    "small MLP": Job((256, 256, 256, 10), 64, 2000, 0.95, 0.90),
    "medium MLP": Job((2048,) * 9 + (10,), 1024, 200, 0.99, 0.98),
}
SIZES = {"100 MB": 100_000_000, "1 GB": 1_000_000_000}


class Made(NamedTuple):
    module: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[tuple[Tensor, Tensor]]


def make(job: Job, device: str) -> Made:
    where = get_device(device).torch_device
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for wide, narrow in zip(job.widths, job.widths[1:], strict=False):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    module = nn.Sequential(*layers[:-1]).to(where)
    inputs = torch.randn(DISTINCT, job.rows, job.widths[0], device=where)
    targets = torch.randint(0, job.widths[-1], (DISTINCT, job.rows), device=where)
    pairs = list(zip(inputs, targets, strict=True))
    batches = [pairs[index % DISTINCT] for index in range(job.batches)]
    return Made(module, torch.optim.SGD(module.parameters(), lr=0.01), batches)


def tiny(job: Job) -> Job:
    return job._replace(widths=(job.widths[0] // 8, 16, 10), rows=8, batches=20)


def settle(device: str) -> None:
    if device == "gpu":
        torch.cuda.synchronize()


def bare(job: Job, device: str, read: Callable[[Tensor], object] = lambda loss: None) -> float:
    module, optimizer, batches = make(job, device)
    settle(device)
    begin = time.perf_counter()
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = cross_entropy(module(inputs), targets)
        loss.backward()
        optimizer.step()
        read(loss)
    settle(device)
    return job.batches / (time.perf_counter() - begin)


def watched(job: Job, device: str, runs_dir: Path) -> float:
    module, optimizer, batches = make(job, device)
    run = offloop.watch(module, optimizer, runs_dir=runs_dir)

    def train(batch: tuple[Tensor, Tensor]) -> None:
        inputs, targets = batch
        optimizer.zero_grad()
        loss = cross_entropy(module(inputs), targets)
        loss.backward()
        optimizer.step()
        run.log(loss=loss)

    remaining = iter(run.batches(batches))
    train(next(remaining))  # the run starts with its first batch
    with attached(run._training, runs_dir, "--callbacks", "speed,lr"):
        settle(device)
        begin = time.perf_counter()
        for batch in remaining:
            train(batch)
        settle(device)
        took = time.perf_counter() - begin
        run.close()
    return (job.batches - 1) / took


def make_trainer(job: Job, device: str, runs_dir: Path, **options: Any) -> Trainer:
    module, optimizer, batches = make(job, device)
    duration = f"{job.batches}ba"
    settings = {"max_duration": duration, "runs_dir": runs_dir, "device": device, "progress_bar": False, "seed": 0}
    return Trainer(Classifier(module), batches, optimizers=optimizer, **(settings | options))


def trained(job: Job, device: str, runs_dir: Path, callbacks: str | None) -> float:
    with make_trainer(job, device, runs_dir, publish=callbacks is not None) as trainer, contextlib.ExitStack() as stack:
        if callbacks is not None:
            stack.enter_context(attached(trainer, runs_dir, "--callbacks", callbacks))
        return fit(trainer, job.batches)


def measure_speed(report: Report, runs_dir: Path, quick: bool, device: str) -> None:
    for name, job in (("small MLP", tiny(JOBS["small MLP"])),) if quick else JOBS.items():
        rounds = 1 if quick else 5
        bare(job, device)
        speeds: dict[str, list[float]] = {kind: [] for kind in ("bare", "item", "watched", "alone", "speed,lr")}
        for _ in report.rounds(name, rounds):
            speeds["bare"].append(bare(job, device))
            speeds["item"].append(bare(job, device, Tensor.item))
            speeds["watched"].append(watched(job, device, runs_dir))
            speeds["alone"].append(trained(job, device, runs_dir, None))
            speeds["speed,lr"].append(trained(job, device, runs_dir, "speed,lr"))
        report.add(f"{name}: bare loop", speeds["bare"], "batches/s")
        report.add(f"{name}: loss.item() in each step / bare", ratios(speeds["item"], speeds["bare"]), "x")
        for kind, what, goal in (
            ("watched", "watch() with speed,lr", job.watched),
            ("alone", "Trainer without stream", job.alone),
            ("speed,lr", "Trainer with speed,lr", job.watched),
        ):
            report.add(f"{name}: {what} / bare", ratios(speeds[kind], speeds["bare"]), "x", goal, at_least=True)


@contextlib.contextmanager
def waits_counted(device: str) -> Iterator[list[str]]:
    waits: list[str] = []
    if device != "gpu":
        yield waits
        return

    def noting(original: Callable[..., object]) -> Callable[..., object]:
        def wait(*arguments: object) -> object:
            waits.append(repr(original))
            return original(*arguments)

        return wait

    def warned(message: object, *_: object, **__: object) -> None:
        if "synchronizing CUDA operation" in str(message):
            waits.append(str(message))

    with contextlib.ExitStack() as stack:
        for owner in (torch.cuda.Event, torch.cuda.Stream, torch.cuda):
            stack.enter_context(mock.patch.object(owner, "synchronize", noting(owner.synchronize)))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("always")
        stack.enter_context(mock.patch.object(warnings, "showwarning", warned))
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


class CountWaits(Algorithm):
    def __init__(self) -> None:
        self.waits: list[str] = []
        self.until_last_batch = 0

    def match(self, event: Event, state: State) -> bool:
        return event is Event.BATCH_CHECKPOINT

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        self.until_last_batch = len(self.waits)


def measure_waits(report: Report, runs_dir: Path, quick: bool, device: str) -> None:
    job = tiny(JOBS["small MLP"]) if quick else JOBS["small MLP"]._replace(batches=500)
    with waits_counted(device) as waits:
        bare(job, device, Tensor.item)
    report.add("waits for the GPU in a step: loss.item()", len(waits) / job.batches, "waits")
    for callbacks in (WITH_FIELDS,) if quick else ("speed,lr", WITH_FIELDS):
        count = CountWaits()
        with (
            make_trainer(job, device, runs_dir, algorithms=count) as trainer,
            attached(trainer, runs_dir, "--callbacks", callbacks),
            waits_counted(device) as count.waits,
        ):
            trainer.fit()
        name = f"waits for the GPU in a step: Trainer with {callbacks}"
        report.add(name, count.until_last_batch / job.batches, "waits", 0)


def measure_reading(report: Report, runs_dir: Path, quick: bool, device: str) -> None:
    place = get_device(device)
    loss = torch.zeros((), device=place.torch_device)
    calls, rounds = (20, 2) if quick else (1000, 20)
    times = microseconds(lambda: place.read_later(loss), calls, report.rounds("reading", rounds))
    report.add("having a loss read", times, "us")
    size = (4 if quick else 256) * MIB
    source = torch.ones(size, dtype=torch.uint8, device=place.torch_device)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=device == "gpu")
    pool = SegmentPool(1, pin=(lambda memory: pin(place.torch_device, memory)) if device == "gpu" else None)
    segment = pool.reserve(size, "weights")
    assert segment is not None  # there is memory
    shared = torch.frombuffer(segment.buffer, dtype=torch.uint8)
    speeds: dict[str, list[float]] = {"pinned": [], "shared": []}
    for _ in report.rounds("copies", 2 if quick else 10):
        for name, target in (("pinned", pinned), ("shared", shared)):
            speeds[name].append(size / 1e9 / copy_seconds(source, target, device))
    segment.release()
    pool.close()
    report.add("from the GPU into torch's pinned memory", speeds["pinned"], "GB/s")
    crossing = ratios(speeds["shared"], speeds["pinned"])
    report.add("into memory shared with consumers / pinned", crossing, "x", 0.9, at_least=True)


def copy_seconds(source: Tensor, target: Tensor, device: str) -> float:
    settle(device)
    begin = time.perf_counter()
    target.copy_(source, non_blocking=True)
    settle(device)
    return time.perf_counter() - begin


def measure_checkpoints(report: Report, runs_dir: Path, quick: bool, device: str) -> None:
    saves = 2 if quick else 4
    for name, size in (("2 MB", 2_000_000),) if quick else SIZES.items():
        source = torch.ones(size, dtype=torch.uint8, device=get_device(device).torch_device)
        target = torch.empty(size, dtype=torch.uint8, pin_memory=device == "gpu")
        copy = sorted(copy_seconds(source, target, device) for _ in range(5))[2]
        del source, target
        report.add(f"{name}: copy into pinned memory", copy * 1000, "ms")
        settled = functools.partial(settle, device)
        report.progress(f"{name}: by a consumer")
        stalls, _ = consumed(size, runs_dir, saves, at_once=False, device=device, settle=settled)
        report.add(f"{name}: consumer, first save", stalls[0] / copy, "copies", 1.3)
        report.add(f"{name}: consumer, later saves", [one / copy for one in stalls[1:]], "copies", 1.3)
        with process_group():
            report.progress(f"{name}: torch.save")
            saved = in_loop(size, runs_dir, 2, torch_save, device, settled)
            report.add(f"{name}: torch.save in the loop", [one / copy for one in saved], "copies")
            report.progress(f"{name}: async_save")
            later = in_loop(size, runs_dir, saves, async_save, device, settled)
            report.add(f"{name}: async_save, first", later[0] / copy, "copies")
            report.add(f"{name}: async_save, later", [one / copy for one in later[1:]], "copies")


def measure_memory(report: Report, runs_dir: Path, quick: bool, device: str) -> None:
    job = tiny(JOBS["medium MLP"]) if quick else JOBS["medium MLP"]._replace(batches=50)

    def taken(train: Callable[[], object]) -> tuple[float, float]:
        if device == "gpu":
            torch.cuda.reset_peak_memory_stats()
        train()
        on_gpu = torch.cuda.max_memory_allocated() if device == "gpu" else 0
        return on_gpu / MIB, resident() / MIB

    train_alone = functools.partial(trained, job, device, runs_dir, None)
    train_alone()
    alone = taken(train_alone)
    for callbacks, goal in (("speed,lr", 1.0),) if quick else (("speed,lr", 1.0), (WITH_FIELDS, None)):
        beside = taken(functools.partial(trained, job, device, runs_dir, callbacks))
        report.add(f"memory of the GPU added by {callbacks}", beside[0] - alone[0], "MiB", goal)
        report.add(f"memory of the host added by {callbacks}", beside[1] - alone[1], "MiB")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def describe_gpu() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    name = torch.cuda.get_device_name()
    return f"{name} ({memory:.0f} GiB), driver {driver}, CUDA {torch.version.cuda}, torch {torch.__version__}"


PARTS = {
    "reading": measure_reading,
    "speed": measure_speed,
    "waits": measure_waits,
    "memory": measure_memory,
    "checkpoints": measure_checkpoints,
}


def main() -> None:
    parser = argument_parser(__doc__, PARTS)
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu", help="cpu: only to see that it works")
    options = parser.parse_args()
    try:
        get_device(options.device)
    except ConfigurationError as error:
        raise SystemExit(f"error: {error}; or try it with --quick --device cpu") from None
    if options.device == "gpu":
        print(describe_gpu())
    run("gpu", PARTS, options, options.quick, options.device)


if __name__ == "__main__":
    main()
