"""The phases of a batch: waiting for data, forward, loss, backward, optimizer, publishing."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from offloop.bus.types.event import Event
from offloop.bus.types.phases import BEGINS, BETWEEN, ENDS, MAX_SPANS
from offloop.trainer.engine.state import State
from offloop.trainer.fields.field import Field, FieldNotReadyError

_MILLISECOND = 1_000_000


class PhaseProbe:
    """Times the phases of requested batches, from the events between them.

    On a GPU each of these events puts a timing event into the device's stream, so the times are the device's: the host
    runs ahead of it, and loading a batch meanwhile costs nothing. They are read without waiting, once the device has
    passed them."""

    marks: frozenset[Event] = frozenset({*BEGINS, *ENDS, *BETWEEN})  # events that need a call of before and after

    def __init__(self, state: State, is_due: Callable[[], bool]) -> None:
        # A torch.cuda.Event with enable_timing, which has no types.
        make: Callable[[], Any] | None = getattr(state.device, "timing_event", None)
        self._on_device = make is not None
        # Nanoseconds where the device has always finished when the host continues.
        self._mark: Callable[[], Any] = make or time.perf_counter_ns
        self._is_due = is_due
        self.clock: Callable[[], int] = time.time_ns  # nanoseconds since 1970, the clock of events
        self.is_timing: bool = False  # whether the phases of the current batch are requested
        self._open: tuple[str, Any] | None = None
        self._batch = _Batch(0, 0, self._on_device)
        self._found: _Batch | None = None
        self._began = 0
        # Of all batches since the last report.
        self._published = self._published_batches = 0

    def before(self, event: Event) -> None:
        """Record an event before it is published."""
        if event is Event.BATCH_END:
            self._published_batches += 1
        if not self.is_timing:
            return
        if event in ENDS and self._open is not None and self._open[0] in ENDS[event]:
            phase, began = self._open
            self._open = None
            # The last phase of a batch always fits.
            if len(self._batch.spans) < MAX_SPANS or phase == "optimizer":
                self._batch.spans.append((phase, began, self._mark()))
        if event is Event.BATCH_END:
            self._batch.all_publishing = [self._published, self._published_batches]
            self._published = self._published_batches = 0
            self._found, self.is_timing = self._batch, False

    def after(self, event: Event, published: int, own: int) -> None:
        """Record an event after it was published, in ``published`` ns, of which the thread worked for ``own`` ns."""
        self._published += own
        if event in BETWEEN:
            self._begin_batch()
        if not self.is_timing:
            return
        # The time between the last batch of an epoch and the next epoch is not a wait for data.
        if event in BEGINS and (event is Event.EPOCH_START or self._open is None or self._open[0] != "data"):
            self._open = (BEGINS[event], self._mark())
        if not self._batch.publishing:
            self._batch.published_at = max(0, time.perf_counter_ns() - published - self._began)
        self._batch.publishing += published

    def drop(self) -> None:
        """Give up the current batch, because some of its events were not seen."""
        self._open, self.is_timing = None, False

    def found(self) -> Any:
        """Return the phases of the last batch, on a GPU as a promise."""
        found, self._found = self._found, None
        if found is None:
            raise FieldNotReadyError(
                "this batch began before the field was requested, or the request changed within it"
            )
        return found if self._on_device and not found.ready() else found.value()

    def _begin_batch(self) -> None:
        self._open, self._found = None, None
        self.is_timing = self._is_due()
        if self.is_timing:
            self._batch = _Batch(self.clock(), self._mark(), self._on_device)
            self._began = time.perf_counter_ns()


class _Batch:
    def __init__(self, began: int, origin: Any, on_device: bool) -> None:
        self._began = began
        self._origin = origin
        self._on_device = on_device
        self.spans: list[tuple[str, Any, Any]] = []
        self.published_at = 0
        self.publishing = 0
        self.all_publishing = [0, 0]

    def ready(self) -> bool:
        return all(mark.query() for mark in self._marks())

    def value(self) -> dict[str, Any]:
        """Return the spans, and the publishing time and number of batches since the last report.

        A span is the phase, its start since the start of the batch, and its length. All times are in nanoseconds; the
        publishing time is the thread's own. Waits for the GPU unless :meth:`ready`."""
        if self._on_device:
            for mark in self._marks():
                if not mark.query():
                    mark.synchronize()
            spans = [[phase, start := self._since(begin), self._since(end) - start] for phase, begin, end in self.spans]
        else:
            origin = self._origin
            spans = [[phase, begin - origin, end - begin] for phase, begin, end in self.spans]
        if self.publishing:
            spans.append(["publishing", self.published_at, self.publishing])
        return {"began": self._began, "spans": spans, "device": self._on_device, "publishing": self.all_publishing}

    def _marks(self) -> Iterator[Any]:
        if self.spans:
            for _, begin, end in reversed(self.spans):
                yield end
                yield begin
            yield self._origin

    def _since(self, mark: Any) -> int:
        milliseconds: float = self._origin.elapsed_time(mark)
        return round(milliseconds * _MILLISECOND)


PHASE_FIELDS: dict[str, Field] = {"phases": Field(PhaseProbe.found, frozenset({Event.BATCH_END}), probe=PhaseProbe)}
