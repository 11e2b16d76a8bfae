"""The receiving end: a run's whole history and then what happens live, as one sequence of snapshots."""

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import zmq

from bus.demand import BASE_EVENTS, RENEW_SECONDS
from bus.errors import ClosedError, ProtocolError
from bus.event import Event
from bus.journal import JournalReader, Record
from bus.runs import RunInfo, find_run, read_run
from bus.snapshot import Snapshot
from bus.stream import Ending, Gap, Missing, StreamOrder
from bus.wire import BEAT, MAX_FRAME, decode_body, encode_control, split_frame

__all__ = ["Subscriber"]

STREAM_QUEUE = 20_000
BURST = 1000
DISK_SECONDS = 0.02
LIVE_CHECK_SECONDS = 0.5
GIVE_UP_SECONDS = 5.0


class Subscriber:
    """The events of a run from its first to its last, whenever one subscribes: iterate, with ``for`` or ``async
    for``, over snapshots.

    History is read from the recording, what follows comes from the broker's stream; where that misses something, it
    is read from the recording again, so every wanted event comes once and in order. The iteration ends when the run
    has ended, and :attr:`ending` says how.

    ``run`` is a run's name or directory; ``events`` are those to receive, all by default. Events beyond the base set
    are published from the moment a subscriber asks for them by name. ``name`` tells the broker who asks. ``after`` is
    where to go on: of each rank ``(seq, base_seq)`` of the last snapshot that need not come again.

    Raises:
        RunNotFoundError: there is no such run.
        RecordingError: its recording cannot be read.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        runs_dir: str | os.PathLike[str] | None = None,
        events: Iterable[Event] | None = None,
        name: str | None = None,
        after: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        info = find_run(run, runs_dir)
        self.run_name = info.name
        self.run_dir = info.path
        self.attempt = info.last.number
        self.recording = info.recording
        self.ending: Ending | None = None
        """How the run ended; ``None`` until then."""
        self._order = StreamOrder(info.name, self.attempt, events, after)
        self._reader = JournalReader(info.recording)
        self._chunks = self._reader.read()
        self._ready: deque[Snapshot] = deque()
        self._missing: Missing | None = None
        self._catching_up = True
        self._closed = False
        self._link = _StreamLink(info, self._order, name) if info.live else None
        self._next_live_check = self._give_up_at = 0.0

    @property
    def live(self) -> bool:
        """Whether it is connected to the run's broker; a subscriber that is not reads the recording alone."""
        return self._link is not None

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """The events that nobody has: published, but neither received nor recorded."""
        return tuple(self._order.gaps)

    @property
    def damage(self) -> str | None:
        """What of the recording could not be read, with its offset."""
        cut = [self._reader.cut] if self._reader.cut and self._link is None else []
        return "; ".join([*self._reader.damage, *cut]) or None

    # -- iterating ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Snapshot]:
        while True:
            while self._ready:
                yield self._ready.popleft()
            pause = self._advance()
            if pause is None:
                return
            if pause and self._link is not None:
                self._link.wait(pause, for_frames=not self._catching_up)

    async def __aiter__(self) -> AsyncIterator[Snapshot]:
        while True:
            while self._ready:
                yield self._ready.popleft()
            pause = self._advance()
            if pause is None:
                return
            if pause and self._link is not None:
                await self._link.wait_async(pause, for_frames=not self._catching_up)
            else:
                # A long history must not keep other tasks of the loop from running.
                await asyncio.sleep(0)

    def _advance(self) -> float | None:
        """Takes one step: from the recording while something is missing, else from the live stream. Returns how long
        to wait before the next one, in seconds, or ``None`` when the run has ended and everything has been given."""
        if self._closed:
            raise ClosedError(f"the subscriber of run {self.run_name!r} is closed")
        if self.ending is not None:
            return None
        pause = self._read_recording() if self._catching_up else self._receive()
        if self.ending is None:
            self.ending = self._order.ending
        return pause if self.ending is None or not self._ready else 0.0

    def _read_recording(self) -> float:
        records = next(self._chunks, None)
        if records is not None:
            self._take_records(records)
            return 0.0
        self._chunks = self._reader.read()
        if self._missing is not None and not self._order.has(self._missing) and self._link is not None:
            return self._await_missing(self._missing)
        self._missing = None
        if self._link is None:
            self._end_of_recording()
        else:
            self._catching_up = False
        return 0.0

    def _await_missing(self, missing: Missing) -> float:
        """What is missing is on its way to the disk: the broker flushes several times a second."""
        if not self._is_live():
            return 0.0  # the broker wrote its last between our look at the file and now
        if time.monotonic() < self._give_up_at:
            return DISK_SECONDS
        # The broker lives, but its disk does not take the record: better to go on with a named gap than to stand still.
        self._order.give_up(missing)
        return 0.0

    def _take_records(self, records: list[Record]) -> None:
        from_record = self._order.from_record
        for record in records:
            snapshot = from_record(record.topic, record.body)
            if snapshot is not None:
                self._ready.append(snapshot)

    def _end_of_recording(self) -> None:
        if self._order.ending is None:
            self.ending = Ending("lost", "the broker ended before the run did")

    def _receive(self) -> float:
        assert self._link is not None  # without a stream there is only the recording
        for _ in range(BURST):
            frame = self._link.receive()
            if frame is None:
                break
            self._take_frame(frame)
            if self._catching_up or self._order.ending is not None:
                return 0.0
        if self._ready:
            return 0.0
        if not self._is_live():
            self._catching_up = True
            return 0.0
        return LIVE_CHECK_SECONDS

    def _take_frame(self, frame: bytes) -> None:
        try:
            topic, body = split_frame(frame)
        except ProtocolError:
            self._order.skipped += 1
            return
        if topic is None:
            return
        if topic.name == BEAT:
            self._compare(body)
            return
        result = self._order.from_live(f"{topic.run}/{topic.name}/{topic.rank}", body)
        if isinstance(result, Snapshot):
            self._ready.append(result)
        elif result is not None:
            self._fall_back(result)

    def _compare(self, body: bytes) -> None:
        try:
            _, attempt, _, positions = decode_body(body)[:4]
            missing = self._order.behind(positions) if attempt == self.attempt else None
        except (ProtocolError, ValueError, TypeError, AttributeError):
            self._order.skipped += 1
            return
        if missing is not None:
            self._fall_back(missing)

    def _fall_back(self, missing: Missing) -> None:
        self._missing = missing
        self._give_up_at = time.monotonic() + GIVE_UP_SECONDS
        self._catching_up = True

    def _is_live(self) -> bool:
        """Whether the broker of our attempt still serves the run; when it does not, only the recording is left."""
        now = time.monotonic()
        if self._link is not None and now >= self._next_live_check:
            self._next_live_check = now + LIVE_CHECK_SECONDS
            run = read_run(self.run_dir)
            if not run.live or run.last.number != self.attempt:
                self._link.close()
                self._link = None
        return self._link is not None

    def close(self) -> None:
        """Ends the subscription. Can be called more than once."""
        self._closed = True
        self._reader.close()
        if self._link is not None:
            self._link.close()
            self._link = None

    def __del__(self) -> None:
        # One whose constructor failed has nothing to close.
        if not getattr(self, "_closed", True):
            self.close()

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _StreamLink:
    """The connection to a broker's stream, and to its door when events beyond the base set are wanted."""

    def __init__(self, run: RunInfo, order: StreamOrder, name: str | None) -> None:
        assert run.stream is not None  # asked by the caller
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, STREAM_QUEUE)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        for topic in order.topics:
            self._socket.subscribe(topic)
        self._socket.connect(run.stream)
        self._lease: _Lease | None = None
        if run.door and order.events is not None and order.events - BASE_EVENTS:
            self._lease = _Lease(self._context, run, order.events, name)
        _open_links.add(self)

    def receive(self) -> bytes | None:
        """The next frame, if there is one now."""
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def wait(self, seconds: float, *, for_frames: bool) -> None:
        """Waits so long, or until a frame is there."""
        if for_frames:
            self._socket.poll(int(seconds * 1000))
        else:
            time.sleep(seconds)

    async def wait_async(self, seconds: float, *, for_frames: bool) -> None:
        """As :meth:`wait`, while the event loop goes on."""
        if not for_frames:
            await asyncio.sleep(seconds)
            return
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        descriptor = int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(descriptor, readable.set)
        try:
            # The descriptor tells only of changes, so what is there already has to be asked for.
            if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                await asyncio.wait_for(readable.wait(), seconds)
        except TimeoutError:
            return
        finally:
            loop.remove_reader(descriptor)

    def close(self) -> None:
        """Ends the connection."""
        _open_links.discard(self)
        if self._lease is not None:
            self._lease.stop()
        self._context.destroy(linger=0)


# See bus.link: a context that the garbage collector finds in a cycle waits for its sockets for ever.
_open_links: set[_StreamLink] = set()


class _Lease:
    """Tells the broker once a second what is wanted, on a thread of its own: a slow callback must not let the lease
    run out."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", run: RunInfo, events: frozenset[Event], name: str | None
    ) -> None:
        wanted: dict[str, Any] = {"run": run.name, "name": name, "events": sorted(event.value for event in events)}
        self._message = encode_control("want", wanted)
        self._socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(run.door or "")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="offloop-lease", daemon=True)
        self._thread.start()

    def _renew(self) -> None:
        while True:
            try:
                self._socket.send(self._message, zmq.NOBLOCK)
                while self._socket.poll(0):
                    self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                pass  # the broker does not read now: the next renewal says the same
            if self._stop.wait(RENEW_SECONDS):
                return

    def stop(self) -> None:
        """Ends the renewals; the lease runs out by itself."""
        self._stop.set()
        self._thread.join()
        self._socket.close()
