"""A simulation on one machine of a training on many hosts, whose runs are copied into NATS JetStream.

The first host is a real one: eight publishers, their broker, its bridge. The others are connections that send what
their bridges would send: a window of their eight ranks and how the bridge is doing, once a second, all in the same
moment, as ranks that step together do. Those who read are a real ``consumer --stream``, and a connection
that takes every window. What a cluster adds to that, networks and a machine for each part, is not in the figures.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from common import Report, argument_parser, consumer_process, run, wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from nats_servers import NatsServer

from offloop.bus import Event, Publisher
from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import NatsServers
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.processes import allow_many_connections
from offloop.bus.protocol import host_windows
from offloop.bus.protocol.host_windows import HostWindow, encode_window, summarize
from offloop.bus.runs.bridged import read_bridge
from offloop.bus.types.phases import PHASES

RANKS = 8
"""Of each host."""
STEP = 0.2
"""Seconds."""
WINDOW = 1.0
"""Seconds between two windows of a host: at this step they are 1.6 s, see :mod:`offloop.bus.protocol.host_windows`;
this is the most that may come."""
RUN = "r"
STATUS = json.dumps({"run": RUN, "info": "x" * 1500})
"""As long as what a bridge says of its run and of itself."""
STOPWATCH = f"{Path(__file__).with_name('stopwatch.py')}:Stopwatch"
SIZES = tuple(2**power for power in range(12))
"""Hosts: 8 to 16,384 ranks."""
LOOK = 0.1
"""Seconds between two looks of the reader for windows."""
LATE = 1.0
"""Seconds after which a window is too late: the next one is there."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    hosts: Sequence[int]
    """As ranks double."""
    beside: int
    """Hosts beside the first one in the part ``hosts``."""
    seconds: float
    """For which each size is measured."""
    settle: float
    """Seconds before that."""


# What runs in processes of its own


class SimulatedHost(asyncio.Protocol):
    """A host's connection: sends a window and waits for its acknowledgement."""

    def __init__(self, number: int, world: int) -> None:
        self.delays: list[float] = []
        """Of windows, until they were acknowledged."""
        self.unanswered = 0
        """Messages that are not acknowledged."""
        self.waited = 0
        """How often a window came while the one before was in flight."""
        self._host = f"host{number}"
        self._ranks = tuple(range(number * RANKS, (number + 1) * RANKS))
        self._world = world
        self._subject = names.windows_subject(RUN, 1, self._host)
        self._key = f"$KV.{names.RUNS_BUCKET}.{names.key(RUN, 1, self._host)}"
        self._quantities = quantities(self._ranks)
        self._batch = self._offset = self._sequence = 0
        self._sent_at = 0.0
        self._is_in_flight = False
        self._unread = b""
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Introduces itself."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        transport.write(b'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\n')
        transport.write(f"SUB _INBOX.{self._host} 1\r\n".encode())

    def data_received(self, data: bytes) -> None:
        """Takes acknowledgements, and answers pings."""
        *lines, self._unread = (self._unread + data).split(b"\r\n")
        for line in lines:
            if line == b"PING" and self._transport is not None:
                self._transport.write(b"PONG\r\n")
            elif line.startswith(b"-ERR") or b'"error"' in line:
                raise SystemExit(f"the server refuses: {line!r}")
            elif line.startswith(b"{"):
                self.unanswered -= 1
                acknowledged = json.loads(line)
                if acknowledged["stream"] == names.windows_stream_of(RUN):
                    self._sequence = acknowledged["seq"]
                    self._is_in_flight = False
                    self.delays.append(time.monotonic() - self._sent_at)

    def send(self) -> int:
        """Sends the next window, unless the last one is in flight; returns its bytes, without its headers."""
        assert self._transport is not None
        if self._is_in_flight:
            self.waited += 1
            return 0
        batches = round(WINDOW / STEP)
        self._batch += batches
        begin, counts = self._batch - batches + 1, (self._batch,) * RANKS
        window = HostWindow(
            *(self._host, 1, self._ranks, self._world, begin, self._batch, time.time_ns(), WINDOW, counts),
            quantities=self._quantities,
        )
        data = encode_window(window)
        headers = {
            names.OFFSET: self._offset,
            names.BRIDGE: f"{self._host}/1/00000000",
            names.RUN_ID: "0" * 32,
            "Nats-Expected-Last-Subject-Sequence": self._sequence,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"NATS/1.0\r\n{head}\r\n"
        inbox = f"_INBOX.{self._host}"
        self._sent_at = time.monotonic()
        command = f"HPUB {self._subject} {inbox} {len(head)} {len(head) + len(data)}\r\n{head}"
        self._transport.write(b"%s%s\r\n" % (command.encode(), data))
        self._offset += len(data)
        self.unanswered += 1
        self._is_in_flight = True
        return len(data)

    def tell(self) -> None:
        """Sends how its bridge is doing."""
        assert self._transport is not None
        self._transport.write(f"PUB {self._key} _INBOX.{self._host} {len(STATUS)}\r\n{STATUS}\r\n".encode())
        self.unanswered += 1


def quantities(ranks: Sequence[int]) -> dict[str, host_windows.Quantity]:
    """What a host says of its ranks."""
    batches = range(1, round(WINDOW / STEP) + 1)
    listed = ("STEP", "ARRIVAL", "LOSS", "MEMORY", "GRADIENT_NORM", "THROUGHPUT")
    called = [*(getattr(host_windows, name) for name in listed), *(host_windows.PHASE + phase for phase in PHASES)]
    return {name: summarize(name, ranks, [[random.random() for _ in batches] for _ in ranks]) for name in called}


def simulate_hosts(pipe: Connection, address: str, count: int) -> None:
    """Hosts that send a window a second each, until something comes through the pipe; then says what became of it."""
    allow_many_connections()
    asyncio.run(_simulate(pipe, address, count))


async def _simulate(pipe: Connection, address: str, count: int) -> None:
    loop = asyncio.get_running_loop()
    parts = urlsplit(address)
    hosts = []
    for number in range(1, count + 1):
        _, host = await loop.create_connection(
            lambda number=number: SimulatedHost(number, (count + 1) * RANKS), parts.hostname, parts.port
        )
        hosts.append(host)
    pipe.send("connected")
    size, moments = 0, []
    due = time.monotonic()
    while not pipe.poll():
        due += WINDOW
        await asyncio.sleep(due - time.monotonic())
        begin = time.monotonic()
        for host in hosts:
            size = host.send() or size
        moments.append(time.monotonic() - begin)
        # Of these, each bridge has a second of its own.
        await asyncio.sleep(WINDOW / 2)
        for host in hosts:
            host.tell()
    for _ in range(100):
        if not any(host.unanswered for host in hosts):
            break
        await asyncio.sleep(0.1)
    delays = sorted(delay for host in hosts for delay in host.delays)
    unanswered = sum(host.unanswered for host in hosts)
    waited = sum(host.waited for host in hosts)
    moment = statistics.median(moments)
    pipe.send({"bytes": size, "unanswered": unanswered, "delays": delays, "moment": moment, "waited": waited})


def watch_windows(pipe: Connection, address: str) -> None:
    """Reads every window of the run as a dashboard does; for each thing that comes through the pipe it says how late
    those were that came since the last one."""
    lags: list[float] = []
    hosts: set[str] = set()
    with NatsConnection(NatsServers.parse(address)) as connection:
        windows = connection.windows(RUN)
        pipe.send("connected")
        after = 0
        while True:
            before = after
            found, after = windows.since(before, 1)
            for window in found:
                hosts.add(window.host)
                lags.append((time.time_ns() - window.time_ns) / 1e9)
            is_all = after == before
            if is_all and pipe.poll(LOOK):
                pipe.recv()
                pipe.send({"lags": sorted(lags), "hosts": len(hosts)})
                lags.clear()
                hosts.clear()


def train(pipe: Connection, runs_dir: str, address: str, world: int) -> None:
    """The ranks of the first host, at 0.2 s a step, until something comes through the pipe."""
    os.environ["OFFLOOP_STREAM"] = address
    with contextlib.ExitStack() as stack:
        sizes = {"runs_dir": runs_dir, "world_size": world, "local_world_size": RANKS}
        first = stack.enter_context(Publisher(RUN, **sizes))
        ranks = [first]
        for rank in range(1, RANKS):
            ranks.append(stack.enter_context(Publisher(RUN, rank=rank, broker=first.address, **sizes)))
        pipe.send(str(first.run_dir))
        due = time.monotonic()
        batch = 0
        while not pipe.poll():
            batch += 1
            for publisher in ranks:
                publisher.publish(
                    Event.BATCH_END, epoch=0, batch=batch, sample=32 * batch, loss=1 / batch, lr=[0.1], batch_size=32
                )
            due += STEP
            while (left := due - time.monotonic()) > 0:
                time.sleep(min(left, 0.05))
                for publisher in ranks:
                    publisher.poll()


class Part:
    """A process of this benchmark, with a pipe to it."""

    def __init__(self, function: Callable[..., None], *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=function, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.first = self.hear()
        self.pid = self._process.pid

    def __enter__(self) -> "Part":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def hear(self, timeout: float = 60.0) -> Any:
        """What it says next."""
        if not self._pipe.poll(timeout):
            raise SystemExit(f"a process has said nothing for {timeout:g} s")
        return self._pipe.recv()

    def ask(self, question: object = True) -> Any:
        """What it answers."""
        self._pipe.send(question)
        return self.hear()

    def end(self) -> None:
        """Lets it end."""
        self._pipe.send(True)
        self._process.join(60)


# Measurements


@contextlib.contextmanager
def server(folder: Path) -> Iterator[NatsServer]:
    """A server with the stream of a run."""
    folder.mkdir(parents=True)
    running = NatsServer(folder)
    try:
        asyncio.run(make_stream(running.address))
        yield running
    finally:
        running.kill()


async def make_stream(address: str) -> None:
    """The streams of the run, as a bridge makes them."""
    import nats
    from nats.js.api import DiscardPolicy, KeyValueConfig, StorageType, StreamConfig

    client = await nats.connect(address)
    streams = {
        names.stream_of(RUN): names.recording_subject(RUN),
        names.windows_stream_of(RUN): names.windows_subject(RUN),
    }
    for name, subjects in streams.items():
        config = StreamConfig(
            name=name, subjects=[subjects], storage=StorageType.FILE, discard=DiscardPolicy.NEW, allow_direct=False
        )
        await client.jetstream().add_stream(config)
    await client.jetstream().create_key_value(KeyValueConfig(names.RUNS_BUCKET))
    await client.close()


@dataclass
class Cost:
    """What a part took in a while."""

    percent: float
    """Of one core."""
    mebibytes: float


@contextlib.contextmanager
def costs(pids: Mapping[str, int]) -> Iterator[dict[str, Cost]]:
    """What processes take meanwhile; it is there at the end."""
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    busy = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    begin = time.monotonic()
    found: dict[str, Cost] = {}
    yield found
    passed = time.monotonic() - begin
    for name, process in processes.items():
        took = sum(process.cpu_times()[:2]) - busy[name]
        found[name] = Cost(100 * took / passed, process.memory_info().rss / 2**20)


def quantile(values: Sequence[float], share: float) -> float:
    """Of values in order."""
    return values[min(len(values) - 1, int(share * len(values)))]


def server_pid(port: int) -> int:
    """The process that listens there."""
    listening = [one for one in psutil.Process().children() if "nats-server" in one.name()]
    for process in listening:
        if any(one.laddr.port == port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN):
            return process.pid
    raise SystemExit(f"no NATS server listens at port {port}")


def measure_hosts(report: Report, where: Path, sizes: Sizes) -> None:
    """A first host in truth and others in simulation, at 0.2 s a step."""
    delays = where / "delays"
    with (
        server(where / "nats") as nats,
        Part(train, str(where / "runs"), nats.address, RANKS * (sizes.beside + 1)) as training,
        Part(watch_windows, nats.address) as watcher,
        Part(simulate_hosts, nats.address, sizes.beside) as hosts,
    ):
        folder = Path(training.first)
        wait_until(lambda: (known := read_bridge(folder)) is not None and known.copied > 0, "the bridge")
        options = ("--stream", nats.address, "--run", RUN, "--callbacks", STOPWATCH, "-o", f"{STOPWATCH}.path={delays}")
        with consumer_process(*options) as consumer:
            time.sleep(sizes.settle)
            watcher.ask()
            bridge = read_bridge(folder)
            assert bridge is not None
            pids = {
                "training's eight publishers": training.pid,
                "broker of the first host": json.loads((folder / "broker.json").read_text())["pid"],
                "bridge of the first host": bridge.pid,
                "nats-server": server_pid(nats.port),
                "consumer --stream of the first host's ranks": consumer.pid,
                "reader that takes all windows": watcher.pid,
                f"simulation of {sizes.beside} hosts": hosts.pid,
            }
            copied, lags = bridge.copied, []
            with costs(pids) as found:
                for _ in report.rounds(f"{sizes.beside + 1} hosts", round(sizes.seconds)):
                    time.sleep(1)
                    status = read_bridge(folder)
                    assert status is not None
                    lags.append(status.lag_seconds)
                seen = watcher.ask()
            copied = status.copied - copied
            told = hosts.ask()
            training.end()
            consumer.communicate(timeout=60)
    check(told, seen, sizes.beside)
    what = f"{sizes.beside + 1} hosts of {RANKS} ranks, {STEP:g} s a step"
    for name, cost in found.items():
        report.add(f"{what}: {name}, memory", cost.mebibytes, "MiB")
        report.add(f"{what}: {name}", cost.percent, "% of a core")
    report.add(f"{what}: recording copied", copied / sizes.seconds / 1024, "KiB/s")
    report.add(f"{what}: a bridge behind its recording", lags, "s")
    report.add(f"{what}: end of a batch to a callback elsewhere", float(delays.read_text()) / 1000, "s", LATE)
    add_lags(report, what, told, seen)
    report.details["hosts"] = {name: vars(cost) for name, cost in found.items()}
    print("\n| part | of a core | memory |\n| --- | --: | --: |")
    for name, cost in found.items():
        print(f"| {name} | {cost.percent:.1f} % | {cost.mebibytes:.0f} MiB |")


def check(told: Mapping[str, Any], seen: Mapping[str, Any], hosts: int) -> None:
    """Ends the program where something is missing."""
    if told["unanswered"]:
        raise SystemExit(f"{told['unanswered']} messages were not acknowledged")
    if seen["hosts"] < hosts:
        raise SystemExit(f"windows of {hosts - seen['hosts']} of {hosts} hosts did not come")


def add_lags(report: Report, what: str, told: Mapping[str, Any], seen: Mapping[str, Any]) -> None:
    """How late windows were."""
    report.add(f"{what}: windows that waited a second because the one before was in flight", told["waited"], "windows")
    report.add(f"{what}: a window to its acknowledgement, 99 %", quantile(told["delays"], 0.99), "s")
    report.add(f"{what}: a window to its reader, median", quantile(seen["lags"], 0.5), "s")
    report.add(f"{what}: a window to its reader, 99 %", quantile(seen["lags"], 0.99), "s", LATE)


def measure_doubling(report: Report, where: Path, sizes: Sizes) -> None:
    """Windows of all hosts, as these double: a connection for each of them."""
    rows = []
    for hosts in sizes.hosts:
        report.progress(f"{hosts * RANKS:,} ranks")
        with (
            server(where / str(hosts)) as nats,
            Part(watch_windows, nats.address) as watcher,
            Part(simulate_hosts, nats.address, hosts) as simulation,
        ):
            pid = server_pid(nats.port)
            time.sleep(sizes.settle)
            watcher.ask()
            before, begin = asyncio.run(stored(nats.address)), time.monotonic()
            with costs({"server": pid, "reader": watcher.pid, "simulation": simulation.pid}) as found:
                time.sleep(sizes.seconds)
                seen = watcher.ask()
            kept = (asyncio.run(stored(nats.address)) - before) / (time.monotonic() - begin)
            told = simulation.ask()
        check(told, seen, hosts)
        what = f"{hosts * RANKS:,} ranks on {hosts:,} hosts"
        report.add(f"{what}: nats-server", found["server"].percent, "% of a core")
        report.add(f"{what}: nats-server, memory", found["server"].mebibytes, "MiB")
        report.add(f"{what}: reader that takes all windows", found["reader"].percent, "% of a core")
        report.add(f"{what}: simulation of the hosts", found["simulation"].percent, "% of a core")
        report.add(f"{what}: their windows are sent within", told["moment"], "s")
        add_lags(report, what, told, seen)
        row = {
            "ranks": hosts * RANKS,
            "hosts": hosts,
            "messages_per_second": 2 * hosts / WINDOW,
            "bytes_per_second": hosts * (told["bytes"] + len(STATUS)) / WINDOW,
            "kept_bytes_per_second": kept,
            "server": vars(found["server"]),
            "reader": vars(found["reader"]),
            "lag_median": quantile(seen["lags"], 0.5),
            "lag_99": quantile(seen["lags"], 0.99),
            "calculated_events_per_second": hosts * RANKS / STEP,
        }
        rows.append(row)
        report.details["doubling"] = rows
    print(table(rows))


async def stored(address: str) -> int:
    """Bytes that the streams of the run have."""
    import nats

    client = await nats.connect(address)
    streams = [names.stream_of(RUN), names.windows_stream_of(RUN)]
    states = [(await client.jetstream().stream_info(name)).state for name in streams]
    await client.close()
    return sum(int(state.bytes) for state in states)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows for ``docs/cluster.md``; the last column is calculated."""
    head = (
        "ranks",
        "connections",
        "messages/s",
        "KiB/s",
        "nats-server: of a core",
        "memory",
        "reader: of a core",
        "lag, median / 99 %",
        "kept an hour",
        "base events/s in the brokers of all hosts (calculated)",
    )
    lines = ["", f"| {' | '.join(head)} |", f"| {' | '.join(['--:'] * len(head))} |"]
    for row in rows:
        cells = (
            f"{row['ranks']:,}",
            f"{row['hosts']:,}",
            f"{row['messages_per_second']:,.0f}",
            f"{row['bytes_per_second'] / 1024:,.0f}",
            f"{row['server']['percent']:.1f} %",
            f"{row['server']['mebibytes']:.0f} MiB",
            f"{row['reader']['percent']:.1f} %",
            f"{row['lag_median'] * 1000:.0f} / {row['lag_99'] * 1000:.0f} ms",
            f"{row['kept_bytes_per_second'] * 3600 / 2**30:.2f} GiB",
            f"{row['calculated_events_per_second']:,.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


PARTS = {"hosts": measure_hosts, "doubling": measure_doubling}

if __name__ == "__main__":
    options = argument_parser(__doc__, PARTS).parse_args()
    small, large = Sizes((1, 4), 3, 2, 1), Sizes(SIZES, 63, 20, 3)
    title = "cluster: a simulation on one machine"
    run(title, PARTS, options, small if options.quick else large)
