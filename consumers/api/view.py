"""The part of a snapshot that one callback sees."""

from collections.abc import Iterator

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.demand import Demand
from offloop.bus.types.event import Event
from offloop.bus.types.intervals import MICROBATCH_EVENTS, EventPosition, batch_number
from offloop.bus.types.timestamp import TrainingTime


def view_for(demand: Demand, snapshot: Snapshot) -> Snapshot | None:
    """Return the snapshot with the events and fields of this demand only; ``None`` without any.

    A callback sees the same live and in a replay, beside any other callbacks."""
    event = snapshot.event
    if event not in demand.events:
        return None
    on_demand = snapshot.on_demand
    if not on_demand and demand.is_at_every_batch(event):
        return snapshot
    values = (snapshot.timestamp.values, snapshot.eval_timestamp.values, snapshot.predict_timestamp.values)
    number, position = batch_number(event, *values), _position_of(snapshot) if demand.is_timed(event) else None
    due = {*demand.due_fields(event, number, position), *_overdue_fields(demand, snapshot)}
    if not due and not demand.is_due(event, number, position):
        return None
    hidden = set(on_demand) - due
    return snapshot.without(hidden) if hidden else snapshot


def _overdue_fields(demand: Demand, snapshot: Snapshot) -> Iterator[str]:
    """Fields of the demand that were due at an earlier event and come with this one."""
    overdue = snapshot.fields["late"] if "late" in snapshot.on_demand else None
    for name, overdue_at in overdue.items() if isinstance(overdue, dict) else ():
        if demand.has_field(snapshot.event, name) and name in snapshot.on_demand:
            try:
                positions = [
                    EventPosition(Event(event), TrainingTime(*now), None if before is None else TrainingTime(*before))
                    for event, now, before in overdue_at
                ]
            except (TypeError, ValueError):
                continue
            now = _position_of(snapshot)
            for one in positions:
                position = now._replace(event=one.event, timestamp=one.timestamp, previous=one.previous)
                number = batch_number(one.event, one.timestamp)
                if name in demand.due_fields(one.event, number, position):
                    yield name
                    break


def _position_of(snapshot: Snapshot) -> EventPosition:
    event = snapshot.event
    previous = snapshot.previous_timestamp
    return EventPosition(
        event,
        snapshot.timestamp.values,
        None if previous is None else previous.values,
        snapshot.eval_timestamp.values,
        snapshot.predict_timestamp.values,
        snapshot.max_duration,
        snapshot.dataloader_len,
        snapshot.fields.get("microbatch", 0) if event in MICROBATCH_EVENTS else 0,
    )
