"""The broker: receives events from publishers, records them, and forwards them to consumers."""

import logging
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import zmq

from offloop.bus.broker.companions import BridgeProcess, HealthProcess
from offloop.bus.broker.control import MAX_REASON, ControlHandler
from offloop.bus.broker.flight import FlightRecorder
from offloop.bus.broker.rank import LiveRank, Placement
from offloop.bus.broker.run import LIVE_FRAME, BrokerRun, BrokerStatistics
from offloop.bus.errors import ProtocolError, RunDirectoryError
from offloop.bus.index.index import add_run
from offloop.bus.net.sockets import listen
from offloop.bus.processes import allow_many_connections, is_running
from offloop.bus.protocol import frames
from offloop.bus.protocol.frames import ALL, BASE, Topic, decode_frame_batch, encode_frame_batch, split_frame
from offloop.bus.protocol.order import Ending, base_step
from offloop.bus.runs.directory import SOCKET_FILES
from offloop.bus.runs.writing import RunDirectory, socket_address
from offloop.bus.types.health import HEALTH
from offloop.bus.types.timestamp import Timestamp, wall_clock

_log = logging.getLogger("offloop.broker")

LIVE_BATCH = 80 * 1024
"""Size of a message on the event feed. With the length of its queues it bounds the memory for slow consumers."""
COLLECT_SECONDS = 0.02  # longest time for receiving before other work
RECORD_EVERY = 0.2  # seconds between two flushes and acknowledgements
HEARTBEAT_EVERY = 0.5
NAMED_REFUSALS = 10  # between two heartbeats; further ones are counted only
CONSOLE_EVERY = 0.05
CONSOLE_SECONDS = 0.01
SUMMARIZE_EVERY = 0.05
SUMMARIZE_SECONDS = 0.005
LAST_SUMMARY_SECONDS = 0.2
FIRST_RUN_SECONDS = 30.0  # how long to wait for the first publisher
ACTOR_SECONDS = 5.0  # how long a run whose ranks have finished waits for the last events of its actors
FINISHED_SECONDS = 2.0  # how long a resumed run that has finished waits for its publishers


class Broker:
    """Serves one run until it has finished: a control endpoint and an event feed at sockets in its ``directory``.

    No message can stop it: malformed ones are counted and logged. Each event is recorded and forwarded once, as it
    arrives. With ``bridge_to``, addresses of NATS servers, another process copies the run there."""

    def __init__(self, directory: RunDirectory, *, bridge_to: str | None = None) -> None:
        self.directory = directory
        self.run: BrokerRun | None = None  # the run while it is live
        self.has_ended: bool = False
        self.statistics: BrokerStatistics = BrokerStatistics()
        self.publishers: dict[bytes, LiveRank] = {}  # ranks by the connections of their publishers
        self._bridge = BridgeProcess(directory.path, bridge_to) if bridge_to else None
        self._health = HealthProcess(directory.path)
        self._clock = wall_clock()
        self._heard = 0.0
        self._stopping = False
        self._named = 0
        self._flight: FlightRecorder | None = None
        # Of the control endpoint and the event feed.
        self.addresses: tuple[str, str] = (
            socket_address(directory.path / SOCKET_FILES[0]),
            socket_address(directory.path / SOCKET_FILES[1]),
        )
        allow_many_connections()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._control_socket = listen(self._context, zmq.ROUTER, self.addresses[0])
            self._feed_socket = listen(self._context, zmq.PUB, self.addresses[1])
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._control = ControlHandler(self)

    def stop(self) -> None:
        """Make :meth:`serve` return soon; safe in a signal handler."""
        self._stopping = True

    def resume(self) -> None:
        """Resume the newest attempt of the run. Raise BrokerError if it has ended or does not exist."""
        self.run = BrokerRun.resume(self.directory, self.addresses, self.statistics)

    def serve(self) -> None:
        next_flush = next_heartbeat = next_console = next_summary = 0.0
        begun = time.monotonic()
        try:
            while not self._stopping and not self._is_done(begun):
                has_messages = bool(self._control_socket.poll(50))
                has_time = not has_messages or self._collect()
                now = time.monotonic()
                if has_messages:
                    self._heard = now
                if self.run is not None and (now >= next_flush or self.run.flush_soon):
                    next_flush = now + RECORD_EVERY
                    self._flush(self.run, now)
                if now >= next_heartbeat:
                    next_heartbeat = now + HEARTBEAT_EVERY
                    self._named = 0
                    if self.run is not None:
                        self._send_heartbeat(self.run)
                        self._look_at_publishers(self.run, now)
                        self._tend_bridge(self.run)
                        self._health.tend(HEALTH in self.run.reported[0].events and not self.run.over)
                if now >= next_console and self.run is not None:
                    self.run.console.read(CONSOLE_SECONDS)
                    next_console = time.monotonic() + CONSOLE_EVERY
                if flight := self._flight if self.run is None else self.run.flight:
                    flight.report()
                if has_time and now >= next_summary and self.run is not None:
                    began = time.thread_time()
                    self.run.summarize(time.monotonic() + SUMMARIZE_SECONDS)
                    # An event of very many values takes longer, and is followed by a longer rest.
                    took = time.thread_time() - began
                    next_summary = now + SUMMARIZE_EVERY * max(1.0, took / SUMMARIZE_SECONDS)
        finally:
            self._close()

    def _is_done(self, begun: float) -> bool:
        if self.has_ended:
            # Wait until the flight recorder's dumps are complete.
            return self._flight is None or not self._flight.is_writing
        return self.run is None and time.monotonic() - begun > FIRST_RUN_SECONDS

    def send(self, identity: bytes, kind: str, content: dict[str, Any]) -> bool:
        """Send a control message, or drop it if the peer does not read; return whether the peer is connected."""
        try:
            self._control_socket.send_multipart([identity, frames.encode_control(kind, content)], zmq.NOBLOCK)
        except zmq.Again:
            return True
        except zmq.ZMQError:
            return False
        return True

    def publisher(self, identity: bytes) -> tuple[BrokerRun, LiveRank] | None:
        rank = self.publishers.get(identity)
        return None if rank is None or self.run is None else (self.run, rank)

    def request_missing(self, rank: LiveRank) -> None:
        if rank.identity is not None and rank.should_request(time.monotonic()):
            self.statistics.asked_again += 1
            self.send(rank.identity, "retransmit", {"after": rank.retransmit_after})

    def forget_connection(self, rank: LiveRank) -> None:
        """Ignore further messages from a rank's connection: it has ended, or was replaced."""
        rank.died = None
        rank.names.clear()
        if rank.identity is not None:
            self.publishers.pop(rank.identity, None)

    def _collect(self) -> bool:
        """Handle received messages; return whether the socket is empty."""
        receive = self._control_socket.recv
        until = time.monotonic() + COLLECT_SECONDS
        while time.monotonic() < until:
            try:
                identity = receive(zmq.NOBLOCK)
            except zmq.Again:
                return True
            # A Frame carries the flag for further frames, which is cheaper than asking the socket.
            frame = self._control_socket.recv(zmq.NOBLOCK, copy=False)
            is_whole = not frame.more
            while frame.more:
                frame = self._control_socket.recv(zmq.NOBLOCK, copy=False)
            try:
                if not is_whole:
                    raise ProtocolError("a message of several frames")
                message = frame.bytes
                if not message.startswith(b"\0"):
                    self._take_events(identity, [message])
                elif frames.is_frame_batch(message):
                    self._take_events(identity, decode_frame_batch(message[1:]), message)
                else:
                    self._control.take(identity, frames.decode_control(split_frame(message)[1]))
            except ProtocolError as error:
                self._is_named(identity, error)
        return False

    def _take_events(self, identity: bytes, frames: list[bytes], batch: bytes | None = None) -> None:
        """Record and forward events, consecutive ones together. ``batch`` is their message if they came as one."""
        left = frames
        while left:
            place = self.publisher(identity)
            if place is None:
                # Probably for the previous broker. The publisher sends it again after its hello.
                split_frame(left[0])
                self.statistics.refused += 1
                self.send(identity, "unknown", {})
                return
            run, rank = place
            base_seq = rank.base_seq
            count = run.take_in_order(rank, left)
            if count:
                whole = batch if count == len(frames) else None
                self._send_live(run, rank, left[:count], rank.base_seq - base_seq, whole)
            if count < len(left):
                try:
                    self._take(run, rank, left[count])
                except ProtocolError as error:
                    if self._is_named(identity, error):
                        self.send(identity, "refused", {"reason": str(error)[:MAX_REASON], "error": "ProtocolError"})
            left = left[count + 1 :]

    def _is_named(self, identity: bytes, error: ProtocolError) -> bool:
        """Count and log a dropped message; return whether it was logged. A repeated mistake is logged a few times."""
        self.statistics.refused += 1
        self._named += 1
        if self._named > NAMED_REFUSALS:
            return False
        _log.warning("skipped a message from %s: %s", identity[:8].hex(), error)
        return True

    def _send_live(
        self, run: BrokerRun, rank: LiveRank, frames: list[bytes], base: int, batch: bytes | None = None
    ) -> None:
        # PUB never blocks. It drops messages for slow consumers, which read these events from the recording.
        for name in (ALL, BASE) if base else (ALL,):
            topic = Topic(run.name, name, rank.rank).encode()
            if name == BASE and base < len(frames):
                frames = [frame for frame in frames if base_step(rank.names[frame.partition(b"\0")[0]]) != 0]
                batch = None
            if batch is not None and len(batch) <= LIVE_BATCH:
                self._feed_socket.send(topic + batch[1:], zmq.NOBLOCK)
                continue
            for part in _parts(frames):
                self._feed_socket.send(topic + encode_frame_batch(part)[1:], zmq.NOBLOCK)

    def _take(self, run: BrokerRun, rank: LiveRank, frame: bytes) -> None:
        base_seq = rank.base_seq
        placement = run.take(rank, frame)
        if placement is Placement.DUPLICATE:
            return
        if placement is Placement.EARLY or (rank.recorded < rank.seq and run.write_error is None):
            # Events got lost on the way, or in the previous broker.
            self.request_missing(rank)
        if placement is Placement.EARLY:
            return
        if len(frame) <= LIVE_FRAME:
            self._send_live(run, rank, [frame], int(rank.base_seq > base_seq))
        else:
            # Large events would fill the queues of slow consumers: every consumer reads them from the recording.
            run.flush_soon = True
        if rank.ended:
            if rank.identity is not None:
                self.send(rank.identity, "ended", {})
            if run.over and not run.has_actors:
                self._end_run(run)
            elif run.over:
                self._tell_actors(run, is_final=False)

    def _flush(self, run: BrokerRun, now: float) -> None:
        was_well = run.write_error is None
        run.flush()
        if run.retry_write(now):
            self._send_all(run, "recovered", {})
            for rank in run.ranks.values():
                self.request_missing(rank)
        elif was_well and run.write_error is not None:
            self._send_all(run, "trouble", {"reason": run.write_error})
        self._acknowledge(run)
        self._control.push_demand(run)
        if run.is_abandoned(now):
            run.note_ending(Ending("lost", f"only {len(run.trainers)} of {run.local_world_size} ranks ever joined"))
            self._end_run(run)
        elif run.over and now - (run.last_end or now) > (ACTOR_SECONDS if run.has_actors else FINISHED_SECONDS):
            # Without actors it had finished before; its broker died before it recorded that.
            self._end_run(run)

    def _send_all(self, run: BrokerRun, kind: str, content: dict[str, Any]) -> None:
        for identity, _ in run.connected():
            self.send(identity, kind, content)

    def _tell_actors(self, run: BrokerRun, *, is_final: bool) -> None:
        for identity, rank in run.publishers():
            if rank.actor is not None:
                self.send(identity, "training_ended", {"is_final": is_final})

    def _acknowledge(self, run: BrokerRun) -> None:
        reached = run.training_time
        for identity, rank in run.connected():
            number = rank.acknowledgement()
            if rank.actor is not None and reached != rank.reached:
                rank.reached = reached
                self.send(identity, "ack", {"seq": rank.acknowledged, "timestamp": reached})
            elif number is not None:
                self.send(identity, "ack", {"seq": number})

    def _send_heartbeat(self, run: BrokerRun) -> None:
        positions = {number: (rank.seq, rank.base_seq) for number, rank in run.ranks.items()}
        on_disk = {number: (place.seq, place.base_seq) for number, place in run.writer.positions.items()}
        heartbeat = frames.encode_heartbeat(run.name, run.attempt, self._clock(), positions, run.writer.size, on_disk)
        self._feed_socket.send(heartbeat, zmq.NOBLOCK)

    def _look_at_publishers(self, run: BrokerRun, now: float) -> None:
        """Look for stalled ranks, and end the streams of dead ones once all their messages were received."""
        run.flight.look(now)
        for rank in run.ranks.values():
            if rank.ended:
                continue
            if rank.pid is not None:
                is_there = is_running(rank.pid, rank.started)
            else:
                is_there = rank.identity is not None and self.send(rank.identity, "beat", {})
            rank.note_presence(is_there, now)
            if rank.is_dead(self._heard, now):
                who = "trainer" if rank.actor is None else rank.actor.name
                why = f"the {who} could not be reached" if rank.pid is None else f"the {who}'s process died"
                self._end_as_lost(run, rank, why)

    def _end_as_lost(self, run: BrokerRun, rank: LiveRank, error: str) -> None:
        # If it reconnected, the acknowledgement of this end would look like one of its next event.
        self.forget_connection(rank)
        rank.identity = None
        encode = frames.event_encoder(Topic(run.name, frames.END, rank.rank), run.attempt)
        numbers = rank.seq + 1, rank.base_seq + 1, max(self._clock(), rank.time)
        fields, context = {"status": "lost", "error": error}, frames.mark_context(run.world_size, run.local_world_size)
        self._take(run, rank, encode(*numbers, Timestamp().values, None, fields, context))

    def _tend_bridge(self, run: BrokerRun) -> None:
        if self._bridge is not None:
            self._bridge.tend()
            if text := self._bridge.report():
                # One rank of a host is enough: they print to one terminal.
                for identity, _ in islice(run.connected(), 1):
                    self.send(identity, "notice", {"text": text})

    def _end_run(self, run: BrokerRun) -> None:
        """Close the recording, record the run's status, and release its directory."""
        # The run may have ended before the first heartbeat.
        self._tend_bridge(run)
        run.console.finish()
        was_well = run.write_error is None
        run.close_recording()
        try:
            run.directory.end_attempt(run.ending, run.incomplete, run.reached, gaps=run.gaps)
        except RunDirectoryError as error:
            unwritten = f"it is {run.ending.status}, but run.json cannot be written: {error}"
            _log.error("run %s: %s", run.name, unwritten)
            # If the directory cannot be written, our log probably cannot either.
            self._send_all(run, "notice", {"text": unwritten})
        run.directory.release()
        self._tell_actors(run, is_final=True)
        for rank in run.ranks.values():
            self.forget_connection(rank)
        self.run, self.has_ended = None, True
        self._control.end()
        if was_well and run.write_error is not None:
            self._send_all(run, "trouble", {"reason": run.write_error})
        # The last acknowledgement comes last: a publisher that receives it finds the ended run on disk.
        self._acknowledge(run)
        # Dumps are still being written in another thread.
        self._flight = run.flight
        run.summarize(time.monotonic() + LAST_SUMMARY_SECONDS, is_over=True)
        add_run(run.directory.path, LAST_SUMMARY_SECONDS)

    def _close(self) -> None:
        run = self.run
        if run is not None:
            run.note_ending(Ending("lost", "the broker was stopped"))
            self._end_run(run)
        if self._flight is not None:
            self._flight.finish()
        if self._bridge is not None:
            self._bridge.leave()
        self._health.leave()
        # Needed if no run came; otherwise it is released already.
        self.directory.release()
        self._context.destroy()


def _parts(frames: list[bytes]) -> Iterator[list[bytes]]:
    part: list[bytes] = []
    size = 0
    for frame in frames:
        if size + len(frame) > LIVE_BATCH - LIVE_FRAME and part:
            yield part
            part, size = [], 0
        part.append(frame)
        size += len(frame)
    yield part
