"""The progress of a consumer, in a form that can be stored.

Everything that a :class:`~offloop.consumers.runner.runner.Runner` knows between two events is one :class:`Committed`,
stored as a whole or not at all. Events after the last commit are handled again, from the state before them, and what
they had written is taken back first: so every event counts exactly once, if a callback's knowledge is in its
``state_dict()`` and its output goes through the logger."""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec

from offloop.bus.errors import ConfigurationError, RecordingError
from offloop.bus.protocol.frames import Topic, decode_event, event_encoder, pack_map, split_frame
from offloop.bus.protocol.order import Ending, Gap
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event

Content = TypeVar("Content")

COMMIT_EVENTS = 1000
"""After how many handled events the progress is committed, unless another number is given."""

MAX_BYTES = 256 * 1024 * 1024
"""Limit of the packed form."""

_CHECKSUM_BYTES = 4


class CallbackState(NamedTuple):
    """A callback and how it did."""

    name: str
    errors: int
    disabled: bool
    """It gets no more events."""
    state: dict[str, Any]
    """Its ``state_dict()``."""


class DestinationState(NamedTuple):
    """A destination and how far it has written."""

    name: str
    state: dict[str, Any]
    """Its ``state_dict()``."""


class WorkerProgress(NamedTuple):
    """A background callback, and how far its stream was read."""

    positions: Mapping[int, tuple[int, int]]
    """Of each rank ``(seq, base_seq)`` of the last event that need not come again."""
    callback: CallbackState


@dataclass(frozen=True)
class Committed:
    """Progress of a consumer of one attempt of a run, between two events."""

    run_name: str
    attempt: int
    positions: Mapping[int, tuple[int, int]]
    """Of each rank ``(seq, base_seq)`` of the last event that need not come again."""
    last: bytes | None
    """The event handled last, see :func:`pack_snapshot`."""
    handled: int
    """Events that at least one callback was given."""
    callbacks: tuple[CallbackState, ...]
    destinations: tuple[DestinationState, ...]
    gaps: tuple[Gap, ...]
    """Events that are lost, as far as that was known."""
    ending: Ending | None
    """How the run ended, once everything is handled, closed and written: nothing is left to do then."""
    damage: str | None
    """The part of the recording that could not be read, at the end."""
    workers: tuple[WorkerProgress, ...] = ()
    """The background callbacks."""
    named: tuple[str, ...] = ()
    """The hyperparameters that callbacks have logged."""

    def pack(self) -> bytes:
        """The stored form. Raises ConfigurationError when a callback's or a destination's state holds something that
        cannot be stored."""
        try:
            return seal(self)
        except ConfigurationError:
            for name, state in self._states():
                try:
                    seal(state)
                except ConfigurationError as error:
                    raise ConfigurationError(f"{name}: {error}") from None
            raise

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for callback in (*self.callbacks, *(worker.callback for worker in self.workers)):
            yield callback.name, callback.state
        yield from self.destinations


def seal(content: object) -> bytes:
    """Content as MessagePack, behind its checksum.

    Raises :class:`offloop.bus.errors.ConfigurationError` for a state that cannot be stored, and for too much."""
    try:
        packed = msgspec.msgpack.encode(content, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigurationError(
            f"its state_dict() cannot be stored, {error}: only numbers of up to 64 bits, strings, bytes, lists, maps "
            "and None can"
        ) from None
    if len(packed) > MAX_BYTES:
        raise ConfigurationError(
            f"state_dict() of {len(packed)} bytes is over the limit of {MAX_BYTES}: keep in it only what is needed to "
            "continue"
        )
    return zlib.crc32(packed).to_bytes(_CHECKSUM_BYTES) + packed


def unseal(packed: bytes, kind: type[Content]) -> Content:
    """The content that :func:`seal` was given, of that type; tuples within states are lists.

    Raises :class:`offloop.bus.errors.RecordingError` when it is damaged; the message is to be completed by what it is
    about."""
    content = packed[_CHECKSUM_BYTES:]
    if zlib.crc32(content).to_bytes(_CHECKSUM_BYTES) != packed[:_CHECKSUM_BYTES]:
        raise RecordingError("is damaged: its checksum does not hold")
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RecordingError(f"is damaged: {error}") from None


def _plain(value: Any) -> Any:
    """A number or text of a class of its own, such as NumPy's."""
    for kind in (float, int, str):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"there is a {type(value).__name__} in it")


def pack_snapshot(snapshot: Snapshot) -> bytes:
    """The snapshot as a frame of the protocol, with everything that it carries."""
    encode = event_encoder(Topic(snapshot.run_name, snapshot.event.value, snapshot.rank), snapshot.attempt)
    previous = snapshot.previous_timestamp
    return encode(
        snapshot.seq,
        snapshot.base_seq,
        snapshot.time_ns,
        list(snapshot.timestamp.values),
        None if previous is None else list(previous.values),
        dict(snapshot.fields),
        pack_map({}),
    )


def unpack_snapshot(frame: bytes) -> Snapshot:
    """The snapshot of such a frame. Raises ProtocolError or ValueError."""
    topic, body = split_frame(frame)
    if topic is None:
        raise ValueError("a stored event is none")
    return Snapshot(Event(topic.name), topic.run, topic.rank, decode_event(body))
