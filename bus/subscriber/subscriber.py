"""The subscriber: a run's history and then its live events, as one sequence of snapshots."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from offloop.bus.errors import ClosedError, ConfigurationError, FieldNotAvailableError
from offloop.bus.net.channels import RequestClient
from offloop.bus.protocol.frames import Control
from offloop.bus.protocol.host_windows import HostWindow
from offloop.bus.protocol.order import BATCH, CheckpointMark, Ending, Gap, StreamOrder
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import RunStream
from offloop.bus.runs.directory import find_run
from offloop.bus.subscriber.commands import PendingCommands, perform
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

_log = logging.getLogger("offloop")

BURST = 200


@dataclass(frozen=True)
class SubscriberStatistics:
    """Counts of a subscriber since its start."""

    given: int  # snapshots yielded
    lag: int  # events that the broker had at its last heartbeat and that were not yielded
    lag_high: int  # maximum of :attr:`lag` so far
    fallbacks: int  # number of times that the event feed skipped events, which were then read from the recording
    reconnects: int  # number of times that a broker was lost and found again
    missing: int  # events that are lost: gaps
    skipped: int  # messages that are malformed or of a newer version
    last_seq: int  # ``seq`` of the last yielded snapshot


class Subscriber(RunStream):
    """Yields all events of a run, whenever one subscribes: iterate over its snapshots with ``for`` or ``async for``.

    Past events come from the recording, new ones from the broker's event feed. Events that the feed skips are read from
    the recording. So each requested event comes once and in order. If the broker dies, the subscriber waits for the
    next one as long as the trainer lives. The iteration ends with the run; :attr:`ending` has the result.

    Use it with ``with`` or ``async with``. After a task was cancelled during an iteration, the next iteration continues
    after the last yielded snapshot.

    Args:
        run: Name or directory of the run.
        runs_dir: Folder of the runs, by default that of :func:`offloop.bus.runs_dir`.
        events: Events to receive, by default all. Events outside the base set are published from the moment a
            subscriber requests them.
        demand: Exact demand of events, intervals and fields, by default that of ``events``.
        max_delay: Longest delay of events from a fast loop, in seconds from 0 to 1, by default the training's (50 ms).
        name: Name of the consumer.
        barrier_events: Events at which the caller may stop the training. A trainer with ``wait_for`` waits there until
            the next snapshot is requested.
        after: Position to continue from: for each rank ``(seq, base_seq)`` of the last snapshot already read.
        stream: NATS JetStream address to read from, such as ``nats://10.0.0.1:4222``. Of a run on several hosts this
            is the recording of the first rank's host.
        timeouts: How long to wait for the broker.

    Raises:
        RunNotFoundError: The run does not exist.
        RecordingError: Its recording cannot be read.
        BrokerError: No NATS server answers at that address.
        ConfigurationError: ``stream`` is malformed, ``barrier_events`` has an event that is not in ``events``, or
            ``max_delay`` is not from 0 to 1.
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
                    f"barrier_events has {', '.join(unhandled)}, which is not in events: a training would wait there, "
                    "although the consumer never handles it"
                )
        self._source = _open_source(run, runs_dir, stream)
        self._servers = stream
        self.run_name: str = self._source.run_name
        self.run_id: str | None = self._source.run_id
        """The run's identity, see :attr:`offloop.bus.RunInfo.id`."""
        self.run_dir: Path | None = self._source.run_dir
        """Directory of the run, if it is on this machine."""
        self.attempt: int = self._source.attempt
        self.recording: Path | None = self._source.recording
        """Recording that is read, if it is on this machine."""
        self._demand = Demand.of(events or ()) if demand is None else demand
        self._order = StreamOrder(self.run_name, self.attempt, events, after)
        self._order.send, self._order.fetch = self._send_from, self._fetch_tensors
        # A trainer may wait until events are handled, or lend memory until then.
        self._reports_handled = bool(self._barrier_events) or bool(self._demand.fields)
        # If so, progress is reported at once instead of with the next renewal.
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
        # Connect before reading the history: events in between are in both.
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
            "name": self._name,
            "demand": Demand.merge([self._demand, self._delay]).to_wire(),
            "barrier_events": sorted(event.value for event in self._barrier_events),
        }

    def beside(self, **request: Any) -> "Subscriber":
        """Return a further subscriber of the same run; ``request`` are arguments of the constructor."""
        return Subscriber(self.run_dir or self.run_name, stream=self._servers, timeouts=self._timeouts, **request)

    def ask_for(self, demand: Demand, barrier_events: Iterable[Event] = ()) -> None:
        """Reduce the demand: these values replace the first ones. The yielded events stay the same."""
        self._demand, self._barrier_events = demand, frozenset(barrier_events)
        if self._subscription is not None:
            self._subscription.update_demand(self._lease)

    def _report(self) -> dict[str, Any]:
        report = {"report": asdict(self.statistics())}
        # One step, because this runs in the lease's thread.
        return {**report, "handled": list(self._handled.items())} if self._reports_handled else report

    def statistics(self) -> SubscriberStatistics:
        """Return its counts. Any thread may call it."""
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
        """The run's end, once it was reached."""
        return self._following.ending

    @property
    def live(self) -> bool:
        """It is connected to the run's broker, and not reading the recording alone."""
        return self._subscription is not None

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """Events that are lost: published, but neither received nor recorded."""
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
        """Send a command to the trainer without waiting; return whether it was sent.

        A run that has ended takes no commands. ``decided_at`` is the batch that caused the command, ``reason`` says why
        it is sent. :attr:`outcomes` has the result. An unknown command raises ConfigurationError."""
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
                _log.warning("run %s refuses the demand: %s", self.run_name, self._refusal)

    def command(
        self, name: str, *arguments: Argument, wait: float = WAIT_SECONDS, reason: str | None = None
    ) -> Outcome:
        """Send a command and wait up to ``wait`` seconds for its effect.

        It uses its own connection: any thread may call it, while another one iterates. ``reason`` says why it is sent.

        Raises:
            ConfigurationError: The command is unknown, or the run is not live.
            BrokerError: The broker does not answer, or refuses.
        """
        command = check_command(name, arguments, reason)
        if not self._takes_commands:
            raise ConfigurationError(f"run {self.run_name!r} is not live: 'offloop runs --live' lists live runs")
        return perform(self._source.open_channel(), self.run_name, command, wait, self._timeouts)

    @property
    def commander(self) -> Callable[..., Outcome]:
        return self.command

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Known outcome of each sent command."""
        return self._commands.outcomes(self._order.outcomes)

    def answered(self) -> tuple[Outcome, ...]:
        return tuple(self._order.outcomes)

    def host_windows(self) -> list[HostWindow]:
        """Return the hosts' windows since the last call, without waiting.

        A stream has those of all hosts, at first the last one of each. A directory has the last ones of its host."""
        return self._source.host_windows()

    def checkpoints(self) -> tuple[CheckpointMark, ...]:
        return tuple(self._order.checkpoints)

    def _send_from(self, snapshot: Snapshot, command: Command) -> None:
        if command.name == "stop" and self._commands.has("stop"):
            # Callbacks repeat the request at every event until the training has ended.
            return
        reason = command.reason or self.name_sender()
        batch = int(snapshot.timestamp.batch)
        self.send_command(command.name, *command.arguments, decided_at=batch, reason=reason)

    def _fetch_tensors(self, reference: Mapping[str, Any]) -> bytearray:
        """Fetch tensors from another machine's memory, through the broker there."""
        try:
            channel = self._source.open_channel()
        except ConfigurationError as error:
            raise FieldNotAvailableError(f"these tensors are not available any more: {error}") from None
        with RequestClient(channel, self._timeouts) as ask:
            return fetch_segment(ask, self.run_name, reference)

    def _note_handled(self, snapshot: Snapshot) -> None:
        self._handled[snapshot.rank] = snapshot.seq
        if snapshot.event in self._barrier_events or (snapshot.on_demand and snapshot.is_borrowed):
            self._is_awaited = True

    # -- iterating ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Snapshot]:
        while True:
            yield from self._take_singly()
            pause = self._advance()
            if pause is None:
                return
            if pause and (feed := self._feed) is not None:
                feed.wait(pause)
            elif pause:
                time.sleep(pause)

    async def __aiter__(self) -> AsyncGenerator[Snapshot, None]:
        async with contextlib.aclosing(self._read_lists(1)) as lists:
            async for snapshots in lists:
                yield snapshots[0]

    def read(
        self, events: Collection[Event], after: Mapping[int, tuple[int, int]]
    ) -> AsyncGenerator[Sequence[Snapshot], None]:
        """Iterate asynchronously over lists of the snapshots that have arrived."""
        return self._read_lists(BATCH)

    async def _read_lists(self, most: int) -> AsyncGenerator[list[Snapshot], None]:
        for step in self._steps(most):
            if isinstance(step, list):
                yield step
            elif step and (feed := self._feed) is not None:
                await feed.wait_async(step)
            else:
                # A long history must let other tasks of the event loop run.
                await asyncio.sleep(step)

    def _steps(self, most: int) -> Iterator[list[Snapshot] | float]:
        """Yield snapshots in order, in lists of at most so many, and between them the seconds to wait for more."""
        while True:
            while snapshots := self._take_ready(most):
                yield snapshots
                if self._reports_handled:
                    for snapshot in snapshots:
                        self._note_handled(snapshot)
            pause = self._advance()
            if pause is None:
                return
            yield pause

    @property
    def _feed(self) -> LiveSubscription | None:
        return self._subscription if self._following.phase is Phase.LIVE else None

    def _take_singly(self) -> Iterator[Snapshot]:
        ready = self._following.ready
        while ready:
            found = ready.popleft()
            if isinstance(found, Snapshot):
                self._given += 1
                self._last_seq = found._body.seq
                yield found
                if self._reports_handled:
                    self._note_handled(found)
            else:
                self.on_checkpoint(found)

    def _take_ready(self, most: int) -> list[Snapshot]:
        """Return the next snapshots up to a checkpoint mark, which is reported when those before it are handled."""
        ready, taken = self._following.ready, list[Snapshot]()
        while ready and len(taken) < most:
            found = ready.popleft()
            if isinstance(found, Snapshot):
                taken.append(found)
            elif taken:
                ready.appendleft(found)
                break
            else:
                self.on_checkpoint(found)
        if taken:
            self._given += len(taken)
            self._last_seq = taken[-1].seq
        return taken

    def _advance(self) -> float | None:
        """Take one step; return the pause before the next one in seconds, or ``None`` at the end."""
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
        pause = step.pause if following.ending is None else 0.0
        if pause and self._is_awaited and self._subscription is not None:
            # Report progress before waiting for more.
            self._is_awaited = False
            self._subscription.send("handled", {"handled": list(self._handled.items())})
        return pause

    def _read(self) -> Step:
        records = next(self._chunks, None)
        if records is not None:
            self._following.take_records(records)
            if positions := self._source.newest_positions():
                self._following.note_newest(positions)
            return Step()
        self._chunks = self._reader.read()
        # Check pending parts before the status: data that arrives in between is not the end.
        is_pending = self._source.pending
        status = self._source.look()
        self._following.refusal = self._source.refusal
        return self._following.at_end_of_recording(is_pending, status, time.monotonic())

    def _listen(self) -> Step:
        assert self._subscription is not None  # LIVE needs a connection
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
        """End the subscription. Further calls have no effect."""
        if not self._closed:
            self._closed = True
            self._disconnect()
            self._source.close()

    def __del__(self) -> None:
        # After a failed constructor there is nothing to close.
        if not getattr(self, "_closed", True):
            self.close()

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> "Subscriber":
        return self

    async def __aexit__(self, *_: object) -> None:
        # Without waiting, so that a cancelled task closes it too.
        self.close()


def _open_source(
    run: str | os.PathLike[str] | None,
    runs_dir: str | os.PathLike[str] | None,
    stream: "str | NatsServers | None",
) -> RunSource:
    if stream is None:
        return LocalRun(find_run("" if run is None else run, runs_dir))
    from offloop.bus.subscriber.stream_run import StreamRun

    return StreamRun(stream, None if run is None else str(run))
