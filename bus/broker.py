"""The broker: it collects the events of publishers, writes them to the journal and fans them out to consumers."""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from bus.clock import wall_clock
from bus.commands import COMMANDS
from bus.demand import LEASE_SECONDS
from bus.errors import BrokerError, ConfigurationError, OffloopError, ProtocolError, RunDirectoryError
from bus.live_run import LiveRank, LiveRun
from bus.runs import RunDirectory
from bus.time import Timestamp
from bus.wire import (
    BUNDLE,
    END,
    MAX_FRAME,
    Control,
    EventBody,
    Topic,
    decode_control,
    decode_event,
    encode_beat,
    encode_control,
    event_encoder,
    pack_map,
    split_frame,
)

__all__ = ["Broker", "BrokerStatistics"]

_log = logging.getLogger("offloop.broker")

FLUSH_SECONDS = 0.2
BEAT_SECONDS = 0.5
RECEIVE_QUEUE = 1000
STREAM_QUEUE = 20_000
STREAM_LINGER = 1000
BURST = 1000
QUIET_SECONDS = 0.2
BURIAL_SECONDS = 2.0
NAMED_REFUSALS = 10
FIRST_RUN_PATIENCE = 30.0


@dataclass(frozen=True)
class BrokerStatistics:
    """How a broker is doing; counts since it began."""

    runs: int
    """Runs served now."""
    collected: int
    """Events taken from publishers, journaled and sent out."""
    duplicates: int
    """Events that came a second time and were skipped."""
    refused: int
    """Messages that made no sense or came from strangers."""


class Broker:
    """Serves runs at one address: ``door`` for publishers and leases, ``stream`` for the events themselves.

    Nothing that a peer sends stops it: what makes no sense is counted and named in the log. Each event is journaled
    and sent out once, in the order in which it came. :meth:`serve` runs until :meth:`stop`, or, with ``until_over``,
    until the runs that came have ended.

    Raises:
        BrokerError: the address cannot be listened at.
    """

    def __init__(
        self,
        door: str,
        stream: str,
        runs_dir: Path,
        *,
        directory: RunDirectory | None = None,
        until_over: bool = False,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self._root = runs_dir
        self._directory = directory
        self._until_over = until_over
        self._clock = clock or wall_clock()
        self._runs: dict[str, LiveRun] = {}
        self._topics: dict[tuple[bytes, bytes], tuple[LiveRun, LiveRank, str]] = {}
        self._collected = self._duplicates = self._refused = self._unnamed = 0
        self._turned_away: set[bytes] = set()
        self._heard = 0.0
        self._served = 0
        self._stopping = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._door_socket = self._bind(zmq.ROUTER, door)
        self._stream_socket = self._bind(zmq.PUB, stream)
        self.door = self._door_socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.stream = self._stream_socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        self._poller.register(self._door_socket, zmq.POLLIN)

    def _bind(self, kind: int, address: str) -> "zmq.Socket[bytes]":
        bound: zmq.Socket[bytes] = self._context.socket(kind)
        bound.setsockopt(zmq.LINGER, STREAM_LINGER)
        bound.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        bound.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
        bound.setsockopt(zmq.SNDHWM, STREAM_QUEUE)
        if kind == zmq.ROUTER:
            # A publisher that reconnects keeps its name; the connection that it lost must not keep it out.
            bound.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            bound.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            if error.errno == zmq.EADDRINUSE:
                raise BrokerError(
                    f"{address} is in use by another program: choose another port with '--listen'"
                ) from None
            raise BrokerError(
                f"cannot listen at {address}: {error.strerror}; use an address like tcp://127.0.0.1:5570"
            ) from None
        return bound

    def stop(self) -> None:
        """Makes :meth:`serve` end soon; may be called from a signal handler."""
        self._stopping = True

    def statistics(self) -> BrokerStatistics:
        """How the broker is doing."""
        return BrokerStatistics(len(self._runs), self._collected, self._duplicates, self._refused)

    def serve(self) -> None:
        """Collects, journals and fans out until stopped; then closes every journal in order."""
        next_flush = next_beat = 0.0
        begun = time.monotonic()
        try:
            while not self._stopping and not self._all_over(begun):
                ready = dict(self._poller.poll(50))
                if self._door_socket in ready:
                    self._collect()
                now = time.monotonic()
                if self._door_socket in ready:
                    self._heard = now
                self._bury(ready, now)
                if now >= next_flush:
                    next_flush = now + FLUSH_SECONDS
                    self._flush(now)
                if now >= next_beat:
                    next_beat = now + BEAT_SECONDS
                    self._beat()
                    self._sum_up_refusals()
        finally:
            self._close()

    def _all_over(self, begun: float) -> bool:
        if not self._until_over or self._runs:
            return False
        return self._served > 0 or time.monotonic() - begun > FIRST_RUN_PATIENCE

    # -- collect -> journal -> fan out --------------------------------------------------------------------------------

    def _collect(self) -> None:
        receive = self._door_socket.recv
        for _ in range(BURST):
            try:
                identity = receive(zmq.NOBLOCK)
            except zmq.Again:
                return
            # As a Frame it says itself whether more follow, which costs less than asking the socket.
            frame = self._door_socket.recv(zmq.NOBLOCK, copy=False)
            if frame.more:
                while frame.more:
                    frame = self._door_socket.recv(zmq.NOBLOCK, copy=False)
                self._refuse(identity, "a message of several frames")
                continue
            self._take_message(identity, frame.bytes)

    def _take_message(self, identity: bytes, frame: bytes) -> None:
        try:
            if not frame.startswith(b"\0"):
                self._take(identity, frame)
                return
            message = decode_control(split_frame(frame)[1])
            if message.kind != BUNDLE:
                self._take_control(identity, message)
                return
            frames = message.content.get("frames")
        except ProtocolError as error:
            self._refuse(identity, str(error))
            return
        for event in frames if isinstance(frames, list) else (None,):
            self._take_bundled(identity, event)

    def _take_bundled(self, identity: bytes, frame: Any) -> None:
        try:
            if not isinstance(frame, bytes) or frame.startswith(b"\0"):
                raise ProtocolError("a bundle holds something else than frames of events")
            self._take(identity, frame)
        except ProtocolError as error:
            self._refuse(identity, str(error))

    def _take(self, identity: bytes, frame: bytes) -> None:
        end = frame.find(b"\0", 0, 257)
        place = self._topics.get((identity, frame[:end]))
        if place is None:
            self._take_first(identity, frame)
            return
        run, rank, name = place
        event = decode_event(frame[end + 1 :])
        if event.attempt != run.attempt:
            raise ProtocolError(f"an event of attempt {event.attempt} of run {run.name!r} in attempt {run.attempt}")
        if event.seq <= rank.seq:
            self._duplicates += 1
            return
        self._record(run, rank, name, event, frame, end)

    def _record(self, run: LiveRun, rank: LiveRank, name: str, event: EventBody, frame: bytes, end: int) -> None:
        rank.seq = event.seq
        rank.time = event.time
        rank.base_seq = event.base_seq
        if run.recording_error is None:
            try:
                run.journal.append(frame[:end], event.seq, event.time, frame[end + 1 :])
            except OSError as error:
                self._stop_recording(run, error)
        self._send_out(frame)
        self._collected += 1
        if name == END:
            self._unwatch(rank)
            self._topics = {key: place for key, place in self._topics.items() if place[1] is not rank}
            run.note_end(rank, event.fields, time.monotonic())
            if run.over:
                self._end_run(run)

    def _send_out(self, frame: bytes) -> None:
        # PUB never blocks: what a slow consumer cannot take is dropped for it, and it reads that part from the
        # recording.
        self._stream_socket.send(frame, zmq.NOBLOCK)

    def _take_first(self, identity: bytes, frame: bytes) -> None:
        """The first event of a topic."""
        topic, _ = split_frame(frame)
        if topic is None:
            raise ProtocolError("a control message among events")
        run = self._runs.get(topic.run)
        rank = run.ranks.get(topic.rank) if run else None
        if run is None or rank is None or rank.identity != identity:
            self._turn_away(identity)
            raise ProtocolError(f"an event of {topic.run}/{topic.rank} from somebody who did not say hello for it")
        if rank.ended:
            raise ProtocolError(f"an event of {topic.run}/{topic.rank} after its end")
        self._topics[identity, frame[: frame.find(b"\0")]] = (run, rank, topic.name)
        self._take(identity, frame)

    def _turn_away(self, identity: bytes) -> None:
        """Tells a publisher that we do not know, once: it may have known a broker that listened here before."""
        if identity not in self._turned_away:
            if len(self._turned_away) >= BURST:
                self._turned_away.clear()
            self._turned_away.add(identity)
            self._answer(identity, "refused", {"reason": "this broker does not know the run", "error": "BrokerError"})

    def _refuse(self, identity: bytes, why: str) -> None:
        self._refused += 1
        self._unnamed += 1
        # A log that cannot be written as fast as a stranger sends would hold up everybody else.
        if self._unnamed <= NAMED_REFUSALS:
            _log.warning("skipped a message from %s: %s", identity[:8].hex(), why)

    def _sum_up_refusals(self) -> None:
        if self._unnamed > NAMED_REFUSALS:
            _log.warning("skipped %d more messages", self._unnamed - NAMED_REFUSALS)
        self._unnamed = 0

    # -- control ------------------------------------------------------------------------------------------------------

    def _take_control(self, identity: bytes, message: Control) -> None:
        try:
            if message.kind == "hello":
                self._welcome(identity, message.content)
            elif message.kind == "want":
                self._lease(identity, message.content)
            elif message.kind == "command":
                self._relay(identity, message.content)
            else:
                self._refuse(identity, f"a control message of the unknown kind {message.kind[:40]!r}")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            self._answer(
                identity, "refused", {"reason": f"{message.kind} is malformed ({error})", "error": "ProtocolError"}
            )
            raise ProtocolError(f"{message.kind} is malformed: {error}") from None
        except OffloopError as error:
            self._answer(identity, "refused", {"reason": str(error), "error": type(error).__name__})

    def _answer(self, identity: bytes, kind: str, content: dict[str, Any]) -> None:
        try:
            self._door_socket.send_multipart([identity, encode_control(kind, content)], zmq.NOBLOCK)
        except zmq.Again:
            _log.warning("%s does not read its answers; %r is dropped", identity[:8].hex(), kind)

    def _welcome(self, identity: bytes, hello: dict[str, Any]) -> None:
        name, number, world_size = str(hello["run"]), int(hello["rank"]), int(hello["world_size"])
        if not 0 <= number < world_size:
            raise ConfigurationError(f"rank {number} of {world_size}: ranks go from 0 to world_size - 1")
        pid, info = int(hello.get("pid", 0)), dict(hello.get("info", {}))
        run = self._runs.get(name) or self._begin_run(name, world_size, info)
        if number in run.ranks or number >= run.world_size:
            raise BrokerError(
                f"rank {number} of run {name!r} is there already: choose another run name, or wait until it ends"
            )
        rank = LiveRank(identity, number, self._watch(pid) if hello.get("host") == socket.gethostname() else None)
        run.ranks[number] = rank
        welcome = {
            "attempt": run.attempt,
            "stream": self.stream,
            "path": str(run.directory.path),
            "recording": run.journal.path.name,
            "events": sorted(run.demand),
        }
        self._answer(identity, "welcome", welcome)

    def _begin_run(self, name: str, world_size: int, info: dict[str, Any]) -> LiveRun:
        directory = (
            self._directory if self._directory and self._directory.name == name else RunDirectory(self._root, name)
        )
        try:
            # The recording first: whoever finds the run live may open it at once.
            run = LiveRun(directory, *directory.next_attempt(), world_size)
            directory.begin_attempt(info, self.door, self.stream)
        except BaseException:
            directory.release()
            raise
        self._runs[name] = run
        self._served += 1
        return run

    def _lease(self, identity: bytes, want: dict[str, Any]) -> None:
        run = self._runs.get(str(want["run"]))
        if run is None:
            raise BrokerError(f"run {want['run']!r} is not live here")
        run.leases.renew(identity, [str(event) for event in want["events"]], time.monotonic())
        self._answer(identity, "leased", {"seconds": LEASE_SECONDS})
        self._push_demand(run, time.monotonic())

    def _relay(self, identity: bytes, content: dict[str, Any]) -> None:
        run, command = self._runs.get(str(content["run"])), str(content["command"])
        if run is None:
            raise BrokerError(f"run {content['run']!r} is not live here")
        if command not in COMMANDS:
            raise ConfigurationError(f"command {command!r} is unknown: use {', '.join(COMMANDS)}")
        ranks = [rank for rank in run.ranks.values() if not rank.ended]
        for rank in ranks:
            self._answer(rank.identity, "command", {"command": command})
        self._answer(identity, "told", {"ranks": len(ranks)})

    def _push_demand(self, run: LiveRun, now: float) -> None:
        demand = run.leases.merged(now)
        if demand != run.demand:
            run.demand = demand
            for rank in run.ranks.values():
                self._answer(rank.identity, "demand", {"events": sorted(demand)})

    # -- what time brings ---------------------------------------------------------------------------------------------

    def _flush(self, now: float) -> None:
        for run in self._runs.values():
            if run.recording_error is None and any(rank.seq > rank.acknowledged for rank in run.ranks.values()):
                with self._recording(run):
                    run.journal.flush()
                self._acknowledge(run)
            self._push_demand(run, now)
        for run in [run for run in self._runs.values() if run.is_abandoned(now)]:
            run.status, run.error = "lost", f"only {len(run.ranks)} of {run.world_size} ranks ever came"
            self._end_run(run)

    @contextlib.contextmanager
    def _recording(self, run: LiveRun) -> Iterator[None]:
        """A disk that is full or gone ends the record, but neither the broker nor the live stream."""
        try:
            yield
        except (OSError, RunDirectoryError) as error:
            self._stop_recording(run, error)

    def _stop_recording(self, run: LiveRun, error: Exception) -> None:
        if run.recording_error is None:
            run.recording_error = str(error)
            _log.error("run %s is not recorded any more: %s", run.name, error)
            for rank in run.ranks.values():
                self._answer(rank.identity, "trouble", {"reason": str(error), "seq": rank.acknowledged})

    def _acknowledge(self, run: LiveRun) -> None:
        for rank in run.ranks.values():
            if rank.seq > rank.acknowledged and run.recording_error is None:
                rank.acknowledged = rank.seq
                self._answer(rank.identity, "ack", {"seq": rank.seq})

    def _beat(self) -> None:
        for run in self._runs.values():
            positions = {number: (rank.seq, rank.base_seq) for number, rank in run.ranks.items()}
            self._send_out(encode_beat(run.name, run.attempt, self._clock(), positions))

    def _watch(self, pid: int) -> int | None:
        """A file descriptor that becomes readable when a process of this machine ends, if the system has such."""
        try:
            descriptor = os.pidfd_open(pid)
        except (AttributeError, OSError, OverflowError):
            return None
        self._poller.register(descriptor, zmq.POLLIN)
        return descriptor

    def _bury(self, ready: dict[Any, int], now: float) -> None:
        """Ends the streams of publishers that died without a word, once all that they had sent is collected.

        The news of a death can be faster than the last message, so nothing must have come for a while."""
        for run in list(self._runs.values()):
            for rank in run.ranks.values():
                if rank.process in ready and rank.died is None:
                    rank.died = now
                if rank.died is not None and not rank.ended:
                    quiet = now - max(rank.died, self._heard)
                    if quiet > QUIET_SECONDS or now - rank.died > BURIAL_SECONDS:
                        self._end_lost(run, rank)

    def _end_lost(self, run: LiveRun, rank: LiveRank) -> None:
        self._unwatch(rank)
        fields = {"status": "lost", "error": "the trainer's process died"}
        encode = event_encoder(Topic(run.name, END, rank.rank), run.attempt)
        now = max(self._clock(), rank.time)
        frame = encode(
            rank.seq + 1,
            rank.base_seq + 1,
            now,
            Timestamp().values,
            None,
            fields,
            pack_map({"world_size": run.world_size}),
        )
        end = frame.index(b"\0")
        self._record(run, rank, END, decode_event(frame[end + 1 :]), frame, end)

    def _unwatch(self, rank: LiveRank) -> None:
        if rank.process is not None:
            self._poller.unregister(rank.process)
            os.close(rank.process)
            rank.process = None

    def _end_run(self, run: LiveRun) -> None:
        with self._recording(run):
            run.journal.close()
        with self._recording(run):
            run.directory.end_attempt(run.status, run.error or _incomplete(run))
        run.directory.release()
        # The last acknowledgement comes last: a publisher that has it finds the run ended, on disk too.
        self._acknowledge(run)
        for rank in run.ranks.values():
            self._unwatch(rank)
        del self._runs[run.name]
        self._topics = {key: place for key, place in self._topics.items() if place[0] is not run}

    def _close(self) -> None:
        for run in list(self._runs.values()):
            run.status, run.error = "lost", "the broker was stopped"
            self._end_run(run)
        if self._directory is not None and self._served == 0:
            self._directory.release()
        self._context.destroy()


def _incomplete(run: LiveRun) -> str | None:
    return run.recording_error and f"the recording is incomplete: {run.recording_error}"
