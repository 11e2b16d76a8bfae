"""The receiving end: a run's whole history and then what happens live, as one sequence of snapshots."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from offloop.bus.errors import ClosedError, ConfigurationError, FieldNotAvailableError
from offloop.bus.net.channels import RequestClient
from offloop.bus.protocol.frames import Control
from offloop.bus.protocol.host_windows import HostWindow
from offloop.bus.protocol.order import CheckpointMark, Ending, Gap, StreamOrder
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import RunStream
from offloop.bus.runs.directory import find_run
from offloop.bus.subscriber.commands import CommandExchange, PendingCommands, perform, perform_async
from offloop.bus.subscriber.following import Action, Following, Phase, RunStatus, Step
from offloop.bus.subscriber.source import LocalRun, RunSource
from offloop.bus.subscriber.subscription import LiveSubscription
from offloop.bus.tensors.segments import fetch_segment
from offloop.bus.types.commands import WAIT_SECONDS, Argument, Command, Outcome, check_command, new_command_id
from offloop.bus.types.demand import Demand
from offloop.bus.types.event import Event
from offloop.bus.types.timeouts import Timeouts

if TYPE_CHECKING:
    from offloop.bus.jetstream.connection import NatsServers
    from offloop.bus.jetstream.nats_connection import NatsConnection

_log = logging.getLogger("offloop")

BURST = 1000


@dataclass(frozen=True)
class SubscriberStatistics:
    """Counts of a subscriber since it began."""

    given: int
    """Snapshots yielded."""
    lag: int
    """Events that the broker has received, by its last heartbeat, and that were not yielded."""
    lag_high: int
    """The largest lag so far."""
    fallbacks: int
    """Number of times that the event feed missed something that was then read from the recording."""
    reconnects: int
    """Number of times that a broker was lost and came back."""
    missing: int
    """Events that are lost: gaps."""
    skipped: int
    """Messages that are malformed or of a newer version."""
    last_seq: int
    """``seq`` of the last snapshot yielded."""


class Subscriber(RunStream):
    """The events of a run from its first to its last, whenever one subscribes: iterate, with ``for`` or ``async
    for``, over snapshots.

    History is read from the recording, what follows comes from the broker's event feed; where that misses something, it
    is read from the recording again, so every requested event comes once and in order. A broker that dies is waited for
    as long as its trainer lives. The iteration ends when the run has ended, and :attr:`ending` says how.

    Use it as a context manager, with ``with`` or ``async with``. A task that is cancelled or runs out of time while it
    iterates loses nothing: the next iteration continues after the last snapshot that was yielded.

    ``run`` is a run's name or directory; ``events`` are those to receive, all by default. Events beyond the base set,
    and fields on demand, are published from the moment a subscriber requests them: by name in ``events``, or, more
    exactly, in ``demand``. ``max_delay`` is by how many seconds
    events of a fast loop may be late, from 0 to 1; by default as late as the training sends them by itself (50 ms).
    ``name`` is the consumer's name.
    ``barrier_events`` are the events at which the caller may stop the training: a trainer with ``wait_for`` waits there
    until the next snapshot is requested. ``after`` is the position to continue from: of each rank ``(seq, base_seq)``
    of the last snapshot that need not come again.

    With ``stream``, an address such as ``nats://10.0.0.1:4222``, everything comes from NATS JetStream. Of a run on
    several hosts that is what the host of the first rank has; with ``host`` what that one has, from its bridge, which
    has to be there. ``ranks`` are those whose events to receive, by default all.

    Raises:
        RunNotFoundError: there is no such run.
        RecordingError: its recording cannot be read.
        BrokerError: no NATS server answers at that address.
        ConfigurationError: ``host`` is given without ``stream``; ``stream`` is malformed; ``barrier_events`` has an
            event that is not among ``events``; ``max_delay`` is not from 0 to 1.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | None = None,
        *,
        runs_dir: str | os.PathLike[str] | None = None,
        events: Iterable[Event] | None = None,
        demand: Demand | None = None,
        max_delay: float | None = None,
        name: str | None = None,
        barrier_events: Iterable[Event | str] = (),
        after: Mapping[int, tuple[int, int]] | None = None,
        stream: "str | NatsServers | None" = None,
        host: str | None = None,
        ranks: Collection[int] = (),
        timeouts: Timeouts | None = None,
    ) -> None:
        self._timeouts = timeouts or Timeouts.default
        self._name = name
        self._delay = Demand(max_delay=max_delay)
        self._barrier_events = frozenset(Event(event) for event in barrier_events)
        if events is not None:
            events = frozenset(events)
            if unhandled := sorted(event.value for event in self._barrier_events - events):
                raise ConfigurationError(
                    f"barrier_events has {', '.join(unhandled)}, which is not among the events that are "
                    "requested: a training that waits there would wait in vain"
                )
        self._source: RunSource
        self._nats: NatsConnection | None = None
        self._ranks = frozenset(ranks)
        self.first_rank = min(ranks, default=0)
        if host is not None and stream is None:
            raise ConfigurationError(f"host {host!r} is one of a run that is read from a stream: give stream too")
        self._host = host
        if stream is not None:
            from offloop.bus.subscriber.stream_run import StreamRun, connect

            self._nats = connect(stream)
            try:
                self._source = StreamRun(self._nats, None if run is None else str(run), host)
            except BaseException:
                self._nats.close()
                raise
        else:
            self._source = LocalRun(find_run("" if run is None else run, runs_dir))
        self.run_name = self._source.run_name
        self.run_id = self._source.run_id
        """The run's identity: see :attr:`offloop.bus.RunInfo.id`."""
        self.run_dir = self._source.run_dir
        """The run's directory; ``None`` for a run on another machine."""
        self.attempt = self._source.attempt
        self.recording = self._source.recording
        """The recording that it reads; ``None`` for a run on another machine."""
        self._demand = Demand.of(events or ()) if demand is None else demand
        self._order = StreamOrder(self.run_name, self.attempt, events, after)
        # A trainer may wait for what is handled, or lend memory until then.
        self._reports_handled = bool(self._barrier_events) or bool(self._demand.fields)
        # One does: it is reported at once, and not with the next renewal.
        self._is_awaited = False
        self._handled: dict[int, int] = {rank: seq for rank, (seq, _) in (after or {}).items()}
        self._commands = PendingCommands()
        self._reader = self._source.reader
        self._chunks = self._reader.read()
        self._following = Following(self._order, self._timeouts)
        self._closed = False
        self._refusal = ""
        self._subscription: LiveSubscription | None = None
        self._given = self._last_seq = 0
        # The stream first, then the history: what comes in between is in both.
        if self._source.look() is RunStatus.LIVE:
            self._connect()

    def _connect(self) -> None:
        feed, now = self._source.event_feed, time.monotonic()
        self._subscription = LiveSubscription(
            feed, self._source.open_channel(), self._order, self._lease, self._report, self._take_answer
        )
        self._following.connected(now, has_feed=feed is not None)
        self._send(self._commands.send_again(now))

    @property
    def _lease(self) -> dict[str, Any]:
        return {
            **({} if self._host is None else {"host": self._host}),
            "name": self._name,
            "demand": Demand.merge([self._demand, self._delay]).to_wire(),
            "barrier_events": sorted(event.value for event in self._barrier_events),
        }

    def ask_for(self, demand: Demand, barrier_events: Iterable[Event] = ()) -> None:
        """Asks the training for less than before: ``demand`` and ``barrier_events`` replace those that the subscriber
        was made with. The events that it yields stay the same."""
        self._demand, self._barrier_events = demand, frozenset(barrier_events)
        if self._subscription is not None:
            self._subscription.update_demand(self._lease)

    def _report(self) -> dict[str, Any]:
        report = {"report": asdict(self.statistics())}
        # In one step, because this is the lease's thread.
        return {**report, "handled": list(self._handled.items())} if self._reports_handled else report

    def statistics(self) -> SubscriberStatistics:
        """Its counts; may be called from another thread."""
        following = self._following
        return SubscriberStatistics(
            given=self._given,
            lag=following.lag,
            lag_high=following.lag_high,
            fallbacks=following.fallbacks,
            reconnects=following.reconnects,
            missing=sum(gap.last - gap.first + 1 for gap in tuple(self._order.gaps)),
            skipped=self._order.skipped,
            last_seq=self._last_seq,
        )

    @property
    def ending(self) -> Ending | None:
        """The run's end; ``None`` until then."""
        return self._following.ending

    @property
    def live(self) -> bool:
        """It is connected to the run's broker; a subscriber that is not reads the recording alone."""
        return self._subscription is not None

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """The events that are lost: published, but neither received nor recorded."""
        return tuple(self._order.gaps)

    @property
    def damage(self) -> str | None:
        cut = [self._reader.cut] if self._reader.cut and self._subscription is None else []
        return "; ".join([*self._reader.damage, *cut]) or None

    def skip_to(self, offset: int, positions: Mapping[int, tuple[int, int]]) -> None:
        self._order.skip_to(positions)
        self._handled |= {rank: seq for rank, (seq, _) in positions.items()}
        self._reader.position = offset
        self._chunks = self._reader.read()

    # -- commands -----------------------------------------------------------------------------------------------------

    def send_command(
        self, name: str, *arguments: Argument, decided_at: int | None = None, reason: str | None = None
    ) -> bool:
        """Sends a command to the trainer, without waiting; ``decided_at`` is the batch that it was decided at,
        ``reason`` says why it was sent. Returns whether it was sent: a run that has ended takes no commands.
        :attr:`outcomes` has what became of it.

        Raises :class:`offloop.bus.errors.ConfigurationError` when there is no such command."""
        command = check_command(name, arguments, reason)
        command = msgspec.structs.replace(command, id=new_command_id(), decided_at=decided_at)
        if not self._takes_commands:
            return False
        self._commands.add(command, time.monotonic())
        self._send([command])
        return True

    @property
    def _takes_commands(self) -> bool:
        return self.ending is None and self._following.phase is not Phase.REST

    def _send(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if self._subscription is not None:
                self._subscription.send("command", command.to_wire())

    def _take_answer(self, answer: Control) -> None:
        self._commands.take(answer, time.monotonic())
        if answer.kind == "refused" and "id" not in answer.content:
            before, self._refusal = self._refusal, str(answer.content.get("reason"))
            if before != self._refusal:
                _log.warning("run %s: what is requested of it is refused: %s", self.run_name, self._refusal)

    def command(
        self, name: str, *arguments: Argument, wait: float = WAIT_SECONDS, reason: str | None = None
    ) -> Outcome:
        """Sends a command over a connection of its own and waits up to ``wait`` seconds until it takes effect; may be
        called from any thread, while another one iterates. ``reason`` says why it was sent.

        Raises ConfigurationError: there is no such command, or the run is not live; BrokerError: the broker does not
        answer, or refuses."""
        exchange = self._exchange(name, arguments, wait, reason)
        return perform(self._source.open_channel(), exchange)

    def _exchange(self, name: str, arguments: tuple[Argument, ...], wait: float, reason: str | None) -> CommandExchange:
        command = check_command(name, arguments, reason)
        if not self._takes_commands:
            raise ConfigurationError(
                f"run {self.run_name!r} takes no command: it is not live; 'offloop runs' lists the runs"
            )
        return CommandExchange(self.run_name, command, wait, self._timeouts)

    @property
    def commander(self) -> Callable[..., Outcome]:
        """:meth:`command` for callers that do not know which kind of stream this is."""
        return partial(Subscriber.command, self)

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """The known outcome of each command that was sent."""
        return self._commands.outcomes(self._order.outcomes)

    def answered(self) -> tuple[Outcome, ...]:
        return tuple(self._order.outcomes)

    def host_windows(self) -> list[HostWindow]:
        """As :meth:`offloop.bus.protocol.stream.RunStream.host_windows`. Through a stream those of all hosts, at first
        the last one of each; from a directory the last ones of its host. Waits for nothing but an answer in this
        process."""
        return self._source.host_windows()

    def checkpoints(self) -> tuple[CheckpointMark, ...]:
        return tuple(self._order.checkpoints)

    def _send_from(self, snapshot: Snapshot, command: Command) -> None:
        if command.name == "stop" and self._commands.has("stop"):
            # Callbacks ask again at every event until the training has ended.
            return
        reason = command.reason or self.name_sender()
        batch = int(snapshot.timestamp.batch)
        self.send_command(command.name, *command.arguments, decided_at=batch, reason=reason)

    def _fetch_tensors(self, reference: Mapping[str, Any]) -> bytearray:
        """Tensors in the memory of another machine, through the broker there."""
        try:
            channel = self._source.open_channel()
        except ConfigurationError as error:
            raise FieldNotAvailableError(f"these tensors cannot be had any more: {error}") from None
        with RequestClient(channel, self._timeouts) as ask:
            return fetch_segment(ask, self.run_name, reference)

    def _note_handled(self, snapshot: Snapshot) -> None:
        self._handled[snapshot.rank] = snapshot.seq
        if self._reports_handled and (
            snapshot.event in self._barrier_events or (snapshot.on_demand and snapshot.is_borrowed)
        ):
            self._is_awaited = True

    # -- iterating ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Snapshot]:
        for step in self._steps():
            if isinstance(step, Snapshot):
                yield step
            elif step:
                self._listens_to.wait(step)

    async def __aiter__(self) -> AsyncGenerator[Snapshot, None]:
        for step in self._steps():
            if isinstance(step, Snapshot):
                yield step
            elif step:
                await self._listens_to.wait_async(step)
            else:
                # A long history must not keep other tasks of the loop from running.
                await asyncio.sleep(0)

    def _steps(self) -> Iterator[Snapshot | float]:
        """Snapshots in order, and between them for how many seconds to wait for more."""
        while True:
            while self._following.ready:
                if (snapshot := self._next()) is not None:
                    yield snapshot
                    self._note_handled(snapshot)
            pause = self._advance()
            if pause is None:
                return
            if pause and self._is_awaited and self._subscription is not None:
                # It says how far it is before it waits for more.
                self._is_awaited = False
                self._subscription.send("handled", {"handled": list(self._handled.items())})
            yield pause

    @property
    def _listens_to(self) -> LiveSubscription | RunSource:
        if self._following.phase is Phase.LIVE and self._subscription is not None:
            return self._subscription
        return self._source

    def _next(self) -> Snapshot | None:
        """The next snapshot; ``None`` where a mark of a checkpoint came instead, or one of another rank."""
        snapshot = self._following.ready.popleft()
        if self._ranks and not isinstance(snapshot, CheckpointMark) and snapshot.rank not in self._ranks:
            self._note_handled(snapshot)
            return None
        if isinstance(snapshot, CheckpointMark):
            self.on_checkpoint(snapshot)
            return None
        snapshot.bind(self._send_from, self._fetch_tensors)
        self._given += 1
        self._last_seq = snapshot.seq
        return snapshot

    def _advance(self) -> float | None:
        """Takes one step; returns how long to wait before the next one, in seconds, or ``None`` when the run has ended
        and everything has been given."""
        if self._closed:
            raise ClosedError(f"the subscriber of run {self.run_name!r} is closed")
        following = self._following
        if following.ending is not None:
            return None
        self._send(self._commands.due(time.monotonic()))
        step = self._listen() if following.phase is Phase.LIVE else self._read()
        if step.action is Action.CONNECT:
            self._connect()
        elif step.action is Action.DISCONNECT:
            self._disconnect()
        if step.action is not Action.NONE:
            if following.offset > self._reader.position:
                self._reader.position = following.offset
                self._chunks = self._reader.read()
            self._source.refresh()
        return step.pause if following.ending is None else 0.0

    def _read(self) -> Step:
        records = next(self._chunks, None)
        if records is not None:
            self._following.take_records(records)
            if positions := self._source.newest_positions():
                self._following.note_newest(positions)
            return Step()
        self._chunks = self._reader.read()
        # In this order: what came while it was looked is not the end.
        is_pending = self._source.pending
        status = self._source.look()
        self._following.refusal = self._source.refusal
        return self._following.at_end_of_recording(is_pending, status, time.monotonic())

    def _listen(self) -> Step:
        assert self._subscription is not None  # without a stream there is only the recording
        following, has_heard = self._following, False
        for _ in range(BURST):
            frame = self._subscription.receive()
            if frame is None:
                break
            has_heard = True
            following.take_frame(frame)
            if following.phase is not Phase.LIVE or following.ending is not None or len(following.ready) >= BURST:
                break
        now = time.monotonic()
        if has_heard:
            following.heard(now)
        if following.phase is not Phase.LIVE:
            return Step(Action.READ_ON)
        if following.ready or following.ending is not None:
            return Step()
        return following.when_quiet(self._source.look(), now)

    def _disconnect(self) -> None:
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None

    def close(self) -> None:
        """Ends the subscription. Can be called more than once."""
        self._closed = True
        self._source.close()
        self._disconnect()
        if self._nats is not None:
            self._nats.close()
            self._nats = None

    def __del__(self) -> None:
        # One whose constructor failed has nothing to close.
        if not getattr(self, "_closed", True):
            self.close()

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> "AsyncSubscriber":
        return AsyncSubscriber(self)

    async def __aexit__(self, *_: object) -> None:
        # Without waiting, so that a cancelled task leaves nothing open either.
        self.close()


class AsyncSubscriber(Subscriber):
    """The stream that ``async with Subscriber(...)`` gives: all that a subscriber has, with :meth:`command` to be
    awaited. Closed by the ``async with`` block."""

    def __init__(self, opened: Subscriber) -> None:
        # One stream, which the caller may use by either name.
        self.__dict__ = opened.__dict__

    async def command(  # type: ignore[override]
        self, name: str, *arguments: Argument, wait: float = WAIT_SECONDS, reason: str | None = None
    ) -> Outcome:
        """As :meth:`Subscriber.command`, while the event loop runs. A task that is cancelled meanwhile does not take
        the command back."""
        exchange = self._exchange(name, arguments, wait, reason)
        return await perform_async(self._source.open_channel(), exchange)

    def __del__(self) -> None:
        """Leaves the stream open: it is closed with the subscriber that was entered."""
