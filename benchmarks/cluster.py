"""Simulates on one machine a training on many hosts, whose runs are copied into NATS JetStream.

The first host is real: eight publishers, their broker, its bridge. The others are connections that send the messages
of their bridges: a window of eight ranks and the bridge's status once a second, all at the same moment, as ranks that
step together do. The readers are a real ``consumer --stream``, and a connection that receives every window. Networks
and separate machines are not in the figures."""

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
from offloop.bus.jetstream.windows import StreamWindows
from offloop.bus.processes import allow_many_connections
from offloop.bus.protocol import host_windows
from offloop.bus.protocol.host_windows import HostWindow, encode_window, summarize
from offloop.bus.runs.bridged import read_bridge
from offloop.bus.types.phases import PHASES

RANKS = 8  # on each host
STEP = 0.2  # seconds
WINDOW = 1.0
"""Seconds between two windows of a host. At this step real ones take 1.6 s, see
:mod:`offloop.bus.protocol.host_windows`; this is the highest rate."""
RUN = "r"
STATUS = json.dumps({"run": RUN, "info": "x" * 1500})  # as long as a bridge's status
STOPWATCH = f"{Path(__file__).with_name('callbacks.py')}:Stopwatch"
SIZES = tuple(2**power for power in range(12))  # hosts: 8 to 16,384 ranks
LOOK = 0.1  # seconds between two polls of the reader
LATE = 1.0  # seconds after which a window is too late, because the next one is due


@dataclass(frozen=True)
class Sizes:
    hosts: Sequence[int]
    beside: int  # simulated hosts in the part hosts
    seconds: float  # of one measurement
    settle: float  # seconds before it


# Functions in separate processes


class SimulatedHost(asyncio.Protocol):
    def __init__(self, number: int, world: int) -> None:
        self.delays: list[float] = []  # seconds from windows to their acknowledgements
        self.unanswered = 0  # number of messages without acknowledgement
        self.waited = 0  # number of windows that were due before the last acknowledgement
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
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        transport.write(b'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\n')
        transport.write(f"SUB _INBOX.{self._host} 1\r\n".encode())

    def data_received(self, data: bytes) -> None:
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
        assert self._transport is not None
        self._transport.write(f"PUB {self._key} _INBOX.{self._host} {len(STATUS)}\r\n{STATUS}\r\n".encode())
        self.unanswered += 1


def quantities(ranks: Sequence[int]) -> dict[str, host_windows.Quantity]:
    batches = range(1, round(WINDOW / STEP) + 1)
    listed = ("STEP", "ARRIVAL", "LOSS", "MEMORY", "GRADIENT_NORM", "THROUGHPUT")
    called = [*(getattr(host_windows, name) for name in listed), *(host_windows.PHASE + phase for phase in PHASES)]
    return {name: summarize(name, ranks, [[random.random() for _ in batches] for _ in ranks]) for name in called}


def simulate_hosts(pipe: Connection, address: str, count: int) -> None:
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
        # Each real bridge has its own moment for it.
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
    lags: list[float] = []
    hosts: set[str] = set()
    with NatsConnection(NatsServers.parse(address)) as connection:
        windows = StreamWindows(connection, RUN, 1)
        pipe.send("connected")
        while True:
            found = windows.take()
            for window in found:
                hosts.add(window.host)
                lags.append((time.time_ns() - window.time_ns) / 1e9)
            if not found and pipe.poll(LOOK):
                pipe.recv()
                pipe.send({"lags": sorted(lags), "hosts": len(hosts)})
                lags.clear()
                hosts.clear()


def train(pipe: Connection, runs_dir: str, address: str, world: int) -> None:
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
        if not self._pipe.poll(timeout):
            raise SystemExit(f"a process has said nothing for {timeout:g} s")
        return self._pipe.recv()

    def ask(self, question: object = True) -> Any:
        self._pipe.send(question)
        return self.hear()

    def end(self) -> None:
        self._pipe.send(True)
        self._process.join(60)


@contextlib.contextmanager
def server(folder: Path) -> Iterator[NatsServer]:
    folder.mkdir(parents=True)
    running = NatsServer(folder)
    try:
        asyncio.run(make_stream(running.address))
        yield running
    finally:
        running.kill()


async def make_stream(address: str) -> None:
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
    percent: float  # of one core
    mebibytes: float


@contextlib.contextmanager
def costs(pids: Mapping[str, int]) -> Iterator[dict[str, Cost]]:
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
    return values[min(len(values) - 1, int(share * len(values)))]


def server_pid(port: int) -> int:
    listening = [one for one in psutil.Process().children() if "nats-server" in one.name()]
    for process in listening:
        if any(one.laddr.port == port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN):
            return process.pid
    raise SystemExit(f"no NATS server listens at port {port}")


def measure_hosts(report: Report, where: Path, sizes: Sizes) -> None:
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
                    lags.append(status.lag / 1024)
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
    report.add(f"{what}: a bridge behind its recording", lags, "KiB")
    report.add(f"{what}: end of a batch to a callback elsewhere", float(delays.read_text()) / 1000, "s", LATE)
    add_lags(report, what, told, seen)


def check(told: Mapping[str, Any], seen: Mapping[str, Any], hosts: int) -> None:
    if told["unanswered"]:
        raise SystemExit(f"{told['unanswered']} messages were not acknowledged")
    if seen["hosts"] < hosts:
        raise SystemExit(f"windows of {hosts - seen['hosts']} of {hosts} hosts did not come")


def add_lags(report: Report, what: str, told: Mapping[str, Any], seen: Mapping[str, Any]) -> None:
    report.add(f"{what}: windows that waited a second because the one before was in flight", told["waited"], "windows")
    report.add(f"{what}: a window to its acknowledgement, 99 %", quantile(told["delays"], 0.99), "s")
    report.add(f"{what}: a window to its reader, median", quantile(seen["lags"], 0.5), "s")
    report.add(f"{what}: a window to its reader, 99 %", quantile(seen["lags"], 0.99), "s", LATE)


def measure_doubling(report: Report, where: Path, sizes: Sizes) -> None:
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
        written = hosts * (told["bytes"] + len(STATUS)) / WINDOW
        report.add(f"{what}: messages (calculated)", 2 * hosts / WINDOW, "messages/s")
        report.add(f"{what}: written to each replica", written / 2**20, "MiB/s")
        report.add(f"{what}: kept", kept * 3600 / 2**30, "GiB an hour")


async def stored(address: str) -> int:
    import nats

    client = await nats.connect(address)
    streams = [names.stream_of(RUN), names.windows_stream_of(RUN)]
    states = [(await client.jetstream().stream_info(name)).state for name in streams]
    await client.close()
    return sum(int(state.bytes) for state in states)


PARTS = {"hosts": measure_hosts, "doubling": measure_doubling}

if __name__ == "__main__":
    options = argument_parser(__doc__, PARTS).parse_args()
    small, large = Sizes((1, 4), 3, 2, 1), Sizes(SIZES, 63, 20, 3)
    title = "cluster: a simulation on one machine"
    run(title, PARTS, options, small if options.quick else large)
