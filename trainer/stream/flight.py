"""The training's side of the flight recorder: writes every event to a ring that the broker can read."""

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.flight_ring import MAX_EVENT, MEMORY, FlightRing
from offloop.bus.protocol.frames import Topic, event_encoder
from offloop.bus.publisher.publisher import Publisher
from offloop.bus.types.deferred import deferred_values
from offloop.bus.types.demand import BASE_EVENTS
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import TrainingTime
from offloop.trainer.engine.state import State
from offloop.trainer.fields.field import FieldNotReadyError
from offloop.trainer.fields.phases import PhaseProbe
from offloop.trainer.stream.publishing import StatePublisher

_MOST_LATE = 8


def make_ring(batches: int, ranks: int) -> FlightRing:
    """Allocate the ring of one of ``ranks`` ranks on this host. Raises ConfigurationError without free memory."""
    try:
        return FlightRing(batches, MEMORY // max(1, ranks))
    except OSError as error:
        raise ConfigurationError(f"flight_recorder has no memory ({error}): free some, or train without it") from None


class RingPublisher:
    """Writes each event of a training to a ring, and publishes it as without a ring.

    A published event is written with its fields, any other only with its time and training time. Each batch has the
    field ``phases``: on a CPU the broker derives it from the events' times. Values that are still on a GPU are not
    waited for: phases come with a later batch.

    Args:
        publish: publishes an event through ``published``.
        clock: nanoseconds since 1970."""

    def __init__(
        self,
        state: State,
        published: StatePublisher,
        publisher: Publisher,
        publish: Callable[[Event], None],
        ring: FlightRing,
        clock: Callable[[], int],
    ) -> None:
        self.requested_events: set[Event] = set(Event)
        self._state = state
        self._published = published
        self._publish = publish
        self._is_published = publisher.requested_events
        self._kept_events = publisher.kept_events
        self._send = publisher.send
        self._ring = ring
        self._put: Callable[[bytes], bool] = ring.put
        self._clock = clock
        # Number 1 is the broker's, for a mark before the events that it writes.
        self._seq = self._base_seq = 1
        self._is_written = False
        self._now = 0
        self._encoders = {
            event: event_encoder(Topic(publisher.run_name, event.value, state.rank), publisher.attempt)
            for event in Event
        }
        # On a CPU the broker computes the phases from the events' times.
        self._probe: PhaseProbe | None = None
        if hasattr(state.device, "timing_event"):
            self._probe = PhaseProbe(state, lambda: True)
            self._probe.clock = clock
        self._late: list[tuple[Any, TrainingTime, TrainingTime | None]] = []
        published.send_through(self._send_and_write)

    def publish(self, event: Event) -> None:
        """Write an event to the ring, and publish it if it is requested."""
        self._now = self._clock()
        probe = self._probe
        if probe is None or event not in PhaseProbe.marks:
            self._publish_and_write(event)
            return
        probe.before(event)
        began = perf_counter_ns()
        self._publish_and_write(event)
        took = perf_counter_ns() - began
        probe.after(event, took, took)

    def _publish_and_write(self, event: Event) -> None:
        if event in self._is_published:
            self._is_written = False
            self._publish(event)
            if self._is_written:
                return
        self._write(event, self._state.timestamp.values, None, {}, self._published.context)

    def _send_and_write(
        self,
        event: Event,
        timestamp: TrainingTime,
        previous: TrainingTime | None,
        fields: dict[str, Any],
        context: bytes,
        has_deferred: bool = False,
        time: int | None = None,
    ) -> None:
        self._send(event, timestamp, previous, fields, context, has_deferred, time)
        self._is_written = True
        if has_deferred and (late := deferred_values(fields)):
            fields = {**fields, **dict.fromkeys(late)}
            if "phases" in late:
                # The ring's own phases come with a later batch.
                del fields["phases"]
                fields["on_demand"] = [name for name in fields["on_demand"] if name != "phases"]
        if event is Event.BATCH_END:
            fields = self._with_phases(fields, timestamp, previous)
        self._write(event, timestamp, previous, fields, context)

    def _write(
        self,
        event: Event,
        timestamp: TrainingTime,
        previous: TrainingTime | None,
        fields: dict[str, Any],
        context: bytes,
    ) -> None:
        self._seq = seq = self._seq + 1
        if event in BASE_EVENTS:
            self._base_seq += 1
            if event is Event.BATCH_END:
                # Also for an unpublished one, after the broker left the run: otherwise the ring would only grow.
                self._ring.batch += 1
        encode, base_seq, now = self._encoders[event], self._base_seq, self._now
        try:
            if self._put(encode(seq, base_seq, now, timestamp, previous, fields, context)):
                return
            why = f"more than {MAX_EVENT:,} bytes, which is the most that the flight recorder holds"
        except (TypeError, ValueError, OverflowError) as error:
            # Besides a value on a GPU: the publisher will find the same error, and warn.
            why = str(error)
        self._put(encode(seq, base_seq, now, timestamp, previous, {"not_sent": why}, context))

    def _with_phases(
        self, fields: dict[str, Any], timestamp: TrainingTime, previous: TrainingTime | None
    ) -> dict[str, Any]:
        if "phases" in fields:
            # A consumer requests them: they are the same.
            return fields
        added: dict[str, Any] = {"phases": None}
        if self._probe is not None:
            try:
                found = self._probe.found()
            except FieldNotReadyError:
                return fields
            if isinstance(found, dict):
                added = {"phases": found}
            else:
                # From a GPU they come with a later batch.
                self._late.append((found, timestamp, previous))
                del self._late[:-_MOST_LATE]
                if "late" in fields or not self._late[0][0].ready():
                    return fields
                found, *moment = self._late.pop(0)
                added = {"phases": found.value(), "late": {"phases": [[Event.BATCH_END.value, *moment]]}}
        return {**fields, **added, "on_demand": [*fields.get("on_demand", ()), *added]}

    def close(self) -> None:
        """Free the ring; the broker keeps the memory as long as it needs it."""
        self.requested_events &= self._kept_events
        self._put = lambda _frame: True
        self._ring.close()
