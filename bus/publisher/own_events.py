"""Events of a training's own: custom events, spans, and rows of tables."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar, Token
from itertools import count
from time import perf_counter_ns
from typing import Any

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.frames import check_plain
from offloop.bus.publisher.logged import checked_step
from offloop.bus.publisher.table_rows import Rows, TableRows
from offloop.bus.types.deferred import as_text
from offloop.bus.types.event import ANY_CUSTOM, ANY_TABLE, CUSTOM, TABLE, Event
from offloop.bus.types.span import SPAN

_RESERVED = frozenset((SPAN, "logged", "on_demand", "late", "microbatch", "not_sent"))
_MAX_NAMES = 64  # names of events, and of tables, of one publisher

_ids = count(1)
_parent: ContextVar[int] = ContextVar("offloop_span", default=0)


class OwnEvents(ABC):
    """Publishes events that belong to no place in the training loop.

    An unrequested event or span costs less than a microsecond. Consumers request one by its name, such as
    ``@rollout_end``, or all by ``@*``; ``record`` of the training requests them for the recording."""

    requested_events: set[Event]
    """Events that are published; none without a stream."""

    def __init__(self) -> None:
        super().__init__()
        self._own_events: dict[str, Event] = {}
        self._tables = TableRows()

    @abstractmethod
    def publish_own(self, event: Event, fields: dict[str, Any]) -> None:
        """Publish a requested event."""

    def _refuse_own(self, what: str, error: Exception) -> None:
        """Raise ConfigurationError for an event or a row that cannot be published, or just report it.

        Other errors, such as those of the user's function that returns rows, are raised as they are."""
        if isinstance(error, TypeError | ValueError | OverflowError) and not isinstance(error, ConfigurationError):
            error = ConfigurationError(f"{what} cannot be sent ({error})")
        raise error

    @abstractmethod
    def room_for_rows(self) -> int:
        """Bytes that rows of tables may take in the send buffer now."""

    def _default_step(self) -> int:
        return 0

    def event(self, name: str, /, **fields: Any) -> None:
        """Publish an event of your own, such as ``rollout_end``, if it is requested.

        Args:
            name: 1 to 100 letters, digits, ``_``, ``.`` or ``-``, beginning with a letter or ``_``.
            fields: Numbers, texts, bytes, lists, maps and ``None``.

        Raises ConfigurationError for an invalid name or field where the loop is your own; elsewhere it is reported."""
        try:
            event = self._own_events.get(name) or self._own_event(CUSTOM, name)
            requested = self.requested_events
            if event in requested or ANY_CUSTOM in requested:
                self.publish_own(event, checked_fields(fields))
        except Exception as error:  # noqa: BLE001  a name or value of the user's may raise anything
            self._refuse_own(f"event {as_text(name)[:100]}", error)

    def span(self, name: str, /, **fields: Any) -> AbstractContextManager[dict[str, Any]]:
        """Publish how long a block took, as an event of your own at its end, if it is requested at its start.

            with run.span("generate", prompts=8) as span:
                span["tokens"] = len(generate(...))

        Spans nest, in threads and tasks too. The block may add fields. An exception becomes the field ``error``.

        ``name`` and ``fields`` are as for :meth:`event`."""
        try:
            event = self._own_events.get(name) or self._own_event(CUSTOM, name)
        except Exception as error:  # noqa: BLE001  as in event()
            self._refuse_own(f"span {as_text(name)[:100]}", error)
            return _Unrequested()
        requested = self.requested_events
        return _Span(self, event, fields) if event in requested or ANY_CUSTOM in requested else _Unrequested()

    def log_table(
        self,
        name: str,
        rows: Rows | Callable[[], Rows],
        columns: Sequence[str] | None = None,
        step: int | None = None,
    ) -> None:
        """Append rows to a table, such as prompts, completions and rewards. Rows are recorded, and never replaced.

            run.log_table("completions", [{"prompt": p, "completion": c, "reward": r} for p, c, r in samples])

        Rows beyond these limits are left out, counted and reported: 1 MiB a row, 32 MiB a step, 16 MiB a second, and
        half of the send buffer.

        Args:
            name: As for :meth:`event`.
            rows: Each a map of columns to cells, or a list of cells in the order of ``columns``. A cell is a number, a
                text, ``None``, a list of these, or an :class:`offloop.bus.Image`. A function that returns the rows is
                called only if a consumer requests the table, or ``record`` does.
            columns: Their names; needed for rows that are lists.
            step: By default the number of batches trained.

        Raises ConfigurationError for an invalid name, column or cell, and the error of the function, where the loop is
        your own; elsewhere they are reported."""
        try:
            event = self._own_events.get(f"{TABLE}{name}") or self._own_event(TABLE, name)
            requested = self.requested_events
            if not requested or (callable(rows) and event not in requested and ANY_TABLE not in requested):
                return
            if callable(rows):
                rows = rows()
            step = self._default_step() if step is None else checked_step(step)
            for fields in self._tables.pack(name, rows, columns, step, self.room_for_rows()):
                self.publish_own(event, fields)
            if self._tables.refused:
                self._refuse_own(f"table {name}", ConfigurationError(self._tables.refused))
        except Exception as error:  # noqa: BLE001  as in event(); so may the function
            self._refuse_own(f"table {as_text(name)[:100]}", error)

    def _own_event(self, kind: str, name: str) -> Event:
        if not isinstance(name, str) or name == "*":
            raise ConfigurationError(f"{name!r} cannot name an event or a table: use a text such as 'rollout_end'")
        event = Event(kind + name)
        same_kind = sum(one.value[0] == kind for one in self._own_events.values())
        if same_kind >= _MAX_NAMES:
            what = "tables" if kind == TABLE else "events"
            raise ConfigurationError(f"{name!r} is one of more than {_MAX_NAMES} {what}: put what varies into fields")
        self._own_events[name if kind == CUSTOM else event.value] = event
        return event


class _Unrequested:
    __slots__ = ()

    def __enter__(self) -> dict[str, Any]:
        return {}

    def __exit__(self, *_: object) -> None:
        pass


class _Span:
    __slots__ = ("_began", "_event", "_fields", "_id", "_owner", "_parent", "_token")

    def __init__(self, owner: OwnEvents, event: Event, fields: dict[str, Any]) -> None:
        self._owner, self._event, self._fields = owner, event, fields

    def __enter__(self) -> dict[str, Any]:
        self._id, self._parent = next(_ids), _parent.get()
        self._token: Token[int] = _parent.set(self._id)
        self._began = perf_counter_ns()
        return self._fields

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        duration = perf_counter_ns() - self._began
        # A generator may be left in another context than it was entered in.
        with suppress(ValueError):
            _parent.reset(self._token)
        owner, fields = self._owner, self._fields
        if kind is not None:
            fields.setdefault("error", kind.__name__)
        try:
            fields = checked_fields(fields)
            fields[SPAN] = [self._id, self._parent, duration]
            owner.publish_own(self._event, fields)
        except Exception as error:  # noqa: BLE001  as in event()
            owner._refuse_own(f"span {self._event.value[1:]}", error)


def checked_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the user's fields, or raise ConfigurationError, TypeError or ValueError if they cannot be sent."""
    if not _RESERVED.isdisjoint(fields):
        names = ", ".join(sorted(_RESERVED & fields.keys()))
        raise ConfigurationError(f"{names} cannot be a field of your own: use another name")
    check_plain(fields)
    return fields
