"""The broker: it collects the events of publishers, writes them to the recording and fans them out to consumers."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zmq

from offloop.bus.broker.admission import Admission, ForbiddenError
from offloop.bus.broker.archive import Archive
from offloop.bus.broker.bridging import Bridges
from offloop.bus.broker.connection_guard import ConnectionGuard
from offloop.bus.broker.control import MAX_REASON, ControlHandler
from offloop.bus.broker.flight import FlightRecorder
from offloop.bus.broker.peers import Peers
from offloop.bus.broker.rank import LiveRank, Placement
from offloop.bus.broker.run import LIVE_FRAME, BrokerRun
from offloop.bus.broker.runs import BrokerStatistics, LiveRuns
from offloop.bus.errors import OffloopError, ProtocolError
from offloop.bus.index.index import add_run
from offloop.bus.net.curve import CONTROL, STREAM, Gatekeeper, ServerSecurity
from offloop.bus.net.sockets import listen
from offloop.bus.processes import allow_many_connections
from offloop.bus.protocol.frames import (
    ALL,
    BASE,
    END,
    FRAME_BATCH,
    MAX_BATCH_FRAMES,
    MAX_HELLO,
    MAX_TOPIC,
    Control,
    Topic,
    decode_control,
    decode_frame_batch,
    encode_frame_batch,
    encode_heartbeat,
    event_encoder,
    is_frame_batch,
    split_frame,
)
from offloop.bus.protocol.numbering import BASE_STEPS
from offloop.bus.protocol.order import Ending
from offloop.bus.runs.directory import RunDirectory, check_path
from offloop.bus.types.timeouts import Timeouts
from offloop.bus.types.timestamp import Timestamp, wall_clock

_log = logging.getLogger("offloop.broker")

LIVE_BATCH = 80 * 1024
"""Bytes of a message on the event feed: with the length of its queues it bounds what slow consumers cost."""
NAMED_REFUSALS = 10
DUMP_SECONDS = 0.005
"""For which a flight recorder is written at a time."""
SUMMARIZE_EVERY = 0.05
SUMMARIZE_SECONDS = 0.005
LAST_SUMMARY_SECONDS = 0.2


class Broker:
    """Serves runs at two addresses: publishers and requests at ``control_endpoint``, events at ``event_feed``.

    Nothing that a peer sends stops it: what is malformed is counted and named in the log. Each event is recorded
    and sent out once, in the order in which it came. :meth:`serve` runs until :meth:`stop`, or, with ``until_over``,
    until the runs that came have ended. With ``security`` only keys that its list admits get in, each for what the
    list says. ``timeouts`` says how long it waits for peers. With ``bridge_to``, addresses of NATS servers, each run is
    copied there by a process of its own.

    Raises:
        BrokerError: the address cannot be listened at.
        ConfigurationError: the list of keys cannot be used, or the path of ``runs_dir`` is not UTF-8.
    """

    def __init__(
        self,
        control_endpoint: str,
        event_feed: str,
        runs_dir: Path,
        *,
        directory: RunDirectory | None = None,
        until_over: bool = False,
        security: ServerSecurity | None = None,
        clock: Callable[[], int] | None = None,
        timeouts: Timeouts | None = None,
        bridge_to: str | None = None,
    ) -> None:
        check_path(runs_dir)
        self._bridges = Bridges(bridge_to) if bridge_to else None
        self._timeouts = timeouts = timeouts or Timeouts.default
        self._until_over = until_over
        self._clock = clock or wall_clock()
        self._unnamed = 0
        self._heard = 0.0
        self._stopping = False
        self._ended_flights: list[FlightRecorder] = []
        allow_many_connections()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            gatekeeper = Gatekeeper(self._context, security) if security is not None else None
            self._control_socket = listen(self._context, zmq.ROUTER, control_endpoint, CONTROL, security, timeouts)
            self._feed_socket = listen(self._context, zmq.PUB, event_feed, STREAM, security, timeouts)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.control_endpoint = self._control_socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.event_feed = self._feed_socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._guard = ConnectionGuard(self.control_endpoint, self.event_feed)
        self._poller = zmq.Poller()
        self._poller.register(self._control_socket, zmq.POLLIN)
        self._admission: Admission | None = None
        if gatekeeper is not None:
            self._admission = Admission(gatekeeper, self._control_socket, self._feed_socket)
            for asked in self._admission.sockets:
                self._poller.register(asked, zmq.POLLIN)
        self._peers = Peers(self._control_socket, self._guard)
        self._runs = LiveRuns(
            runs_dir, directory, self.control_endpoint, self.event_feed, self._poller, self._peers, timeouts
        )
        self._control = ControlHandler(self._runs, self._peers, Archive(runs_dir, timeouts), timeouts)

    def stop(self) -> None:
        """Makes :meth:`serve` end soon; may be called from a signal handler."""
        self._stopping = True

    def statistics(self) -> BrokerStatistics:
        """How the broker is doing."""
        return self._runs.statistics()

    def resume(self) -> None:
        """Takes up the run of the directory that was given where the broker before this one left it.

        Raises:
            BrokerError: its newest attempt has ended, or there is none.
        """
        self._runs.resume_given()

    @property
    def live_runs(self) -> list[str]:
        """The names of the runs that are served now, or are about to begin."""
        return sorted(run.name for run in (*self._runs, *self._runs.announced()))

    def serve(self) -> list[str]:
        """Collects, records and fans out until stopped; then closes every recording in order. Returns the names of the
        runs that were live when it was stopped."""
        next_flush = next_heartbeat = next_summary = 0.0
        begun = time.monotonic()
        self._guard.start()
        try:
            while not self._stopping and not self._is_done(begun):
                is_writing = any(flight.is_writing for flight in self._flights())
                ready = dict(self._poller.poll(0 if is_writing else 50))
                if self._admission is not None:
                    self._admission.handle()
                has_time = self._control_socket not in ready or self._collect()
                now = time.monotonic()
                if self._control_socket in ready:
                    self._heard = now
                self._reap_dead_publishers(ready, now)
                if now >= next_flush or any(run.flush_soon for run in self._runs):
                    next_flush = now + self._timeouts.record
                    self._flush(now)
                if now >= next_heartbeat:
                    next_heartbeat = now + self._timeouts.heartbeat
                    self._send_heartbeats()
                    self._expire_unreachable_publishers(now)
                    self._runs.forget_disconnected()
                    self._look_after_bridges()
                    for run in self._runs:
                        run.flight.look(now)
                    self._sum_up_refusals()
                for flight in self._flights() if is_writing else ():
                    flight.work(time.monotonic() + DUMP_SECONDS)
                self._finish_flights()
                if has_time and now >= next_summary:
                    next_summary = now + SUMMARIZE_EVERY
                    for run in self._runs:
                        run.summarize(time.monotonic() + SUMMARIZE_SECONDS)
            return self.live_runs
        finally:
            self._close()

    def _is_done(self, begun: float) -> bool:
        if not self._until_over or len(self._runs) or self._ended_flights:
            return False
        return self._runs.served > 0 or time.monotonic() - begun > self._timeouts.first_run

    def _flights(self) -> list[FlightRecorder]:
        """Also those of runs that have ended."""
        return [*(run.flight for run in self._runs), *self._ended_flights]

    def _finish_flights(self) -> None:
        """Ends those of runs that have ended, and that have written everything."""
        if self._ended_flights:
            for flight in self._ended_flights:
                if not flight.is_writing:
                    flight.finish()
            self._ended_flights = [flight for flight in self._ended_flights if flight.is_writing]

    # -- collect -> record -> fan out ---------------------------------------------------------------------------------

    def _collect(self) -> bool:
        """Takes what has come; returns whether that was all."""
        receive = self._control_socket.recv
        gone: dict[bytes, bool] = {}
        until = time.monotonic() + self._timeouts.collect
        # Whatever comes in, what is due by the clock is done in between.
        while time.monotonic() < until:
            try:
                identity = receive(zmq.NOBLOCK)
            except zmq.Again:
                # Nothing waits that was dropped in vain.
                self._peers.forget_waste()
                return True
            # As a Frame it says itself whether more follow, which costs less than asking the socket.
            frame = self._control_socket.recv(zmq.NOBLOCK, copy=False)
            is_whole = not frame.more
            while frame.more:
                frame = self._control_socket.recv(zmq.NOBLOCK, copy=False)
            if self._is_ignored(identity):
                continue
            if self._guard.is_overrun:
                if identity not in gone:
                    gone[identity] = not self._peers.is_connected(identity)
                if gone[identity]:
                    continue
            if is_whole:
                self._take_message(identity, frame)
            else:
                self._refuse(identity, frame, "a message of several frames")
        return False

    def _is_ignored(self, identity: bytes) -> bool:
        """Whether what a connection sends is left unread: too much of it was dropped, or it is gone, and answers would
        not arrive."""
        peers = self._peers
        return peers.has_wasted_too_much(identity) or (
            peers.is_gone(identity) and self._runs.publisher(identity) is None
        )

    def _take_message(self, identity: bytes, message: zmq.Frame) -> None:
        request: dict[str, Any] = {}
        try:
            is_publisher = self._runs.publisher(identity) is not None or self._runs.is_announced(identity)
            if not is_publisher and self._is_for_publishers_only(identity, message):
                return
            frame = message.bytes
            if not frame.startswith(b"\0"):
                self._admit(message, FRAME_BATCH)
                self._take_events(identity, message, [frame])
                return
            events = _events_in(frame)
            if events is not None:
                self._admit(message, FRAME_BATCH)
                self._take_events(identity, message, events, frame)
                return
            control = decode_control(split_frame(frame)[1])
            request = {name: value for name, value in control.content.items() if name == "id" and type(value) is str}
            self._admit(message, control.kind)
            if control.kind != FRAME_BATCH:
                self._control.take(identity, self._peer(message), control)
                self._note_who_it_is(identity, message, control)
                return
            frames = control.content.get("frames")
        except ProtocolError as error:
            self._refuse(identity, message, str(error))
            return
        except ForbiddenError as error:
            self._refuse(identity, message, str(error))
            self._peers.send(identity, "refused", {"reason": str(error), "error": "BrokerError", **request})
            return
        if not isinstance(frames, list) or len(frames) > MAX_BATCH_FRAMES:
            self._refuse(identity, message, f"a batch that is not a list of at most {MAX_BATCH_FRAMES} events")
            return
        for event in frames:
            self._take_event(identity, message, event)

    def _take_events(
        self, identity: bytes, message: zmq.Frame, frames: list[bytes], batch: bytes | None = None
    ) -> None:
        """Takes the events of a message, ``batch`` if they came as one: together where they are in order."""
        left = frames
        while left:
            place = self._runs.publisher(identity)
            count = 0
            if place is not None:
                base_seq = place[1].base_seq
                count = place[0].take_in_order(place[1], left)
                if count:
                    whole = batch if count == len(frames) else None
                    self._send_live(*place, left[:count], place[1].base_seq - base_seq, whole)
            if count < len(left):
                self._take_event(identity, message, left[count])
            left = left[count + 1 :]

    def _send_live(
        self, run: BrokerRun, rank: LiveRank, frames: list[bytes], base: int, batch: bytes | None = None
    ) -> None:
        """Sends events on the event feed, of which ``base`` are base events."""
        # PUB never blocks: what a slow consumer cannot take is dropped for it, and it reads that part from the
        # recording.
        for name in (ALL, BASE) if base else (ALL,):
            topic = Topic(run.name, name, rank.rank).encode()
            if name == BASE and base < len(frames):
                # Later versions may have further base events; readers know which names they do not know.
                frames = [frame for frame in frames if BASE_STEPS.get(rank.names[frame.partition(b"\0")[0]], 1)]
                batch = None
            if batch is not None and len(batch) <= LIVE_BATCH:
                self._feed_socket.send(topic + batch[1:], zmq.NOBLOCK)
                continue
            for part in _parts(frames):
                self._feed_socket.send(topic + encode_frame_batch(part)[1:], zmq.NOBLOCK)

    def _is_for_publishers_only(self, identity: bytes, message: zmq.Frame) -> bool:
        """Whether a message from a peer that is not known as a publisher is left unread.

        Raises:
            ProtocolError: no peer may send such a message.
            ForbiddenError: its key may not publish.
        """
        front = bytes(message.buffer[: MAX_TOPIC + 1])
        is_control = front.startswith(b"\0")
        if is_control and not is_frame_batch(front):
            if len(message) > MAX_HELLO:
                reason = f"{len(message)} bytes from a connection that publishes no run: it may send {MAX_HELLO}"
                self._peers.send(identity, "refused", {"reason": reason, "error": "ProtocolError"})
                raise ProtocolError(reason)
            return False
        if not is_control:
            split_frame(front)
        self._admit(message, FRAME_BATCH)
        self._reject_unknown(identity, message)
        return True

    def _reject_unknown(self, identity: bytes, message: zmq.Frame) -> None:
        # Most likely of a broker before this one, and sent again once the peer has said who it is.
        if self._control.reject_unknown(identity):
            self._refuse(identity, message, "it has not said hello to this broker")
        else:
            self._runs.refused += 1
            self._peers.waste(identity, message)

    def _admit(self, message: zmq.Frame, kind: str) -> None:
        if self._admission is not None:
            self._admission.check(message, kind)

    def _peer(self, message: zmq.Frame) -> str:
        """Whose connection a message came by, as far as that is known."""
        return str(message.get("Peer-Address" if self._admission is None else "User-Id"))

    def _note_who_it_is(self, identity: bytes, message: zmq.Frame, control: Control) -> None:
        """Connections of publishers and consumers stay when descriptors are short."""
        if self._runs.publisher(identity) is not None or (
            control.kind == "lease" and self._runs.get(str(control.content.get("run"))) is not None
        ):
            self._peers.know(message)

    def _take_event(self, identity: bytes, message: zmq.Frame, frame: Any) -> None:
        place = self._runs.publisher(identity) or self._begin(identity, message)
        if place is None:
            return
        try:
            if not isinstance(frame, bytes) or frame.startswith(b"\0"):
                raise ProtocolError("a batch holds something else than frames of events")
            self._take(*place, frame)
        except ProtocolError as error:
            if self._refuse(identity, message, str(error)):
                self._peers.send(identity, "refused", {"reason": str(error)[:MAX_REASON], "error": "ProtocolError"})

    def _take(self, run: BrokerRun, rank: LiveRank, frame: bytes) -> None:
        base_seq = rank.base_seq
        placement = run.take(rank, frame)
        if placement is Placement.DUPLICATE:
            return
        if placement is Placement.EARLY or (rank.recorded < rank.seq and run.write_error is None):
            # Something was lost on the way, or in a broker before this one.
            self._runs.request_missing(rank)
        if placement is Placement.EARLY:
            return
        if len(frame) <= LIVE_FRAME:
            self._send_live(run, rank, [frame], int(rank.base_seq > base_seq))
        else:
            # Nor may queues for slow consumers fill the memory: what is large is read from the recording by all.
            run.flush_soon = True
        if rank.ended:
            self._runs.unwatch(rank)
            if rank.identity is not None:
                self._peers.send(rank.identity, "ended", {})
            if run.over:
                self._end_run(run)

    def _begin(self, identity: bytes, message: zmq.Frame) -> tuple[BrokerRun, LiveRank] | None:
        """Begins the run of a publisher that has said hello, with the first event."""
        try:
            place = self._runs.begin_announced(identity)
        except (OffloopError, OSError) as error:
            name = type(error).__name__ if isinstance(error, OffloopError) else "RunDirectoryError"
            self._peers.send(identity, "refused", {"reason": str(error), "error": name})
            return None
        if place is None:
            # Its run has ended in the same batch.
            self._reject_unknown(identity, message)
        else:
            self._peers.know(message)
        return place

    def _refuse(self, identity: bytes, message: zmq.Frame, why: str) -> bool:
        """Counts what is dropped; returns whether it is named in the log, too."""
        self._runs.refused += 1
        self._unnamed += 1
        self._peers.waste(identity, message)
        # A log that cannot be written as fast as a peer sends would delay all others.
        if self._unnamed > NAMED_REFUSALS:
            return False
        _log.warning("skipped a message from %s: %s", identity[:8].hex(), why)
        return True

    def _sum_up_refusals(self) -> None:
        if self._unnamed > NAMED_REFUSALS:
            _log.warning("skipped %d more messages", self._unnamed - NAMED_REFUSALS)
        self._unnamed = 0
        if self._admission is not None:
            self._admission.refresh()

    # -- what time brings ---------------------------------------------------------------------------------------------

    def _flush(self, now: float) -> None:
        self._control.tidy()
        for run in self._runs:
            was_well = run.write_error is None
            run.flush()
            if run.retry_write(now):
                self._send_all(run, "recovered", {})
                for rank in run.ranks.values():
                    self._runs.request_missing(rank)
            elif was_well and run.write_error is not None:
                self._send_all(run, "trouble", {"reason": run.write_error})
            self._acknowledge(run)
            self._control.push_demand(run)
            if run.is_abandoned(now):
                run.note_ending(Ending("lost", f"only {len(run.ranks)} of {run.local_world_size} ranks ever came"))
                self._end_run(run)
            elif run.over and now - (run.last_end or now) > self._timeouts.finished:
                # It had ended before a broker that did not come to write that down.
                self._end_run(run)

    def _send_all(self, run: BrokerRun, kind: str, content: dict[str, Any]) -> None:
        for identity in run.connections():
            self._peers.send(identity, kind, content)

    def _acknowledge(self, run: BrokerRun) -> None:
        for rank in run.ranks.values():
            number = rank.acknowledgement()
            if number is not None and rank.identity is not None:
                self._peers.send(rank.identity, "ack", {"seq": number})

    def _send_heartbeats(self) -> None:
        for run in self._runs:
            positions = {number: (rank.seq, rank.base_seq) for number, rank in run.ranks.items()}
            on_disk = {number: (place.seq, place.base_seq) for number, place in run.writer.positions.items()}
            heartbeat = encode_heartbeat(run.name, run.attempt, self._clock(), positions, run.writer.size, on_disk)
            self._feed_socket.send(heartbeat, zmq.NOBLOCK)

    def _reap_dead_publishers(self, ready: dict[Any, int], now: float) -> None:
        """Ends the streams of publishers whose processes died, once everything they sent is collected."""
        for run in self._runs:
            for rank in run.ranks.values():
                if rank.process in ready and rank.died is None:
                    rank.died = now
                if rank.is_dead(self._heard, now, self._timeouts):
                    self._end_as_lost(run, rank)

    def _expire_unreachable_publishers(self, now: float) -> None:
        """Ends the streams of publishers on other machines that have not been connected for a long time.

        ZeroMQ's own heartbeats show whether one is connected: a training that computes for an hour stays, and a
        process that was forked from a dead trainer keeps nothing alive."""
        for run in self._runs:
            for rank in run.ranks.values():
                if rank.ended or rank.process is not None:
                    continue
                is_connected = rank.identity is not None and self._peers.is_there(rank.identity)
                if rank.is_unreachable(is_connected, now, self._timeouts):
                    seconds = f"{self._timeouts.unreachable:g} s"
                    self._end_as_lost(run, rank, f"the trainer could not be reached for {seconds}")

    def _end_as_lost(self, run: BrokerRun, rank: LiveRank, error: str = "the trainer's process died") -> None:
        # Should it come back by the same connection, an acknowledgement of this end would be one of its next event.
        self._runs.forget_connection(rank)
        rank.identity = None
        fields = {"status": "lost", "error": error}
        encode = event_encoder(Topic(run.name, END, rank.rank), run.attempt)
        now = max(self._clock(), rank.time)
        numbers = rank.seq + 1, rank.base_seq + 1, now
        self._take(run, rank, encode(*numbers, Timestamp().values, None, fields, run.end_context))

    def _look_after_bridges(self) -> None:
        if self._bridges is None:
            return
        live = {run.directory.path: run for run in self._runs}
        attempts = {path: run.attempt for path, run in live.items()}
        self._bridges.look(attempts)
        for path, text in self._bridges.report(attempts).items():
            self._send_all(live[path], "notice", {"text": text})

    def _end_run(self, run: BrokerRun) -> None:
        # Also of a run that was over before the first heartbeat.
        self._look_after_bridges()
        was_well = run.write_error is None
        unwritten = self._runs.end(run)
        self._control.end(run)
        if unwritten is not None:
            # Where the directory cannot be written, our log most likely cannot either.
            self._send_all(run, "notice", {"text": unwritten})
        if was_well and run.write_error is not None:
            self._send_all(run, "trouble", {"reason": run.write_error})
        # The last acknowledgement comes last: a publisher that has it finds the run ended, on disk too.
        self._acknowledge(run)
        # Its dumps are written beside everything else.
        self._ended_flights.append(run.flight)
        run.summarize(time.monotonic() + LAST_SUMMARY_SECONDS, is_over=True)
        add_run(run.directory.path, LAST_SUMMARY_SECONDS)

    def _close(self) -> None:
        for run in self._runs:
            run.note_ending(Ending("lost", "the broker was stopped"))
            self._end_run(run)
        for flight in self._ended_flights:
            flight.finish()
        self._guard.close()
        if self._bridges is not None:
            self._bridges.leave()
        self._runs.close()
        self._control.close()
        if self._admission is not None:
            self._admission.close()
        self._context.destroy()


def _events_in(message: bytes) -> list[bytes] | None:
    """The events of a batch that holds nothing else."""
    if is_frame_batch(message):
        with contextlib.suppress(ProtocolError):
            return decode_frame_batch(message[1:])
    return None


def _parts(frames: list[bytes]) -> Iterator[list[bytes]]:
    """The frames in parts that may be messages on the event feed."""
    part: list[bytes] = []
    size = 0
    for frame in frames:
        if size + len(frame) > LIVE_BATCH - LIVE_FRAME and part:
            yield part
            part, size = [], 0
        part.append(frame)
        size += len(frame)
    yield part
