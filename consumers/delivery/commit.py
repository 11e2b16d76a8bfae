"""The progress of a consumer, in a form that can be stored.

Everything that a :class:`~offloop.consumers.runner.runner.Runner` knows between two events is one :class:`Committed`,
stored as a whole or not at all. Events after the last commit are handled again, after their output was taken back."""

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

COMMIT_EVENTS = 1000  # handled events between two commits, by default

MAX_BYTES = 256 * 1024 * 1024  # limit of the packed form

_CHECKSUM_BYTES = 4


class CallbackState(NamedTuple):
    name: str
    errors: int
    disabled: bool  # it gets no more events
    state: dict[str, Any]


class DestinationState(NamedTuple):
    name: str
    state: dict[str, Any]


class WorkerProgress(NamedTuple):
    positions: Mapping[int, tuple[int, int]]  # rank to (seq, base_seq) of the last event that need not come again
    callback: CallbackState


@dataclass(frozen=True)
class Committed:
    """Progress of a consumer of one attempt of a run, between two events."""

    run_name: str
    attempt: int
    positions: Mapping[int, tuple[int, int]]  # rank to (seq, base_seq) of the last event that need not come again
    last: bytes | None  # the last handled event, see pack_snapshot
    handled: int  # events that at least one callback received
    callbacks: tuple[CallbackState, ...]
    destinations: tuple[DestinationState, ...]
    gaps: tuple[Gap, ...]  # known lost events
    ending: Ending | None  # how the run ended, once everything is handled, closed and written
    damage: str | None  # the unreadable part of the recording, at the end
    workers: tuple[WorkerProgress, ...] = ()
    named: tuple[str, ...] = ()  # the hyperparameters that callbacks have logged
    run_id: str | None = None  # identity of the run; None if unknown

    def pack(self) -> bytes:
        """Return the stored form. Raises ConfigurationError, with the name, for a state that cannot be stored."""
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
    """Content as MessagePack, after its checksum. Raises ConfigurationError if it cannot be stored or is too large."""
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
    """Return the content that was given to :func:`seal`; tuples within states are lists.

    Raises RecordingError when it is damaged; its message follows the name of the file."""
    content = packed[_CHECKSUM_BYTES:]
    if zlib.crc32(content).to_bytes(_CHECKSUM_BYTES) != packed[:_CHECKSUM_BYTES]:
        raise RecordingError("is damaged: its checksum does not hold")
    try:
        return msgspec.msgpack.decode(content, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RecordingError(f"is damaged: {error}") from None


def _plain(value: Any) -> Any:
    for kind in (float, int, str):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"there is a {type(value).__name__} in it")


def pack_snapshot(snapshot: Snapshot) -> bytes:
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
    topic, body = split_frame(frame)
    if topic is None:
        raise ValueError("malformed stored event")
    return Snapshot(Event(topic.name), topic.run, topic.rank, decode_event(body))
