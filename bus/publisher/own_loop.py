"""Turns the reports of a user's own training loop into events."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeAlias

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.frames import check_plain, pack_map, unsendable
from offloop.bus.publisher.logged import MAX_LOGGED, LoggedValues, check_values
from offloop.bus.publisher.own_events import checked_fields
from offloop.bus.redaction import redact
from offloop.bus.types.actor import ACTOR, ActorName
from offloop.bus.types.deferred import LeftOut, is_deferred
from offloop.bus.types.demand import BASE_EVENTS
from offloop.bus.types.event import Event
from offloop.bus.types.hyperparameters import FIELD as HYPERPARAMETERS
from offloop.bus.types.source import FIELDS as SOURCE_FIELDS
from offloop.bus.types.time import Time
from offloop.bus.types.timestamp import Timestamp, TrainingTime

LOG_VALUES = 1000
_LOG_NS = 1_000_000_000  # logged values wait at most this long for an event that carries them
_COUNTS = TrainingTime._fields.index("total_wct")  # counts of a training time; durations follow
_CONTEXT_NAMES = ("max_duration", "dataloader_label", "dataloader_len")

Send: TypeAlias = Callable[..., None]
"""``Publisher.send``. It is passed and not kept, so that an unreferenced publisher is closed at once."""


class OwnLoop:
    """Progress and logged values of a user's loop. Its calls must not overlap.

    ``clock`` gives nanoseconds since 1970. The first event carries the source from ``info``."""

    def __init__(
        self,
        clock: Callable[[], int],
        info: Mapping[str, Any],
        world_size: int,
        left_out: LeftOut,
        actor: ActorName | None = None,
    ) -> None:
        self._clock = clock
        self._world_size = world_size
        self._began = clock()
        self._introduction = {name: info[name] for name in SOURCE_FIELDS if name in info}
        if actor is not None:
            self._introduction[ACTOR] = {"name": actor.name, "role": actor.role}
        self._context: tuple[dict[str, Any], bytes] = ({}, b"")
        self._planned: str | None = None  # the latest max_duration
        self._previous: TrainingTime | None = None
        # An actor's values belong to batches of the training.
        self._counts_batches = actor is not None
        self.reached: TrainingTime = Timestamp().values  # training time at the last event
        self.logged: LoggedValues = LoggedValues(left_out)
        self._logged_names: set[str] = set()
        self._logged_at = 0

    def take_timestamp(self, event: Event, fields: dict[str, Any]) -> TrainingTime:
        """Remove the counters from the fields. ``total_wct`` defaults to the time since construction.

        An event without counters happens at the time that the one before it has reached. Raises ConfigurationError for
        negative counts, and batch 0 at the end of a batch."""
        fields.setdefault("total_wct", self._total_wct())
        given = {name: fields.pop(name) for name in TrainingTime._fields if name in fields}
        values = Timestamp(**given).values
        counts = values[:_COUNTS]
        if min(counts) < 0 or (event is Event.BATCH_END and not values.batch and "batch" in given):
            negative = (f"{name} is {count}" for name, count in zip(values._fields, counts, strict=False) if count < 0)
            raise ConfigurationError(
                f"{next(negative, 'batch is 0')}: counts begin at 0, and at the end of the first batch, batch is 1"
            )
        return values if len(given) > 1 else self.reached._replace(total_wct=values.total_wct)

    def before(self, timestamp: TrainingTime) -> TrainingTime | None:
        """Training time at the start of the batch that ends at ``timestamp``."""
        # Every training starts at 0, also in a loop that publishes nothing before its first batch ends.
        return self._previous or (Timestamp().values if timestamp.batch == 1 else None)

    def prepare(self, fields: dict[str, Any]) -> bytes:
        """Convert the fields to their form on the wire; remove and return the packed context."""
        context = self._pack_context({name: fields.pop(name) for name in _CONTEXT_NAMES if name in fields})
        if "lr" in fields:
            given = fields["lr"] if isinstance(fields["lr"], dict) else {"optimizer": fields["lr"]}
            fields["lr"] = {optimizer: _read_rates(rates) for optimizer, rates in given.items()}
        loss = fields.get("loss")
        if loss is not None:
            fields["loss"] = None if is_deferred(loss) else _read_loss(loss)
        if HYPERPARAMETERS in fields:
            fields[HYPERPARAMETERS] = redact(fields[HYPERPARAMETERS])
        checked_fields(fields)
        return context

    def publish(
        self,
        send: Send,
        event: Event,
        timestamp: TrainingTime,
        fields: dict[str, Any],
        context: bytes,
        has_deferred: bool,
    ) -> None:
        if self._introduction:
            self._introduce(send, event, fields, context)
        carries = self.logged.count and event in BASE_EVENTS
        self.reached = timestamp
        if carries:
            fields["logged"] = self.logged.entries()
            has_deferred = has_deferred or self.logged.has_late
        send(event, timestamp, self.before(timestamp), fields, context, has_deferred, _in_turn=True)
        if carries:
            self.logged.clear()
        self._previous = timestamp
        self._counts_batches = self._counts_batches or timestamp.batch > 0

    def introduce(self, send: Send) -> None:
        """Send the first event, unless it was sent."""
        if self._introduction:
            self._introduce(send, Event.BATCH_END, {}, self._context[1] or self._pack_context({}))

    def publish_own(self, send: Send, event: Event, fields: dict[str, Any]) -> None:
        """Publish a custom event or rows of a table at the training time that was reached."""
        context = self._context[1] or self._pack_context({})
        if self._introduction:
            self._introduce(send, event, fields, context)
        send(event, self.reached, None, fields, context, _in_turn=True)

    def check(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return check_values(values, self._logged_names)

    def log(self, send: Send, values: dict[str, Any], step: int | None) -> None:
        logged = self.logged
        if step is None:
            step = self.reached[2] if self._counts_batches else logged.step_for(values)
        if logged.count and (self._is_due(step) or (logged.bound > MAX_LOGGED and logged.is_full())):
            self.publish_logged(send)
        if not logged.count:
            self._logged_at = self._clock()
        logged.add(values, step)

    def publish_logged(self, send: Send) -> None:
        logged = self.logged
        if not logged.count:
            return
        fields, has_late, step = {"logged": logged.entries()}, logged.has_late, logged.step
        context = self._context[1] or self._pack_context({})
        if self._introduction:
            self._introduce(send, Event.BATCH_END, fields, context)
        if self._counts_batches:
            # The batch has ended already. Nothing else happens at this event unless it is requested.
            send(Event.ITERATION_CHECKPOINT, self.reached, None, fields, context, has_late, _in_turn=True)
        else:
            before = Timestamp.from_values(self.reached)
            began = max(step, int(before.batch))
            self.reached = Timestamp(batch=began + 1, total_wct=self._total_wct()).values
            previous = Timestamp(batch=began, total_wct=before.total_wct).values
            send(Event.BATCH_END, self.reached, previous, fields, context, has_late, _in_turn=True)
        # clear() comes last: after a signal handler's exception values may be sent twice, and count once.
        logged.clear()

    def _total_wct(self) -> timedelta:
        return timedelta(microseconds=(self._clock() - self._began) // 1000)

    def _is_due(self, step: int) -> bool:
        """Return whether logged values must be sent before others are logged for ``step``."""
        if not self._counts_batches:
            return self.logged.has_other_than(step)
        return self.logged.count >= LOG_VALUES or self._clock() - self._logged_at >= _LOG_NS

    def _introduce(self, send: Send, event: Event, fields: dict[str, Any], context: bytes) -> None:
        """Send the source at INIT, where consumers expect it, with or before the first event."""
        introduction = self._introduction
        if event is Event.INIT:
            fields.update(introduction)
        else:
            send(Event.INIT, Timestamp().values, None, introduction, context, _in_turn=True)
        self._introduction = {}

    def _pack_context(self, context: dict[str, Any]) -> bytes:
        planned = context.pop("max_duration", None)
        if planned is not None and (text := str(planned)) != self._planned:
            Time.from_timestring(text)
            self._planned = text
        if self._planned is not None:
            context["max_duration"] = self._planned
        context["world_size"] = self._world_size
        known, packed = self._context
        if context != known:
            try:
                check_plain(context)
                packed = pack_map(context)
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"{unsendable(context)}: {error}") from None
            self._context = (context, packed)
        return packed


def check_loss(loss: Any) -> None:
    """Refuse a loss on a GPU: reading it would make the loop wait."""
    if getattr(loss, "is_cuda", False):
        raise ConfigurationError(
            "the loss is on a GPU: make gpu = offloop.trainer.device.GpuDevice() once and publish "
            "gpu.read_later(loss), or float(loss) if the loop may wait for it"
        )


def _read_rates(rates: Any) -> list[float]:
    try:
        return [float(rate) for rate in (rates if isinstance(rates, list | tuple) else [rates])]
    except Exception as error:  # noqa: BLE001  float() calls what the value brings
        raise ValueError(f"lr: {error}") from None


def _read_loss(loss: Any) -> float:
    try:
        return float(loss.detach() if hasattr(loss, "detach") else loss)
    except Exception as error:  # noqa: BLE001  float() calls what the value brings
        raise ValueError(f"loss: {error}") from None
