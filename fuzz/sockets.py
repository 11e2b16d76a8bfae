"""Fuzzes the sockets of live processes with messages that are nearly right.

    python fuzz/sockets.py [--seconds N] [--seed N]

A broker, a publisher and a consumer continue a run while unauthenticated peers send to the broker's control endpoint
and event feed. Another publisher talks to a broker that is the fuzzer itself. Good messages of ``docs/protocol.md`` are
spoiled, repeated, sent in the wrong order or from the wrong peer, beside raw bytes that are not ZMTP. No process may
crash or take too much memory, the broker must answer, and the run must be complete and in order.

Prints the messages by kind and the reports of the processes; after a failure also the last messages. The same seed
sends the same messages, though not at the same moments. Exit code 0 when nothing was found."""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import psutil
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from inputs import DEMAND, event_frame, nested, spoiled_bytes, spoiled_packed

from offloop.bus.errors import OffloopError, ProtocolError
from offloop.bus.net.channels import SocketChannel, ask
from offloop.bus.protocol.frames import (
    END,
    MAX_FRAME,
    decode_control,
    encode_control,
    encode_frame_batch,
    encode_heartbeat,
    split_frame,
)
from offloop.bus.runs.directory import SOCKET_FILES
from offloop.bus.runs.writing import socket_address

RUN = "healthy"
STRANGERS = 8
MEMORY_BYTES = 768 << 20
REMEMBERED = 40
PATIENCE = 30.0
BIG_EVERY = 400
PEERS = Path(__file__).with_name("peers.py")

Draw = Callable[[SearchStrategy[Any]], Any]


class FindingError(Exception):
    """A process did something that it must not."""


class Sent:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.last: deque[str] = deque(maxlen=REMEMBERED)

    def note(self, where: str, kind: str, data: bytes) -> None:
        self.counts[f"{where} {kind}"] += 1
        self.last.append(f"{where} {kind} ({len(data)} bytes): {data[:200].hex()}")


class Peer:
    def __init__(self, name: str, command: Sequence[str], ready: str, env: dict[str, str]) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by kill()
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=env,
        )
        self._watched = psutil.Process(self._process.pid)
        self.memory = 0
        assert self._process.stdout is not None  # it is a pipe
        while ready not in (line := self._process.stdout.readline()):
            if not line:
                raise FindingError(f"the {name} did not begin: {self.errors()}")

    def look(self) -> None:
        if self._process.poll() is not None:
            raise FindingError(f"the {self.name} ended with {self._process.returncode}: {self.errors()}")
        self.memory = max(self.memory, self._watched.memory_info().rss)
        if self.memory > MEMORY_BYTES:
            raise FindingError(f"the {self.name} takes {self.memory >> 20} MiB of at most {MEMORY_BYTES >> 20}")

    def finish(self, number: int | None = None) -> dict[str, Any]:
        if number is not None:
            self._process.send_signal(number)
        self.end_input()
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise FindingError(f"the {self.name} does not end") from None
        errors = self.errors()
        if self._process.returncode or "Traceback" in errors:
            raise FindingError(f"the {self.name} ended with {self._process.returncode}: {errors}")
        assert self._process.stdout is not None  # it is a pipe
        last = self._process.stdout.read().strip().splitlines()[-1:]
        return json.loads(last[0]) if last and last[0].startswith("{") else {}

    def end_input(self) -> None:
        assert self._process.stdin is not None  # it is a pipe
        self._process.stdin.close()

    def is_running(self) -> bool:
        return self._process.poll() is None

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-3000:].strip()

    def kill(self) -> None:
        self.end_input()
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None  # it is a pipe
        self._process.stdout.close()
        self._errors.close()


# -- messages ---------------------------------------------------------------------------------------------------------


def requests(random: Random, run: str) -> list[tuple[str, dict[str, Any]]]:
    hello = {"run": run, "rank": 0, "world_size": 1, "pid": os.getpid(), "started": None, "host": socket.gethostname()}
    handled = random.choice(
        ([[0, 5]], [[rank, 1] for rank in range(5000)], [[0, -1], ["x", []]], [], {"0": 5}, [[2**40, 2**62]])
    )
    segment = {"pid": random.choice((1, -1, os.getpid(), 2**40)), "fd": random.choice((0, 3, -1, 2**40))}
    segment |= {"token": b"x" * random.choice((0, 16)), "number": 1, "size": random.choice((0, 10, -1, 2**62))}
    hello |= {"publisher_id": "x", "info": {"command": ["train"]}}
    fields = {f"field{number}": list(range(1, 60)) for number in range(64)}
    absurd = {name: {"every": [1, 2**31], "fields": fields} for name in ("batch_end", "batch_start", "after_loss")}
    return [
        ("hello", hello),
        ("hello", hello | {"attempt": 1}),
        ("hello", hello | {"rank": random.randrange(3), "world_size": 2**62}),
        ("hello", hello | {"info": {"deep": nested(random.choice((10, 100, 500)))}}),
        (
            "hello",
            hello | {"host": {b"k": 1}, "started": nested(12), "pid": random.choice((-1, 0, 2**31, 2**70 % 2**64))},
        ),
        ("resume", {"from": random.choice((0, 1, -5, 2**31, 2**62, 2**64 - 1, 1e300, "9" * 30))}),
        ("report", {"sent": 5, "dropped": 2**63, "nanoseconds_per_event": float("nan")}),
        ("report", {f"number{number}": number for number in range(60)}),
        ("lease", {"run": run, "name": "speed", "demand": DEMAND, "report": {"given": 5}}),
        ("lease", {"run": run, "name": "x" * 100_000, "demand": absurd}),
        ("lease", {"run": "x" * 1_000_000, "demand": {}}),
        ("statistics", {"run": run}),
        ("command", {"run": random.choice(("", "none")), "command": "stop"}),
        ("command", {"run": run, "command": "rm -rf"}),
        (
            "command",
            {"run": run, "command": "set", "arguments": random.choice((["lr", 1], [], [[]] * 9, "x" * 10_000))},
        ),
        ("applied", {"id": random.choice(("", "x", 5)), "event": 5, "batch": -1, "error": {}}),
        ("lease", {"run": run, "demand": DEMAND, "barrier_events": ["batch_end", "x" * 1000, 5], "handled": handled}),
        ("handled", {"run": run, "handled": handled}),
        ("fetch_segment", {"run": run, "segment": segment, "offset": random.choice((0, -1, 2**62))}),
        ("welcome", {"attempt": 1, "event_feed": "tcp://127.0.0.1:1"}),
        ("from_the_future", {"a": 1}),
    ]


def answers(random: Random) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("ack", {"seq": random.choice((0, 1, 50, -1, 2**63, True))}),
        ("retransmit", {"after": random.randrange(100)}),
        ("demand", {"demand": DEMAND, "consumers": {}}),
        ("command", {"command": random.choice(("stop", "dance", 5))}),
        ("trouble", {"reason": "x" * 1000, "seq": 5}),
        ("recovered", {"seq": 5}),
        ("command", {"command": "set", "arguments": random.choice((["lr"], "lr", [None] * 9)), "id": "x" * 5000}),
        ("consumers", {"consumers": random.choice(({}, [], {"a": [None, [], [], 3]}, {"a": 5}))}),
        ("unknown", {}),
        ("refused", {"reason": "no", "error": "OSError"}),
        ("welcome", {"attempt": 7, "acknowledged": 10**9, "demand": {}}),
        ("from_the_future", {}),
    ]


def frames(random: Random, run: str, seq: int) -> list[tuple[str, bytes]]:
    number = max(1, seq + random.choice((*[0] * 12, 1, -1, 5, -5, 2**40)))
    beat = {random.choice((0, 1, -1)): (number, number)}
    return [
        ("event", event_frame(number, run=run)),
        ("event", event_frame(number, f"new_event_{random.randrange(10**6)}", run=run)),
        ("event", event_frame(number, run=run, rank=random.randrange(4), attempt=random.choice((1, 2)))),
        ("event", event_frame(number, fields={"deep": nested(random.choice((15, 17, 300)))}, run=run)),
        ("event", event_frame(number, fields={"x": b"x" * 50_000}, run=run)),
        ("batch", encode_frame_batch([event_frame(number + offset, run=run) for offset in range(20)])),
        ("batch", encode_frame_batch([encode_frame_batch([event_frame(number, run=run)]), b"", b"\0"])),
        ("end", event_frame(number, END, {"status": "finished"}, run=run)),
        ("demand", event_frame(number, "$demand", {"demand": DEMAND}, run=run)),
        ("beat", encode_heartbeat(run, 1, 5, beat, random.choice((0, 100, 2**62)), beat)),
    ]


BIG = {
    "16 MiB of nothing": b"\0" * MAX_FRAME,
    "over the limit": b"\0" * (MAX_FRAME + 1),
    "claims 4 billion elements": b"\0\xdd\xff\xff\xff\xff",
    "claims 4 billion bytes": b"\0\x93\x01\xa4data\xc6\xff\xff\xff\xff",
    "1 million elements": b"\0\xdd\x00\x10\x00\x00" + b"\xc0" * (1 << 20),
    "16 million empty lists": b"\0\x93\x01\xa4data\xdc\x00\x0f" + (b"\xdd\x00\x10\x00\x00" + b"\x90" * (1 << 20)) * 15,
    "a batch of 1 million nothings": b"\0\x93\x01\xa6events\x81\xa6frames\xdd\x00\x0f\xff\xff" + b"\xc4\x00" * 0xFFFFF,
    "nesting": b"\0" + b"\x91" * 1_000_000,
}
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
READY = b"\x04\x29\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
PING = b"\x04\x0e\x04PING\x00\x01context"
RAW = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 64,
    GREETING[:20],
    GREETING,
    GREETING + READY,
    GREETING + READY + PING * 100,
    GREETING + READY + (b"\x00\x01x" * 500 + PING) * 10,
    GREETING + READY + b"\x04\x05\x04PING",
    GREETING + READY + b"\x02" + (MAX_FRAME - 1).to_bytes(8, "big") + bytes(100_000),
    GREETING + b"\x04\xff",
    GREETING + b"\x06" + b"\x7f" + b"\xff" * 7 + b"\x05READY",
    GREETING + b"\x04\x1a\x05READY\x0bSocket-Type\x00\x00\x00\x05DEALE" + b"\x02" + b"\x40" + bytes(7) + b"x" * 1000,
)


# -- the attack on a broker -------------------------------------------------------------------------------------------


class Strangers:
    def __init__(self, random: Random, sent: Sent, control: str, stream: str) -> None:
        self._random = random
        self._sent = sent
        self._control, self._stream = control, stream
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._raw: deque[socket.socket] = deque()
        self._seqs = [0] * STRANGERS
        self._steps = 0

    def step(self, draw: Draw) -> None:
        random = self._random
        self._steps += 1
        if len(self._sockets) < STRANGERS:
            self._sockets.append(self._connect())
        which = random.randrange(len(self._sockets))
        if random.random() < 0.02:
            self._sockets[which].close(linger=0)
            self._sockets[which] = self._connect()
        control = self._sockets[which]
        # Half of the peers use a run of their own, the others the one that continues.
        run = f"stranger-{which}" if which % 2 else RUN
        if self._steps % BIG_EVERY == 0:
            self._send(control, *random.choice(list(BIG.items())))
        elif random.random() < 0.1:
            self._send_raw(draw)
        elif random.random() < 0.5:
            kind, content = random.choice(requests(random, run))
            self._send(control, kind, draw(_control(kind, content)))
        else:
            kind, frame = random.choice(frames(random, run, self._seqs[which] + 1))
            self._seqs[which] += 1
            self._send(control, kind, draw(_perhaps_spoiled(frame)))
        if random.random() < 0.5:
            with contextlib.suppress(zmq.Again):
                control.recv(zmq.NOBLOCK)

    def _connect(self) -> "zmq.Socket[bytes]":
        made: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.SNDTIMEO, 1000)
        made.connect(self._control)
        return made

    def _send(self, control: "zmq.Socket[bytes]", kind: str, data: bytes) -> None:
        self._sent.note("control", kind, data)
        pieces = [data]
        if self._random.random() < 0.03:
            pieces = [data, b"", data[:100]]
        with contextlib.suppress(zmq.Again):
            control.send_multipart(pieces)

    def _send_raw(self, draw: Draw) -> None:
        address = self._random.choice((self._control, self._stream))
        data = self._random.choice(RAW)
        if self._random.random() < 0.5:
            data = draw(spoiled_bytes(data, RAW))
        self._sent.note("raw", "stream" if address == self._stream else "control", data)
        with contextlib.suppress(OSError):
            made = socket.socket(socket.AF_UNIX)
            made.settimeout(1)
            made.connect(address.removeprefix("ipc://"))
            self._raw.append(made)
            made.sendall(data)
        if len(self._raw) > 50:
            self._raw.popleft().close()

    def close(self) -> None:
        self._context.destroy(linger=0)
        for made in self._raw:
            made.close()


def _control(kind: str, content: dict[str, Any]) -> SearchStrategy[bytes]:
    good = encode_control(kind, content)
    return st.just(good) | spoiled_packed(good[1:]).map(lambda body: good[:1] + body) | spoiled_bytes(good)


def _perhaps_spoiled(frame: bytes) -> SearchStrategy[bytes]:
    return st.just(frame) | st.just(frame) | spoiled_bytes(frame)


# -- a broker that cannot be trusted ----------------------------------------------------------------------------------


class FalseBroker:
    def __init__(self, random: Random, sent: Sent, folder: Path) -> None:
        self._random = random
        self._sent = sent
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._control = self._context.socket(zmq.ROUTER)
        self._control.setsockopt(zmq.LINGER, 0)
        self.control = socket_address(folder / "false.sock")
        self._control.bind(self.control)

    def step(self, draw: Draw) -> None:
        for _ in range(20):
            try:
                identity, *_, frame = self._control.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._answer(identity, frame, draw)

    def _answer(self, identity: bytes, frame: bytes, draw: Draw) -> None:
        random = self._random
        try:
            topic, body = split_frame(frame)
            kind, content, _ = ("events", {}, 1) if topic else decode_control(body)
        except ProtocolError:
            return
        if kind == "hello":
            good = ("welcome", self._welcome())
        elif kind == "events":
            good = ("ack", {"seq": 100})
        else:
            good = ("leased", {"seconds": 5.0})
        if "id" in content:
            good[1]["id"] = content["id"]
        if random.random() < 0.7:
            self._send(identity, good[0], encode_control(*good))
        for _ in range(random.randrange(3)):
            bad = random.choice([good, *answers(random)])
            self._send(identity, bad[0], draw(_control(*bad)))

    def _welcome(self) -> dict[str, Any]:
        place = {
            "attempt": 1,
            "event_feed": "ipc:///nowhere/stream.sock",
            "path": "/nowhere",
            "recording": "recording-1.mcap",
        }
        return {**place, "demand": DEMAND, "acknowledged": 0}

    def _send(self, identity: bytes, kind: str, data: bytes) -> None:
        self._sent.note("answer", kind, data)
        with contextlib.suppress(zmq.Again):
            self._control.send_multipart([identity, data], zmq.NOBLOCK)

    def close(self) -> None:
        self._context.destroy(linger=0)


# -- together ---------------------------------------------------------------------------------------------------------


def attack(seconds: float, seed: int, sent: Sent) -> dict[str, Any]:
    random = Random(seed)
    with contextlib.ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="offloop-fuzz-", ignore_cleanup_errors=True))
        )
        env = {**os.environ, "OFFLOOP_RUNS_DIR": str(folder)}

        def started(name: str, command: Sequence[str], ready: str) -> Peer:
            peer = Peer(name, command, ready, env)
            stack.callback(peer.kill)
            return peer

        control, stream = (socket_address(folder / RUN / name) for name in SOCKET_FILES)
        broker = started("broker", ["-P", "-m", "offloop.bus.broker", "begin", str(folder), RUN], '"ready"')
        publisher = started("publisher", [str(PEERS), "publish", control, RUN], "ready")
        consumer = started("consumer", [str(PEERS), "consume", control, RUN], "ready")
        false = FalseBroker(random, sent, folder)
        stack.callback(false.close)
        misled = started("misled publish", [str(PEERS), "publish_again", false.control, RUN], "ready")
        strangers = Strangers(random, sent, control, stream)
        stack.callback(strangers.close)
        attack, answer = _draws(random, strangers.step), _draws(random, false.step)
        slowest = 0.0
        end, look_at = time.monotonic() + seconds, 0.0
        while time.monotonic() < end:
            attack()
            answer()
            if time.monotonic() > look_at:
                for peer in (broker, publisher, consumer, misled):
                    peer.look()
                slowest = max(slowest, _ask(control))
                look_at = time.monotonic() + 0.5
        strangers.close()
        told: dict[str, Any] = {}
        told["publisher"] = publisher.finish()
        told["consumer"] = consumer.finish()
        told["broker"] = {"slowest_answer": round(slowest, 3)}
        misled.end_input()
        # It waits for answers when it closes: continue to answer.
        deadline = time.monotonic() + PATIENCE
        while misled.is_running() and time.monotonic() < deadline:
            answer()
            time.sleep(0.001)
        told[misled.name] = misled.finish()
        _wait_for_end(folder)
        for peer in (broker, publisher, consumer, misled):
            told.setdefault(peer.name, {})["memory_mib"] = peer.memory >> 20
    _judge(told)
    return told


def _wait_for_end(folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while left := [one for one in psutil.process_iter(["cmdline"]) if str(folder) in (one.info["cmdline"] or ())]:
        if time.monotonic() > deadline:
            for one in left:
                one.kill()
            raise FindingError(f"a broker does not end: {left[0].info['cmdline']}")
        time.sleep(0.05)


def _draws(random: Random, step: Callable[[Draw], None]) -> Callable[[], None]:
    @settings(database=None)
    @given(st.data())
    def test(data: st.DataObject) -> None:
        step(data.draw)

    return lambda: test.hypothesis.fuzz_one_input(random.randbytes(4096))


def _judge(told: dict[str, Any]) -> None:
    publisher, consumer = told["publisher"], told["consumer"]
    if consumer["wrong"] or consumer["gaps"] or consumer["ending"] != "finished" or publisher["dropped"]:
        raise FindingError(f"the run that goes on is not complete and in order: {told}")
    if consumer["batches"] != publisher["batches"]:
        raise FindingError(f"the consumer has {consumer['batches']} of {publisher['batches']} batches")


def _ask(control: str) -> float:
    begin = time.monotonic()
    try:
        ask(SocketChannel(control), "statistics", {"run": RUN})
    except OffloopError as error:
        raise FindingError(f"the broker does not answer any more: {error}") from None
    return time.monotonic() - begin


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--seed", type=int, default=None, help="of the random numbers (default: another each time)")
    options = parser.parse_args(arguments)
    seed = Random().randrange(2**32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    sent, failure, told = Sent(), None, {}
    try:
        told = attack(options.seconds, seed, sent)
    except FindingError as error:
        failure = error
    for what, count in sorted(sent.counts.items()):
        print(f"{count:8}  {what}")
    for name, values in told.items():
        print(f"{name}: {json.dumps(values)}")
    if failure is not None:
        print("\n".join(["the last messages:", *sent.last]), file=sys.stderr)
        print(f"seed {seed}: {failure}", file=sys.stderr)
        return 1
    print(f"{sent.counts.total()} messages in {options.seconds:g} s, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
