"""Cost of the stream for the training: microseconds for an event, and training speed against a bare PyTorch loop.

Everything runs on a CPU with one torch thread, where the host's time is the training's time. Figures are medians, and
ratios of medians measured in turn, because a machine's speed drifts."""

import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

import msgpack
import torch
import zmq
from common import Report, argument_parser, consumer_process, microseconds, ratios, run, wait_until, wait_until_attached
from cores import MARK, pin_apart, pin_nowhere
from jobs import JOBS, WATCHED_BY_ALL, Job, bare_loop, make_trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))


import offloop
from offloop.bus import BASE_EVENTS, Event, Publisher
from offloop.bus.types.event import ANY_CUSTOM, ANY_TABLE
from offloop.trainer import Trainer

SLEEPER, STOPWATCH = (f"{Path(__file__).with_name('callbacks.py')}:{name}" for name in ("Sleeper", "Stopwatch"))
MAX_DELAYS = (0.05, 0.02, 0.008, 0.005)
SHORT_DELAY = 0.008
FOLLOWER = """
import sys
from offloop.bus import Event, Subscriber
print("ready", flush=True)
for snapshot in Subscriber(sys.argv[1], events=map(Event, sys.argv[2:])):
    pass
"""
ASKER = """
import sys
from offloop.bus import Event, Subscriber
from offloop.bus.hosts.watch import windows_demand
demand = windows_demand(int(sys.argv[2]), False) if len(sys.argv) > 2 else None
print("ready", flush=True)
for snapshot in Subscriber(sys.argv[1], events=[Event.BATCH_END], demand=demand):
    pass
"""
"""Follows a run with the demand of host windows of so many batches, or, without a number, with the base demand."""

OF_A_BATCH = (
    *(Event.BEFORE_DATALOADER, Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_TRAIN_BATCH),
    *(Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD),
    *(Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH, Event.BATCH_END, Event.BATCH_CHECKPOINT),
)
WARM_UP = 20  # batches before a loop is timed
SLEEPING_EVERY = 3  # a sleeping callback is measured in every such round: its speed varies little
ALL_CALLBACKS = "speed,lr,optimizer,memory,runtime,images,checkpoint,early-stop,threshold-stop,export"
ALL_LOGGERS = "jsonl,csv,tensorboard"
ALL_FILES = (
    *("metrics.jsonl", "metrics.csv", "tensorboard/*"),
    *("work/model.pt", "work/checkpoints/*.safetensors"),
)


def trainer_loop(job: Job, batches: int, runs_dir: Path, callbacks: str | None) -> float:
    trainer = make_trainer(job, batches, runs_dir, publish=callbacks is not None)
    with contextlib.ExitStack() as stack:
        if callbacks is not None:
            stack.enter_context(attached(trainer, runs_dir, "--callbacks", callbacks))
        speed = fit(trainer, batches)
    trainer.close()
    return speed


def watched_by_all(job: Job, batches: int, runs_dir: Path) -> float:
    _, loader = job.make(1)
    trainer = make_trainer(job, batches, runs_dir, eval_dataloader=loader)
    work = trainer.recording.parent / "work"
    options = {
        "checkpoint.folder": work / "checkpoints",
        "early-stop.monitor": "CrossEntropy",
        "early-stop.dataloader_label": "eval",
        "threshold-stop.monitor": "MulticlassAccuracy",
        "threshold-stop.dataloader_label": "eval",
        "threshold-stop.threshold": 2,
        "export.save_format": "torchscript",
        "export.save_path": work / "model.pt",
        "export.model": "jobs:medium_module",
    }
    given = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    command = ("--callbacks", ALL_CALLBACKS, "--log", ALL_LOGGERS, *given)
    with attached(trainer, runs_dir, *command) as consumer:
        speed = fit(trainer, batches)
        trainer.close()
        _, said = consumer.communicate(timeout=60)
    missing = [name for name in ALL_FILES if not list(trainer.recording.parent.glob(name))]
    if consumer.returncode or missing:
        raise SystemExit(f"the consumer lacks {missing} and said\n{said}")
    return speed


@contextlib.contextmanager
def attached(trainer: Trainer, runs_dir: Path, *options: str) -> Iterator["subprocess.Popen[str]"]:
    with consumer_process("--run", trainer.state.run_name, "--runs-dir", str(runs_dir), *options) as consumer:
        wait_until_attached(consumer)
        yield consumer


def fit(trainer: Trainer, batches: int) -> float:
    begin = time.perf_counter()
    trainer.fit()
    return batches / (time.perf_counter() - begin)


def measure_events(report: Report, runs_dir: Path, quick: bool) -> None:
    calls, bursts = (50, 5) if quick else (1000, 60)
    trainer = make_trainer(JOBS["tiny MLP"], 5, runs_dir)
    trainer.fit()
    run_event = trainer.engine.run_event
    unrequested, requested = Event.BEFORE_LOSS, Event.BATCH_END
    rounds = report.rounds("unrequested event", bursts)
    report.add("unrequested event", microseconds(lambda: run_event(unrequested), 10 * calls, rounds), "us", 0.1)

    def next_batch() -> None:
        # A changed demand takes effect with another batch, and is checked until then.
        trainer.state.timestamp = trainer.state.timestamp.to_next_batch()

    for count in (0, 1, 4 if quick else 32):
        beside = f"beside {count} consumers"
        with followers(trainer, count), raw_sender(trainer) as send_raw:
            rounds = report.rounds(f"published event {beside}", bursts)
            published, raw = in_turn(lambda: run_event(requested), send_raw, calls, rounds, count, next_batch)
        report.add(f"published base event {beside}: on the clock", published.passed, "us", 3)
        report.add(f"published base event {beside}: the thread's own time", published.busy, "us", 2.5)
        report.add(f"raw pack and send {beside}: on the clock", raw.passed, "us")
        report.add(f"raw pack and send {beside}: the thread's own time", raw.busy, "us")
        report.add(f"published / raw {beside}, the thread's own time", ratios(published.busy, raw.busy), "x", 1.4)
    trainer.close()


class Cost(NamedTuple):
    busy: list[float]  # the thread's time, in Python and in the kernel
    passed: list[float]  # time on the clock: with more processes than cores, also waiting for a core


def in_turn(
    first: Callable[[], object],
    second: Callable[[], object],
    calls: int,
    bursts: Iterable[object],
    consumers: int,
    between: Callable[[], object],
) -> tuple[Cost, Cost]:
    costs = Cost([], []), Cost([], [])
    for _ in bursts:
        between()
        burst(first, calls, costs[0])
        burst(second, calls, costs[1])
        time.sleep(0.02 + calls * consumers * 15e-6)
    return costs


def burst(function: Callable[[], object], calls: int, cost: Cost) -> None:
    begin, busy = time.perf_counter_ns(), time.thread_time_ns()
    for _ in range(calls):
        function()
    busy, passed = time.thread_time_ns() - busy, time.perf_counter_ns() - begin
    cost.busy.append(busy / calls / 1000)
    cost.passed.append(passed / calls / 1000)


@contextlib.contextmanager
def raw_sender(trainer: Trainer) -> Iterator[Callable[[], object]]:
    reader = (
        "import sys, zmq; s = zmq.Context().socket(zmq.ROUTER); s.bind(sys.argv[1]); print('ready', flush=True)\n"
        "while True: s.recv_multipart()"
    )
    address = f"ipc://{trainer.recording.parent}/raw.sock"
    process = subprocess.Popen([sys.executable, "-c", reader, address], stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 1_000_000)
    socket.connect(address)
    *_, last = recorded(trainer)
    training_time = last.timestamp.values
    values = (1, last.attempt, last.seq, last.seq, last.time_ns, training_time, training_time, dict(last.fields))
    pack, send = msgpack.Packer().pack, socket.send
    try:
        yield lambda: send(pack(values), zmq.NOBLOCK)
    finally:
        context.destroy(linger=0)
        process.kill()
        process.communicate()


def recorded(trainer: Trainer) -> list:
    from offloop.bus import Recording

    found: list = []

    def there() -> bool:
        found[:] = Recording(trainer.recording).snapshots([Event.BATCH_END])
        return bool(found)

    wait_until(there, "the first event to be recorded")
    return found


@contextlib.contextmanager
def followers(trainer: Trainer, count: int) -> Iterator[None]:
    command = [sys.executable, "-c", FOLLOWER, str(trainer.recording.parent), "batch_end", "eval_end"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    for process in processes:
        process.stdout.readline()
    if processes:
        time.sleep(1)  # until they have read the history
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def measure_training(report: Report, runs_dir: Path, quick: bool, name: str) -> None:
    job = JOBS[name]
    batches, rounds = (min(job.batches, 20), 1) if quick else (job.batches, job.rounds)
    bare_loop(job, batches)
    speeds: dict[str, list[float]] = {"bare": [], "alone": [], "speed,lr": [], "sleeping": []}
    for turn in report.rounds(name, rounds):
        speeds["bare"].append(bare_loop(job, batches))
        speeds["alone"].append(trainer_loop(job, batches, runs_dir, None))
        speeds["speed,lr"].append(trainer_loop(job, batches, runs_dir, "speed,lr"))
        if turn % SLEEPING_EVERY == 0:
            speeds["sleeping"].append(trainer_loop(job, batches, runs_dir, SLEEPER))
    report.add(f"{name}: bare loop", speeds["bare"], "batches/s")
    alone = ratios(speeds["alone"], speeds["bare"])
    report.add(f"{name}: trainer without stream / bare", alone, "x", job.alone, at_least=True)
    watched = ratios(speeds["speed,lr"], speeds["bare"])
    report.add(f"{name}: trainer with speed,lr / bare", watched, "x", job.watched, at_least=True)
    slowed = ratios(speeds["sleeping"], speeds["speed,lr"][::SLEEPING_EVERY])
    report.add(f"{name}: callback that sleeps 50 ms / speed,lr", slowed, "x", 0.98, at_least=True)


def own_loop(
    job: Job,
    training: tuple[torch.nn.Module, torch.optim.Optimizer],
    batches: Iterable[Any],
    log: Callable[[torch.Tensor], object],
    warm: Callable[[], object],
) -> tuple[float, float]:
    """Return batches a second, and microseconds of the thread's own time for a batch, after the first batches."""
    module, optimizer = training
    begin = busy = 0.0
    count = -WARM_UP
    for inputs, targets in batches:
        if count == 0:
            warm()
            begin, busy = time.perf_counter(), time.thread_time()
        optimizer.zero_grad()
        loss = job.loss(module(inputs), targets)
        loss.backward()
        log(loss)
        optimizer.step()
        count += 1
    busy, passed = time.thread_time() - busy, time.perf_counter() - begin
    return count / passed, busy / count * 1e6


def watched_loop(job: Job, batches: int, runs_dir: Path | None, pin: Callable[[], object]) -> tuple[float, float]:
    module, loader = job.make(batches + WARM_UP)
    training = module, torch.optim.SGD(module.parameters(), lr=0.01)
    if runs_dir is None:
        losses: list[float] = []
        return own_loop(job, training, loader, lambda loss: losses.append(loss.item()), pin)
    options = ("--runs-dir", str(runs_dir), "--callbacks", "speed,lr")
    with offloop.watch(*training, runs_dir=runs_dir) as run, consumer_process(*options) as consumer:
        warm = lambda: (wait_until_attached(consumer), pin())  # noqa: E731
        return own_loop(job, training, run.batches(loader), lambda loss: run.log(loss=loss), warm)


def measure_watch(report: Report, runs_dir: Path, quick: bool) -> None:
    name = "tiny MLP"
    job = JOBS[name]
    batches, rounds = (20, 1) if quick else (job.batches, job.rounds)
    os.environ.setdefault(MARK, f"hot-loop-{os.getpid()}")
    for text, pin in (("on other cores", pin_apart), ("anywhere", pin_nowhere)):
        shares, added = [], []
        for turn in report.rounds(f"watch, {text}", rounds):
            speed, own = {}, {}
            for where in (None, runs_dir / f"{text} {turn}"):
                speed[where], own[where] = watched_loop(job, batches, where, pin)
                pin_nowhere()
            shares.append(speed[where] / speed[None])
            added.append(own[where] - own[None])
        goal = 0.95 if pin is pin_apart else None
        report.add(f"{name}: watch, broker and speed,lr {text} / bare", shares, "x", goal, at_least=True)
        report.add(f"{name}: added by watch, broker and speed,lr {text}, the thread's own time", added, "us")


def measure_delays(report: Report, runs_dir: Path, quick: bool) -> None:
    name = "tiny MLP"
    job = JOBS[name]
    batches, rounds = (20, 1) if quick else (job.batches, 7)
    bare_loop(job, batches)
    bare, found = [], {max_delay: [] for max_delay in MAX_DELAYS}
    for _ in report.rounds("delays", rounds):
        bare.append(bare_loop(job, batches))
        for max_delay, results in found.items():
            results.append(hurried_loop(job, batches, runs_dir, max_delay))
    for max_delay, results in found.items():
        speeds, delays = zip(*results, strict=True)
        is_goal = max_delay == SHORT_DELAY
        text = f"max_delay {max_delay * 1000:g} ms"
        watched = ratios(speeds, bare)
        report.add(f"{name}: speed,lr with {text} / bare", watched, "x", 0.92 if is_goal else None, at_least=True)
        report.add(f"publish to callback in a fast loop, {text}: median", delays, "ms", 5 if is_goal else None)


def hurried_loop(job: Job, batches: int, runs_dir: Path, max_delay: float) -> tuple[float, float]:
    trainer = make_trainer(job, batches, runs_dir)
    path = trainer.recording.parent / "delay"
    options = ("--callbacks", f"speed,lr,{STOPWATCH}", "-o", f"{STOPWATCH}.path={path}", "--max-delay", str(max_delay))
    with attached(trainer, runs_dir, *options) as consumer:
        speed = fit(trainer, batches)
        trainer.close()
        consumer.communicate(timeout=60)
    return speed, float(path.read_text())


def measure_all_callbacks(report: Report, runs_dir: Path, quick: bool) -> None:
    job = WATCHED_BY_ALL
    batches, rounds = (20, 1) if quick else (job.batches, job.rounds)
    bare_loop(job, batches)
    bare, watched = [], []
    for _ in report.rounds("all callbacks", rounds):
        bare.append(bare_loop(job, batches))
        watched.append(watched_by_all(job, batches, runs_dir))
    name = "medium MLP: all callbacks and three loggers / bare"
    report.add(name, ratios(watched, bare), "x", job.watched, at_least=True)


def measure_flight(report: Report, runs_dir: Path, quick: bool) -> None:
    calls, bursts = (5, 3) if quick else (50, 40)
    options: dict[str, dict[str, Any]] = {
        "without": {},
        "flight": {"flight_recorder": "200ba"},
        "all": {"record": "all"},
    }
    trainers = {name: make_trainer(JOBS["tiny MLP"], 5, runs_dir, **given) for name, given in options.items()}
    events = {name: Cost([], []) for name in trainers}
    batches = {name: Cost([], []) for name in trainers}
    for trainer in trainers.values():
        trainer.fit()
    for _ in report.rounds("flight", bursts):
        for name, trainer in trainers.items():
            run_event = trainer.engine.run_event
            trainer.state.timestamp = trainer.state.timestamp.to_next_batch()
            burst(lambda run=run_event: run(Event.BEFORE_TRAIN_BATCH), calls, events[name])
            burst(lambda run=run_event: [run(event) for event in OF_A_BATCH], calls, batches[name])
        time.sleep(0.02)
    for trainer in trainers.values():
        trainer.close()
    report.add("inner event, without a flight recorder", events["without"].busy, "us", 0.3)
    report.add("inner event, with a flight recorder", events["flight"].busy, "us", 3)
    report.add("inner event, recorded (record='all')", events["all"].busy, "us")
    report.add("all events of a batch, without a flight recorder", batches["without"].busy, "us")
    report.add("all events of a batch and its phases, with a flight recorder", batches["flight"].busy, "us", 75)
    report.add("all events of a batch, recorded (record='all')", batches["all"].busy, "us")


def measure_own_events(report: Report, runs_dir: Path, quick: bool) -> None:
    """Measure custom events, spans and rows of tables: unrequested, and recorded."""
    calls, bursts = (5, 3) if quick else (50, 40)
    publishers = {
        "unrequested": Publisher("quiet", runs_dir=runs_dir),
        "recorded": Publisher("loud", runs_dir=runs_dir, events=BASE_EVENTS | {ANY_CUSTOM, ANY_TABLE}),
    }
    row = {"prompt": "What is 2 + 2?", "completion": "4 " * 200, "reward": 1.0}

    def span(publisher: Publisher) -> None:
        with publisher.span("generate", prompts=8):
            pass

    acts: dict[str, Callable[[Publisher], None]] = {
        "event": lambda publisher: publisher.event("rollout_end", reward=0.5),
        "span": span,
        "table of 8 rows of 400 bytes": lambda publisher: publisher.log_table("completions", lambda: [row] * 8),
    }
    costs = {(name, act): Cost([], []) for name in publishers for act in acts}
    for _ in report.rounds("own events", bursts):
        for (name, act), cost in costs.items():
            burst(lambda publisher=publishers[name], do=acts[act]: do(publisher), calls, cost)
        time.sleep(0.05)
    for (name, act), cost in costs.items():
        report.add(f"{act}, {name}", cost.busy, "us", 2 if name == "unrequested" else None)
    for publisher in publishers.values():
        publisher.close()


def measure_windows(report: Report, runs_dir: Path, quick: bool) -> None:
    calls, bursts = 128, 3 if quick else 60
    lengths = ("", "128", "1")
    trainers = {length: make_trainer(JOBS["medium MLP"], 5, runs_dir) for length in lengths}
    costs = {length: Cost([], []) for length in lengths}

    def train(trainer: Trainer) -> None:
        run_event = trainer.engine.run_event
        for event in OF_A_BATCH:
            if event is Event.BATCH_END:
                trainer.state.timestamp = trainer.state.timestamp.to_next_batch()
            run_event(event)

    with contextlib.ExitStack() as stack:
        for length, trainer in trainers.items():
            trainer.fit()
            command = [sys.executable, "-c", ASKER, str(trainer.recording.parent), *filter(None, [length])]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            process.stdout.readline()

        def is_asked() -> bool:
            for trainer in trainers.values():
                train(trainer)
            return "gradient_norm" in recorded(trainers["1"])[-1].fields

        wait_until(is_asked, "the demand")
        for _ in report.rounds("windows", bursts):
            for length, trainer in trainers.items():
                burst(functools.partial(train, trainer), calls, costs[length])
            time.sleep(0.05)
        found = {length: [one.fields for one in recorded(trainer)] for length, trainer in trainers.items()}
        for trainer in trainers.values():
            trainer.close()
    if not all(any("gradient_norm" in fields for fields in found[length]) for length in lengths[1:]):
        raise SystemExit("what windows ask for did not come")
    report.add("all events of a batch, nothing asked for", costs[""].busy, "us")
    for length in lengths[1:]:
        more = [busy - plain for busy, plain in zip(costs[length].busy, costs[""].busy, strict=True)]
        report.add(f"what windows of {length} batches ask for besides, for each batch", more, "us")


def measure_bridge(report: Report, runs_dir: Path, quick: bool) -> None:
    calls, bursts = (50, 4) if quick else (500, 60)
    folder = runs_dir / "nats"
    folder.mkdir()
    # Imported here, because benchmarks/gpu.py uses this module without NATS.
    from nats_servers import NatsServer

    server = NatsServer(folder)
    plain = make_trainer(JOBS["tiny MLP"], 5, runs_dir / "plain")
    bridged = make_trainer(JOBS["tiny MLP"], 5, runs_dir / "bridged", stream_to=server.address)
    trainers = bridged, plain
    try:
        for trainer in trainers:
            trainer.fit()
        wait_until(lambda: bool(list((runs_dir / "bridged").glob("*/bridge.json"))), "the bridge")
        for what in ("a bridge", "a bridge whose servers were killed"):
            costs = Cost([], []), Cost([], [])
            turns = [
                (functools.partial(one.engine.run_event, Event.BATCH_END), cost)
                for one, cost in zip(trainers, costs, strict=True)
            ]
            for _ in report.rounds(what, bursts):
                for publish, cost in turns:
                    burst(publish, calls, cost)
                # The first one finds caches as the pause left them.
                turns.reverse()
                time.sleep(0.05)
            with_bridge, without = costs
            report.add(f"published event beside {what}, the thread's own time", with_bridge.busy, "us")
            ratio = ratios(with_bridge.busy, without.busy)
            report.add(f"published event beside {what} / without, the thread's own time", ratio, "x", 1.02)
            server.kill()
    finally:
        server.kill()
        for trainer in trainers:
            trainer.close()


PARTS = {
    "events": measure_events,
    "bridge": measure_bridge,
    "flight": measure_flight,
    "own-events": measure_own_events,
    "windows": measure_windows,
    "watch": measure_watch,
    **{name.replace(" ", "-").lower(): functools.partial(measure_training, name=name) for name in JOBS},
    "delays": measure_delays,
    "all-callbacks": measure_all_callbacks,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    run("hot loop", PARTS, argument_parser(__doc__, PARTS).parse_args())
