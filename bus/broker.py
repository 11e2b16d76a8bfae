"""The broker: it collects the events of publishers, writes them to the journal and fans them out to consumers."""

import contextlib
import logging
import os
import resource
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zmq

from bus import processes
from bus.archive import Archive
from bus.clock import wall_clock
from bus.commands import COMMANDS
from bus.demand import LEASE_SECONDS, Demand
from bus.errors import BrokerError, ConfigurationError, OffloopError, ProtocolError, RunDirectoryError
from bus.journal import JournalWriter
from bus.live_run import LiveRank, LiveRun
from bus.runs import RunDirectory
from bus.security import DOOR, ROLE_NEEDED, STREAM, Gatekeeper, ServerSecurity, allow_ipv6, check_listen_address
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
ANSWER_QUEUE = 100
STREAM_QUEUE = 5000
STREAM_LINGER = 1000
LIVE_FRAME = 32 * 1024
HANDSHAKE_MILLISECONDS = 5000
BURST = 1000
ASK_AGAIN_SECONDS = 0.5
QUIET_SECONDS = 0.2
BURIAL_SECONDS = 2.0
NAMED_REFUSALS = 10
FIRST_RUN_PATIENCE = 30.0
MAX_TOLD = 50
MAX_LISTED = 1000


@dataclass(frozen=True)
class BrokerStatistics:
    """How a broker is doing; counts since it began."""

    runs: int
    """Runs served now."""
    collected: int
    """Events taken from publishers and sent out."""
    recorded: int
    """Events written to journals."""
    duplicates: int
    """Events that came a second time and were skipped."""
    refused: int
    """Messages that made no sense or came from strangers."""
    asked_again: int
    """How often a publisher was asked to send again."""
    missing: int
    """Events that publishers had to give up before they came: gaps."""
    ended: int
    """Runs that have ended."""


class Broker:
    """Serves runs at one address: ``door`` for publishers and requests, ``stream`` for the events themselves.

    Nothing that a peer sends stops it: what makes no sense is counted and named in the log. Each event is journaled
    and sent out once, in the order in which it came. :meth:`serve` runs until :meth:`stop`, or, with ``until_over``,
    until the runs that came have ended. With ``security`` only keys that its list admits get in, each for what the
    list says.

    Raises:
        BrokerError: the address cannot be listened at.
        ConfigurationError: the list of keys cannot be used.
    """

    def __init__(
        self,
        door: str,
        stream: str,
        runs_dir: Path,
        *,
        directory: RunDirectory | None = None,
        until_over: bool = False,
        security: ServerSecurity | None = None,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self._root = runs_dir
        self._archive = Archive(runs_dir)
        self._directory = directory
        self._until_over = until_over
        self._clock = clock or wall_clock()
        self._runs: dict[str, LiveRun] = {}
        self._topics: dict[tuple[bytes, bytes], tuple[LiveRun, LiveRank, str]] = {}
        self._publishers: dict[bytes, tuple[LiveRun, LiveRank]] = {}
        self._collected = self._recorded = self._duplicates = self._refused = self._unnamed = 0
        self._asked_again = self._missing = 0
        self._turned_away: deque[bytes] = deque(maxlen=BURST)
        self._heard = 0.0
        self._served = self._ended = 0
        self._stopping = False
        _allow_many_connections()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._security = security
        self._gatekeeper = Gatekeeper(self._context, security) if security is not None else None
        self._granted: dict[tuple[str, str], bool] = {}
        self._door_socket = self._bind(zmq.ROUTER, door, DOOR)
        self._stream_socket = self._bind(zmq.PUB, stream, STREAM)
        self.door = self._door_socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.stream = self._stream_socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        self._poller.register(self._door_socket, zmq.POLLIN)
        if self._gatekeeper is not None:
            self._poller.register(self._gatekeeper.socket, zmq.POLLIN)

    def _bind(self, kind: int, address: str, domain: str) -> "zmq.Socket[bytes]":
        check_listen_address(address, self._security)
        bound: zmq.Socket[bytes] = self._context.socket(kind)
        bound.setsockopt(zmq.LINGER, STREAM_LINGER)
        allow_ipv6(bound, address)
        bound.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        bound.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
        bound.setsockopt(zmq.SNDHWM, STREAM_QUEUE if kind == zmq.PUB else ANSWER_QUEUE)
        bound.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MILLISECONDS)
        if kind == zmq.ROUTER:
            # A publisher that reconnects keeps its name; the connection that it lost must not keep it out.
            bound.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if self._security is not None:
            self._security.apply(bound, domain)
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
        return BrokerStatistics(
            runs=len(self._runs),
            collected=self._collected,
            recorded=self._recorded + sum(run.journal.written for run in self._runs.values()),
            duplicates=self._duplicates,
            refused=self._refused,
            asked_again=self._asked_again,
            missing=self._missing,
            ended=self._ended,
        )

    def serve(self) -> None:
        """Collects, journals and fans out until stopped; then closes every journal in order."""
        next_flush = next_beat = 0.0
        begun = time.monotonic()
        try:
            while not self._stopping and not self._all_over(begun):
                ready = dict(self._poller.poll(50))
                if self._gatekeeper is not None and self._gatekeeper.socket in ready:
                    self._gatekeeper.handle()
                if self._door_socket in ready:
                    self._collect()
                now = time.monotonic()
                if self._door_socket in ready:
                    self._heard = now
                self._bury(ready, now)
                if now >= next_flush or any(run.flush_soon for run in self._runs.values()):
                    next_flush = now + FLUSH_SECONDS
                    self._flush(now)
                if now >= next_beat:
                    next_beat = now + BEAT_SECONDS
                    self._beat()
                    self._sum_up_refusals()
                    # The list may have changed.
                    self._granted.clear()
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
            self._take_message(identity, frame)

    def _take_message(self, identity: bytes, message: zmq.Frame) -> None:
        frame = message.bytes
        try:
            if not frame.startswith(b"\0"):
                self._check_role(message, BUNDLE)
                self._take(identity, frame)
                return
            control = decode_control(split_frame(frame)[1])
            self._check_role(message, control.kind)
            if control.kind != BUNDLE:
                self._take_control(identity, control)
                return
            frames = control.content.get("frames")
        except ProtocolError as error:
            self._refuse(identity, str(error))
            return
        except _ForbiddenError as error:
            self._refuse(identity, str(error))
            self._answer(identity, "refused", {"reason": str(error), "error": "BrokerError"})
            return
        for event in frames if isinstance(frames, list) else (None,):
            self._take_bundled(identity, event)

    def _check_role(self, message: zmq.Frame, kind: str) -> None:
        if self._gatekeeper is None:
            return
        role = ROLE_NEEDED.get(kind, "publish")
        key = str(message.get("User-Id"))
        granted = self._granted.get((key, role))
        if granted is None:
            granted = self._granted[key, role] = self._gatekeeper.may(key, role)
        if not granted:
            raise _ForbiddenError(
                f"the key {key} may not do that: 'bus allow' on the broker's machine gives it {role!r}"
            )

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
        body = frame[end + 1 :]
        event = decode_event(body)
        if event.attempt != run.attempt:
            raise ProtocolError(f"an event of attempt {event.attempt} of run {run.name!r} in attempt {run.attempt}")
        if rank.ended and event.seq > rank.seq:
            raise ProtocolError(f"an event of {run.name}/{rank.rank} after its end")
        if event.seq == rank.seq + 1:
            self._accept(run, rank, name, event, frame, end)
        elif event.seq > rank.seq:
            # Something was lost on the way, or in a broker before this one.
            self._ask_again(rank)
        elif event.seq == rank.journaled + 1 and run.trouble is None:
            run.record(rank, frame[:end], event, body)
        else:
            self._duplicates += 1

    def _accept(self, run: LiveRun, rank: LiveRank, name: str, event: EventBody, frame: bytes, end: int) -> None:
        rank.seq = event.seq
        rank.time = event.time
        rank.base_seq = event.base_seq
        body = frame[end + 1 :]
        run.record(rank, frame[:end], event, body)
        if rank.journaled < rank.seq and run.trouble is None:
            self._ask_again(rank)
        if len(frame) <= LIVE_FRAME:
            # PUB never blocks: what a slow consumer cannot take is dropped for it, and it reads that part from the
            # recording.
            self._stream_socket.send(frame, zmq.NOBLOCK)
        else:
            # Nor may queues for slow consumers fill the memory: what is large is read from the recording by all.
            run.flush_soon = True
        self._collected += 1
        if name == END:
            self._unwatch(rank)
            run.note_end(rank, frame[:end], event, body, time.monotonic())
            if rank.identity is not None:
                self._answer(rank.identity, "ended", {})
            if run.over:
                self._end_run(run)

    def _ask_again(self, rank: LiveRank) -> None:
        now = time.monotonic()
        if rank.identity is not None and now - rank.asked > ASK_AGAIN_SECONDS:
            rank.asked = now
            self._asked_again += 1
            self._answer(rank.identity, "resend", {"after": min(rank.seq, rank.journaled)})

    def _go_on_from(self, identity: bytes, content: dict[str, Any]) -> None:
        """A publisher says with which event it goes on: what comes before that and is not here, nobody has."""
        first = int(content["from"])
        place = self._publishers.get(identity)
        if place is None:
            self._turn_away(identity)
            return
        run, rank = place
        if run.trouble is None and first > rank.journaled + 1:
            _log.warning(
                "run %s, rank %d: events %d to %d are not recorded, the trainer had to give them up",
                *(run.name, rank.rank, rank.journaled + 1, first - 1),
            )
            rank.journaled = first - 1
        if first > rank.seq + 1:
            rank.missing += first - rank.seq - 1
            self._missing += first - rank.seq - 1
            rank.seq = first - 1

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
        self._topics[identity, frame[: frame.find(b"\0")]] = (run, rank, topic.name)
        self._take(identity, frame)

    def _turn_away(self, identity: bytes) -> None:
        """Tells a publisher that we do not know, once: it may have known a broker that listened here before."""
        if identity not in self._turned_away:
            self._turned_away.append(identity)
            self._answer(identity, "unknown", {})

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
        if self._gatekeeper is not None:
            self._gatekeeper.sum_up()

    # -- control ------------------------------------------------------------------------------------------------------

    def _take_control(self, identity: bytes, message: Control) -> None:
        take = {
            "hello": self._welcome,
            "resume": self._go_on_from,
            "report": self._note_report,
            "want": self._lease,
            "command": self._relay,
            "runs": self._list_runs,
            "fetch": self._fetch,
            "statistics": self._tell_statistics,
        }.get(message.kind)
        if take is None:
            self._refuse(identity, f"a control message of the unknown kind {message.kind[:40]!r}")
            return
        try:
            take(identity, message.content)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            self._answer(
                identity, "refused", {"reason": f"{message.kind} is malformed ({error})", "error": "ProtocolError"}
            )
            raise ProtocolError(f"{message.kind} is malformed: {error}") from None
        except OffloopError as error:
            self._answer(identity, "refused", {"reason": str(error), "error": type(error).__name__})

    def _answer(self, identity: bytes, kind: str, content: dict[str, Any]) -> None:
        # ROUTER drops what a peer does not read.
        with contextlib.suppress(zmq.Again):
            self._door_socket.send_multipart([identity, encode_control(kind, content)], zmq.NOBLOCK)

    def _welcome(self, identity: bytes, hello: dict[str, Any]) -> None:
        name, number, world_size = str(hello["run"]), int(hello["rank"]), int(hello["world_size"])
        if not 0 <= number < world_size:
            raise ConfigurationError(f"rank {number} of {world_size}: ranks go from 0 to world_size - 1")
        pid, incarnation = int(hello.get("pid", 0)), str(hello.get("incarnation", identity.hex()))
        run = self._runs.get(name)
        if run is None and hello.get("attempt") is not None:
            run = self._resume_run(self._directory_of(name), int(hello["attempt"]))
        elif run is None:
            info = dict(hello.get("info", {}))
            run = self._begin_run(self._directory_of(name), world_size, info)
        rank = self._rank_of(run, number, incarnation, hello.get("attempt"))
        self._forget_connection(rank)
        rank.identity = identity
        self._publishers[identity] = run, rank
        if hello.get("host") == socket.gethostname():
            rank.process = self._watch(pid)
        told = {key: hello.get(key) for key in ("pid", "started", "host")}
        with self._recording(run):
            run.directory.note_publisher({"rank": number, "incarnation": incarnation, **told})
        welcome = {
            "attempt": run.attempt,
            "stream": self.stream,
            "path": str(run.directory.path),
            "recording": run.journal.path.name,
            "demand": run.demand.to_wire(),
            "acknowledged": rank.acknowledged,
        }
        self._answer(identity, "welcome", welcome)

    def _rank_of(self, run: LiveRun, number: int, incarnation: str, attempt: Any) -> LiveRank:
        """The rank that says hello: a new one, or the same one again."""
        rank = run.ranks.get(number)
        if attempt is not None and attempt != run.attempt:
            raise BrokerError(
                f"attempt {attempt} of run {run.name!r} cannot go on: attempt {run.attempt} has begun since"
            )
        if rank is None and number < run.world_size:
            rank = run.ranks[number] = LiveRank(number, incarnation)
        elif rank is None or rank.incarnation != incarnation or rank.ended:
            raise BrokerError(
                f"rank {number} of run {run.name!r} is there already: choose another run name, or wait until it ends"
            )
        return rank

    def _directory_of(self, name: str) -> RunDirectory:
        if self._directory is not None and self._directory.name == name:
            return self._directory
        return RunDirectory(self._root, name)

    def _begin_run(self, directory: RunDirectory, world_size: int, info: dict[str, Any]) -> LiveRun:
        try:
            # The recording first: whoever finds the run live may open it at once.
            number, recording = directory.next_attempt()
            run = LiveRun(directory, number, JournalWriter(recording, directory.name, number), world_size)
            directory.begin_attempt(info, world_size, self.door, self.stream)
        except BaseException:
            directory.release()
            raise
        return self._serve_run(run)

    def resume(self) -> None:
        """Takes up the run of the directory that was given where the broker before this one left it.

        Raises:
            BrokerError: its newest attempt has ended, or there is none.
        """
        assert self._directory is not None  # whoever resumes says what
        entry = self._directory.resumable()
        self._resume_run(self._directory, 0 if entry is None else int(entry["attempt"]))

    def _resume_run(self, directory: RunDirectory, attempt: int) -> LiveRun:
        try:
            recording, world_size, publishers = directory.resume_attempt(attempt, self.door, self.stream)
            run = LiveRun(directory, attempt, JournalWriter.resume(recording, directory.name, attempt), world_size)
        except BaseException:
            directory.release()
            raise
        for told in publishers:
            rank = run.ranks.setdefault(int(told["rank"]), LiveRank(int(told["rank"])))
            rank.incarnation = str(told.get("incarnation"))
            if told.get("host") == socket.gethostname() and not rank.ended:
                if processes.is_running(told.get("pid"), told.get("started")):
                    rank.process = self._watch(int(told["pid"]))
                else:
                    rank.died = time.monotonic()
        _log.warning("attempt %d of run %s goes on with a new broker", attempt, run.name)
        return self._serve_run(run)

    def _serve_run(self, run: LiveRun) -> LiveRun:
        self._runs[run.name] = run
        self._served += 1
        return run

    def _forget_connection(self, rank: LiveRank) -> None:
        """A rank that says hello again has a new connection; nothing is taken from the old one any more."""
        self._unwatch(rank)
        rank.died = None
        if rank.identity is not None:
            self._publishers.pop(rank.identity, None)
        self._topics = {key: place for key, place in self._topics.items() if place[1] is not rank}

    def _note_report(self, identity: bytes, content: dict[str, Any]) -> None:
        place = self._publishers.get(identity)
        if place is None:
            self._turn_away(identity)
        else:
            rank, told = place[1], _report(content)
            if len(told) > 1:
                rank.told = told
            if told.get("last_sent", 0) > rank.seq:
                # It was sent before this message on the same connection, so it was lost on the way.
                self._ask_again(rank)

    def _live(self, name: Any) -> LiveRun:
        run = self._runs.get(str(name))
        if run is None:
            raise BrokerError(f"run {name!r} is not live here")
        return run

    def _lease(self, identity: bytes, want: dict[str, Any]) -> None:
        run = self._live(want["run"])
        name, told = want.get("name"), want.get("report") or {}
        run.renew_lease(
            identity, Demand.from_wire(want["demand"]), None if name is None else str(name)[:100], _report(told)
        )
        self._answer(identity, "leased", {"seconds": LEASE_SECONDS})
        self._push_demand(run, time.monotonic())

    def _relay(self, identity: bytes, content: dict[str, Any]) -> None:
        run, command = self._live(content["run"]), str(content["command"])
        if command not in COMMANDS:
            raise ConfigurationError(f"command {command!r} is unknown: use {', '.join(COMMANDS)}")
        told = [rank.identity for rank in run.ranks.values() if not rank.ended and rank.identity is not None]
        for publisher in told:
            self._answer(publisher, "command", {"command": command})
        self._answer(identity, "told", {"ranks": len(told)})

    def _list_runs(self, identity: bytes, content: dict[str, Any]) -> None:
        live = {run.name: {"attempt": run.attempt, "stream": self.stream} for run in self._runs.values()}
        self._answer(identity, "runs", {"runs": self._archive.listing(content.get("run"), live)})

    def _fetch(self, identity: bytes, content: dict[str, Any]) -> None:
        self._answer(identity, "data", self._archive.read(content))

    def _tell_statistics(self, identity: bytes, content: dict[str, Any]) -> None:
        run = self._live(content["run"])
        self._answer(
            identity,
            "statistics",
            {
                "broker": asdict(self.statistics()),
                "publishers": {number: dict(rank.told) for number, rank in run.ranks.items()},
                "consumers": run.consumers()[:MAX_LISTED],
                "trouble": run.trouble,
            },
        )

    def _push_demand(self, run: LiveRun, now: float) -> None:
        demand = run.leases.merged(now)
        if demand != run.demand:
            run.demand = demand
            for rank in run.ranks.values():
                if rank.identity is not None:
                    self._answer(rank.identity, "demand", {"demand": demand.to_wire()})

    # -- what time brings ---------------------------------------------------------------------------------------------

    def _flush(self, now: float) -> None:
        for run in self._runs.values():
            was_well = run.trouble is None
            run.flush()
            if run.mend(now):
                self._catch_up_on_disk(run)
            elif was_well and run.trouble is not None:
                self._tell_trouble(run)
            self._acknowledge(run)
            self._push_demand(run, now)
        for run in [run for run in self._runs.values() if run.is_abandoned(now)]:
            run.status, run.error = "lost", f"only {len(run.ranks)} of {run.world_size} ranks ever came"
            self._end_run(run)

    @contextlib.contextmanager
    def _recording(self, run: LiveRun) -> Iterator[None]:
        """What cannot be written down about a run stops neither the broker nor the live stream."""
        try:
            yield
        except (OSError, RunDirectoryError) as error:
            _log.error("run %s: %s", run.name, error)

    def _tell_trouble(self, run: LiveRun) -> None:
        for rank in run.ranks.values():
            if rank.identity is not None:
                self._answer(rank.identity, "trouble", {"reason": run.trouble, "seq": rank.acknowledged})

    def _catch_up_on_disk(self, run: LiveRun) -> None:
        for rank in run.ranks.values():
            if rank.identity is not None:
                self._answer(rank.identity, "recovered", {"seq": rank.acknowledged})
                self._ask_again(rank)

    def _acknowledge(self, run: LiveRun) -> None:
        for rank in run.ranks.values():
            if rank.identity is not None and rank.acknowledged > rank.answered:
                rank.answered = rank.acknowledged
                self._answer(rank.identity, "ack", {"seq": rank.acknowledged})

    def _beat(self) -> None:
        for run in self._runs.values():
            positions = {number: (rank.seq, rank.base_seq) for number, rank in run.ranks.items()}
            on_disk = {number: (place.seq, place.base_seq) for number, place in run.journal.positions.items()}
            beat = encode_beat(run.name, run.attempt, self._clock(), positions, run.journal.size, on_disk)
            self._stream_socket.send(beat, zmq.NOBLOCK)

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
            for rank in list(run.ranks.values()):
                if rank.process in ready and rank.died is None:
                    rank.died = now
                if rank.died is not None and not rank.ended:
                    quiet = now - max(rank.died, self._heard)
                    if quiet > QUIET_SECONDS or now - rank.died > BURIAL_SECONDS:
                        self._end_lost(run, rank)

    def _end_lost(self, run: LiveRun, rank: LiveRank) -> None:
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
        self._accept(run, rank, END, decode_event(frame[end + 1 :]), frame, end)

    def _unwatch(self, rank: LiveRank) -> None:
        if rank.process is not None:
            self._poller.unregister(rank.process)
            os.close(rank.process)
            rank.process = None

    def _end_run(self, run: LiveRun) -> None:
        was_well = run.trouble is None
        run.close_journal()
        with self._recording(run):
            run.directory.end_attempt(run.status, run.error or _incomplete(run))
        run.directory.release()
        if was_well and run.trouble is not None:
            self._tell_trouble(run)
        # The last acknowledgement comes last: a publisher that has it finds the run ended, on disk too.
        self._acknowledge(run)
        for rank in run.ranks.values():
            self._forget_connection(rank)
        del self._runs[run.name]
        self._recorded += run.journal.written
        self._ended += 1

    def _close(self) -> None:
        for run in list(self._runs.values()):
            run.status, run.error = "lost", "the broker was stopped"
            self._end_run(run)
        if self._directory is not None and self._served == 0:
            self._directory.release()
        self._context.destroy()


class _ForbiddenError(Exception):
    """A key asked for something that it may not have."""


def _allow_many_connections() -> None:
    """A connection is a file descriptor, and systems give programs few of them unless they ask for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _report(told: Any) -> dict[str, float]:
    """What a peer says about itself: numbers by name, and not many, because it is kept."""
    if not isinstance(told, dict) or len(told) > MAX_TOLD:
        raise ValueError(f"its report is not a map of at most {MAX_TOLD} numbers")
    return {str(name)[:100]: value for name, value in told.items() if isinstance(value, int | float)}


def _incomplete(run: LiveRun) -> str | None:
    return run.trouble and f"the recording is incomplete: {run.trouble}"
