"""The spans of a run, and its custom events, for its page."""

import threading
from collections import deque
from typing import NamedTuple

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import ANY_CUSTOM
from offloop.bus.types.health import HEALTH
from offloop.bus.types.span import SPAN, read_span
from offloop.consumers.dashboard.view.log import in_words
from offloop.consumers.dashboard.view.own_events import OwnEvents
from offloop.consumers.dashboard.view.run_view import RunView

MAX_SPANS = 20_000  # the newest
_LONGEST = 300


class SpanView(NamedTuple):
    number: int  # counts the spans of a run from 1
    rank: int
    began: float  # seconds since 1970
    seconds: float
    id: int
    parent: int  # 0 for none
    name: str
    text: str  # its fields


class Spans:
    """The newest spans, requested and read while a page shows them. Custom events go to the log of the run."""

    def __init__(self, view: RunView) -> None:
        self._view = view
        self._lock = threading.Lock()
        self._spans: deque[SpanView] = deque(maxlen=MAX_SPANS)
        self._count = 0
        self.events: OwnEvents = OwnEvents(view, ANY_CUSTOM, self._take)

    def after(self, number: int, most: int) -> list[SpanView]:
        """Return later spans, in the order of their ends."""
        with self._lock:
            first = max(len(self._spans) - (self._count - number), 0)
            return [self._spans[place] for place in range(first, min(first + most, len(self._spans)))]

    def _take(self, state: Snapshot) -> None:
        if state.event is HEALTH:
            return
        name, span = state.event.value[1:], read_span(state.fields)
        # Without the context of the training.
        text = in_words({name: value for name, value in state._body.fields.items() if name != SPAN})[:_LONGEST]
        if span is None:
            self._view.take_own(state, f"{name}: {text}" if text else name)
            return
        seconds = span.duration / 1e9
        with self._lock:
            self._count += 1
            place = state.rank, state.time - seconds, seconds, span.id, span.parent
            self._spans.append(SpanView(self._count, *place, name, text))
