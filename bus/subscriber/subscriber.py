"""The receiving end: a run's whole history and then what happens live, as one sequence of snapshots."""

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from bus.errors import ClosedError, ConfigurationError, FieldNotAvailableError, ProtocolError
from bus.net.curve import ClientSecurity, client_security_for
from bus.net.requests import RequestClient
from bus.protocol.frames import HEARTBEAT, decode_body, decode_positions, split_frame
from bus.protocol.order import CheckpointMark, DemandActive, Ending, Gap, Missing, StreamOrder
from bus.protocol.snapshot import Snapshot
from bus.recording.reader import Record
from bus.runs.directory import find_run
from bus.subscriber.commands import PendingCommands, send_command_through
from bus.subscriber.source import LocalRun, RemoteRun, RunSource, RunStatus
from bus.subscriber.subscription import LiveSubscription
from bus.tensors.transfer import fetch_segment
from bus.types.commands import Argument, Command, Outcome, check_command, new_command_id
from bus.types.demand import Demand
from bus.types.event import Event

BURST = 1000
DISK_SECONDS = 0.02
AWAY_SECONDS = 0.1
FETCH_SECONDS = 0.05
LIVE_CHECK_SECONDS = 0.5
GIVE_UP_SECONDS = 5.0
SILENCE_SECONDS = 5.0
ANSWERED_SECONDS = 10.0


@dataclass(frozen=True)
class SubscriberStatistics:
    """How a subscriber is doing; counts since it began."""

    given: int
    """Snapshots handed on."""
    lag: int
    """Events that the broker has, by its last sign of life, and that were not handed on."""
    lag_high: int
    """The largest lag so far."""
    fallbacks: int
    """How often the live stream missed something that was then read from the recording."""
    reconnects: int
    """How often a broker was lost and came back."""
    missing: int
    """Events that nobody has: gaps."""
    skipped: int
    """Messages that made no sense or are of a newer version."""
    last_seq: int
    """``seq`` of the last snapshot handed on."""


class Subscriber:
    """The events of a run from its first to its last, whenever one subscribes: iterate, with ``for`` or ``async
    for``, over snapshots.

    History is read from the recording, what follows comes from the broker's stream; where that misses something, it
    is read from the recording again, so every wanted event comes once and in order. A broker that dies is waited for
    as long as its trainer lives. The iteration ends when the run has ended, and :attr:`ending` says how.

    Use it as a context manager, with ``with`` or ``async with``. A task that is cancelled or runs out of time while it
    iterates loses nothing: the next iteration goes on after the last snapshot that was handed on.

    ``run`` is a run's name or directory; ``events`` are those to receive, all by default. Events beyond the base set,
    and fields beyond the usual ones, are published from the moment a subscriber asks for them: by name in ``events``,
    or, more exactly, in ``demand``; :meth:`in_effect` says from where on they are there. ``name`` tells the broker who
    asks. ``decides`` are the events at which whoever iterates may decide to stop the training: a trainer that was told
    to, waits there until the next snapshot is asked for. ``after`` is where to go on: of each rank ``(seq, base_seq)``
    of the last snapshot that need not come again.

    With ``broker``, an address such as ``tcp://10.0.0.1:5570``, everything comes through that broker, the recording
    too; ``security`` holds the keys for it.

    Raises:
        RunNotFoundError: there is no such run.
        RecordingError: its recording cannot be read.
        BrokerError: no broker answers at that address.
        ConfigurationError: ``decides`` has an event that is not among ``events``.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | None = None,
        *,
        runs_dir: str | os.PathLike[str] | None = None,
        events: Iterable[Event] | None = None,
        demand: Demand | None = None,
        name: str | None = None,
        decides: Iterable[Event | str] = (),
        after: Mapping[int, tuple[int, int]] | None = None,
        broker: str | None = None,
        security: ClientSecurity | None = None,
    ) -> None:
        self._name = name
        self._decides = frozenset(Event(event) for event in decides)
        if events is not None:
            events = frozenset(events)
            if unhandled := sorted(event.value for event in self._decides - events):
                raise ConfigurationError(
                    f"decides has {', '.join(unhandled)}, which is not among the events that are asked for: a training "
                    "that waits there would wait in vain"
                )
        self._source: RunSource
        if security is None and broker is not None:
            security = client_security_for(broker)
        if broker is not None:
            self._source = RemoteRun(broker, None if run is None else str(run), security)
        else:
            self._source = LocalRun(find_run("" if run is None else run, runs_dir))
        self.run_name = self._source.run_name
        self.run_id = self._source.run_id
        """The run's identity: see :attr:`bus.runs.RunInfo.id`."""
        self.run_dir = self._source.run_dir
        """The run's directory; ``None`` for a run on another machine."""
        self.attempt = self._source.attempt
        self.recording = self._source.recording
        """The recording that it reads; ``None`` for a run on another machine."""
        self.name_sender: Callable[[], str | None] = lambda: None
        """Who sends a command through a snapshot, where it gives no reason: asked within that call."""
        self.on_checkpoint: Callable[[CheckpointMark], object] = lambda mark: None
        """Called where the training has saved or loaded a checkpoint, between the snapshots before and after that."""
        self.ending: Ending | None = None
        """How the run ended; ``None`` until then."""
        self._demand = Demand.of(events or ()) if demand is None else demand
        self._order = StreamOrder(self.run_name, self.attempt, events, after, self._demand)
        # Somebody may wait for what is handled, or lend memory until then.
        self._reports_handled = bool(self._decides) or bool(self._demand.fields)
        # Somebody does: it is said at once, and not with the next renewal.
        self._is_awaited = False
        self._handled: dict[int, int] = {rank: seq for rank, (seq, _) in (after or {}).items()}
        self._commands = PendingCommands()
        self._given_security = security
        self._reader = self._source.reader
        self._chunks = self._reader.read()
        self._ready: deque[Snapshot | CheckpointMark] = deque()
        self._missing: Missing | None = None
        self._catching_up = True
        self._over = False
        self._closed = False
        self._subscription: LiveSubscription | None = None
        self._give_up_at = 0.0
        self._heard = time.monotonic()
        self._given = self._fallbacks = self._reconnects = self._lag = self._lag_high = self._last_seq = 0
        # The stream first, then the history: what comes in between is in both.
        if self._source.look() is RunStatus.LIVE:
            self._connect()

    def _connect(self) -> None:
        endpoints = self._source.endpoints
        assert endpoints is not None  # it is live
        self._heard = time.monotonic()
        # A run whose directory is here may all the same be served by a broker that takes keys.
        security = self._given_security or client_security_for(endpoints.control)
        hear = self._commands.hear
        self._subscription = LiveSubscription(
            endpoints.stream, endpoints.control, self._order, self._wanted, self._report, hear, security
        )
        self._commands.send_again(self._subscription)

    @property
    def _wanted(self) -> dict[str, Any]:
        return {
            "name": self._name,
            "demand": self._demand.to_wire(),
            "decides": sorted(event.value for event in self._decides),
        }

    def ask_for(self, demand: Demand, decides: Iterable[Event] = ()) -> None:
        """Asks the training for less than before: ``demand`` and ``decides`` take the place of those that it was made
        with. The events that it gives stay the same."""
        self._demand, self._decides = demand, frozenset(decides)
        if self._subscription is not None:
            self._subscription.update_demand(self._wanted)

    def _report(self) -> dict[str, Any]:
        report = {"report": asdict(self.statistics())}
        return {**report, "handled": self._handled_pairs()} if self._reports_handled else report

    def _handled_pairs(self) -> list[tuple[int, int]]:
        # In one step, because the lease's thread asks too.
        return list(self._handled.items())

    def statistics(self) -> SubscriberStatistics:
        """How it is doing; may be called from another thread."""
        return SubscriberStatistics(
            given=self._given,
            lag=self._lag,
            lag_high=self._lag_high,
            fallbacks=self._fallbacks,
            reconnects=self._reconnects,
            missing=sum(gap.last - gap.first + 1 for gap in tuple(self._order.gaps)),
            skipped=self._order.skipped,
            last_seq=self._last_seq,
        )

    @property
    def live(self) -> bool:
        """Whether it is connected to the run's broker; a subscriber that is not reads the recording alone."""
        return self._subscription is not None

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """The events that nobody has: published, but neither received nor recorded."""
        return tuple(self._order.gaps)

    @property
    def damage(self) -> str | None:
        """What of the recording could not be read, with its offset."""
        cut = [self._reader.cut] if self._reader.cut and self._subscription is None else []
        return "; ".join([*self._reader.damage, *cut, *self._order.problems]) or None

    def in_effect(self, rank: int = 0) -> DemandActive | None:
        """From where on a rank publishes what was asked for beyond what is always there; ``None`` until it has said
        so."""
        return self._order.in_effect.get(rank)

    # -- commands -----------------------------------------------------------------------------------------------------

    def send_command(
        self, name: str, *arguments: Argument, decided_at: int | None = None, reason: str | None = None
    ) -> bool:
        """Sends a command to the trainer, without waiting; ``decided_at`` is the batch that it was decided at,
        ``reason`` says why it was sent. Returns whether there was anybody to send it to: a run that has ended takes
        none. :attr:`outcomes` tells what became of it.

        Raises :class:`bus.errors.ConfigurationError` when there is no such command."""
        command = check_command(name, arguments, reason)._replace(id=new_command_id(), decided_at=decided_at)
        if self._over or self.ending is not None:
            return False
        self._commands.send(command, self._subscription)
        return True

    def command(
        self, name: str, *arguments: Argument, wait: float = ANSWERED_SECONDS, reason: str | None = None
    ) -> Outcome:
        """Sends a command over a connection of its own and waits up to ``wait`` seconds until it takes effect; may be
        called from any thread, while another one iterates. ``reason`` says why it was sent.

        Raises:
            ConfigurationError: there is no such command, or the run is not live.
            BrokerError: the broker does not answer, or refuses.
        """
        check_command(name, arguments)
        endpoints = self._source.endpoints
        if self._over or self.ending is not None or endpoints is None:
            raise ConfigurationError(
                f"run {self.run_name!r} takes no command: it is not live; 'bus runs' lists the runs"
            )
        security = self._given_security or client_security_for(endpoints.control)
        return send_command_through(
            endpoints.control, self.run_name, name, *arguments, wait=wait, security=security, reason=reason
        )

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """What became of each command that was sent, as far as it is known."""
        return self._commands.outcomes(self._order.outcomes)

    def answered(self) -> tuple[Outcome, ...]:
        """The commands that the training has answered, whoever sent them, in order, as far as the stream was read; may
        be called from another thread."""
        return tuple(self._order.outcomes)

    def _send_from(self, snapshot: Snapshot, command: Command) -> None:
        if command.name == "stop" and self._commands.has("stop"):
            # Callbacks ask again at every event until the training has ended.
            return
        reason = command.reason or self.name_sender()
        batch = int(snapshot.timestamp.batch)
        self.send_command(command.name, *command.arguments, decided_at=batch, reason=reason)

    def _fetch_tensors(self, reference: Mapping[str, Any]) -> bytearray:
        """Tensors in the memory of another machine, through the broker there."""
        endpoints = self._source.endpoints
        if endpoints is None:
            raise FieldNotAvailableError("these tensors cannot be had any more: no broker serves the run")
        with contextlib.closing(RequestClient(endpoints.control, self._given_security)) as ask:
            return fetch_segment(ask, self.run_name, reference)

    def _note_handled(self, snapshot: Snapshot) -> None:
        self._handled[snapshot.rank] = snapshot.seq
        if snapshot.event in self._decides or (snapshot.on_demand and snapshot.is_borrowed):
            self._is_awaited = True

    def _report_handled(self) -> None:
        """Says how far it is, before it waits for more."""
        if self._is_awaited and self._subscription is not None:
            self._is_awaited = False
            self._subscription.send("handled", {"handled": self._handled_pairs()})

    # -- iterating ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Snapshot]:
        while True:
            while self._ready:
                snapshot = self._next()
                if snapshot is None:
                    continue
                yield snapshot
                self._note_handled(snapshot)
            pause = self._advance()
            if pause is None:
                return
            if not pause:
                continue
            self._report_handled()
            if self._subscription is not None and not self._catching_up:
                self._subscription.wait(pause)
            else:
                self._source.wait(pause)

    async def __aiter__(self) -> AsyncIterator[Snapshot]:
        while True:
            while self._ready:
                snapshot = self._next()
                if snapshot is None:
                    continue
                yield snapshot
                self._note_handled(snapshot)
            pause = self._advance()
            if pause is None:
                return
            if pause:
                self._report_handled()
            if pause and self._subscription is not None and not self._catching_up:
                await self._subscription.wait_async(pause)
            else:
                # A long history must not keep other tasks of the loop from running.
                await asyncio.sleep(min(pause, FETCH_SECONDS))

    def _next(self) -> Snapshot | None:
        """The next snapshot; ``None`` where a mark of a checkpoint came instead."""
        snapshot = self._ready.popleft()
        if isinstance(snapshot, CheckpointMark):
            self.on_checkpoint(snapshot)
            return None
        snapshot.bind(self._send_from, self._fetch_tensors)
        self._given += 1
        self._last_seq = snapshot.seq
        return snapshot

    def _advance(self) -> float | None:
        """Takes one step: from the recording while something is missing, else from the live stream. Returns how long
        to wait before the next one, in seconds, or ``None`` when the run has ended and everything has been given."""
        if self._closed:
            raise ClosedError(f"the subscriber of run {self.run_name!r} is closed")
        if self.ending is not None:
            return None
        if self._commands.is_due:
            self._commands.send_again(self._subscription)
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
        if self._source.pending:
            if self._source.look() is RunStatus.UNREACHABLE:
                self._end_unreachable()
                return 0.0
            return FETCH_SECONDS
        if self._over:
            # Read to the end after nobody could write to it any more.
            self._end_of_recording()
            return 0.0
        if self._subscription is None:
            return self._find_broker()
        if self._missing is not None and not self._order.is_filled(self._missing):
            return self._await_missing(self._missing)
        self._missing = None
        self._catching_up = False
        return 0.0

    def _find_broker(self) -> float:
        """Without a broker: whether there is one again, or is going to be."""
        status = self._source.look()
        if status is RunStatus.AWAY:
            return AWAY_SECONDS
        if status is RunStatus.LIVE:
            self._connect()
            self._reconnects += 1
        elif status is RunStatus.UNREACHABLE:
            self._end_unreachable()
        else:
            self._over = True
        self._source.refresh()
        return 0.0

    def _await_missing(self, missing: Missing) -> float:
        """What is missing is on its way to the disk: the broker flushes several times a second."""
        if not self._is_live():
            return 0.0
        if time.monotonic() < self._give_up_at:
            self._source.refresh()
            return DISK_SECONDS
        # The broker lives, but its disk takes no recording: a named gap is better than standing still.
        self._order.accept_gap(missing)
        return 0.0

    def _take_records(self, records: list[Record]) -> None:
        from_record = self._order.from_record
        for record in records:
            snapshot = from_record(record.topic, record.body)
            if snapshot is not None:
                self._ready.append(snapshot)

    def _end_unreachable(self) -> None:
        self.ending = Ending("unreachable", "its broker does not answer any more")

    def _end_of_recording(self) -> None:
        if self._order.ending is None:
            self.ending = Ending("lost", "the broker ended before the run did")

    def _receive(self) -> float:
        assert self._subscription is not None  # without a stream there is only the recording
        for _ in range(BURST):
            frame = self._subscription.receive()
            if frame is None:
                break
            self._take_frame(frame)
            self._heard = time.monotonic()
            if self._catching_up or self._order.ending is not None:
                return 0.0
        if self._ready:
            return 0.0
        if not self._is_live() or self._is_silent():
            self._catch_up()
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
        if topic.name == HEARTBEAT:
            self._compare(body)
            return
        result = self._order.from_live(f"{topic.run}/{topic.name}/{topic.rank}", body)
        if isinstance(result, Snapshot | CheckpointMark):
            self._ready.append(result)
        elif result is not None:
            self._fall_back(result)

    def _compare(self, body: bytes) -> None:
        try:
            _, attempt, _, positions, *more = decode_body(body)
            if attempt != self.attempt:
                return
            positions = decode_positions(positions)
            missing = self._order.missing_at(positions)
            self._lag = self._order.lag(positions)
            self._lag_high = max(self._lag_high, self._lag)
            if missing is None and len(more) >= 2 and self._order.missing_at(decode_positions(more[1])) is None:
                # Whatever may be missed from here on comes after this place in the recording.
                self._go_on_reading_at(int(more[0]))
        except (ProtocolError, ValueError, TypeError, AttributeError, LookupError):
            self._order.skipped += 1
            return
        if missing is not None:
            self._fall_back(missing)

    def _go_on_reading_at(self, offset: int) -> None:
        if offset > self._reader.position:
            self._reader.position = offset
            self._chunks = self._reader.read()

    def _fall_back(self, missing: Missing) -> None:
        self._missing = missing
        self._fallbacks += 1
        self._give_up_at = time.monotonic() + GIVE_UP_SECONDS
        self._catch_up()

    def _catch_up(self) -> None:
        self._catching_up = True
        self._source.refresh()

    def _is_silent(self) -> bool:
        """Whether not even the broker's sign of life has come for long; the connection is then begun anew."""
        if self._subscription is None or time.monotonic() - self._heard < SILENCE_SECONDS:
            return False
        self._subscription.close()
        self._subscription = None
        return True

    def _is_live(self) -> bool:
        """Whether the broker of our attempt still serves the run; when it does not, only the recording is left."""
        if self._subscription is not None and self._source.look() is not RunStatus.LIVE:
            self._subscription.close()
            self._subscription = None
        return self._subscription is not None

    def close(self) -> None:
        """Ends the subscription. Can be called more than once."""
        self._closed = True
        self._source.close()
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None

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

    async def __aenter__(self) -> "Subscriber":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Without waiting, so that a cancelled task leaves nothing open either.
        self.close()
