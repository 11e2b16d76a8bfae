"""How far a consumer is, in a form that can be stored: after ``kill -9`` it continues as if nothing had happened.

Everything that a :class:`~offloop.consumers.runner.runner.Runner` knows between two events is one :class:`Committed`,
stored as a whole or not at all. An event that was handled after the last commit is handled again, from the state before
it, and what it had written is taken back first: that makes every event count exactly once. It asks two things of a
callback: what it knows is in its ``state_dict()``, and what it has to say goes through the logger. A callback that
writes a file or sends a message by itself does that again for the events after the last commit.
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import msgpack

from offloop.bus.errors import ConfigurationError, ProtocolError, RecordingError
from offloop.bus.protocol.frames import Topic, decode_event, event_encoder, pack_map, split_frame
from offloop.bus.protocol.order import Ending, Gap
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event

Content = TypeVar("Content")

COMMIT_EVENTS = 1000
"""After how many handled events the progress is committed, unless another number is given."""

MAX_BYTES = 256 * 1024 * 1024
"""How large the packed form may be."""

_VERSION = 1


class CallbackState(NamedTuple):
    """A callback and how it did."""

    name: str
    errors: int
    """How often it raised."""
    disabled: bool
    """Whether it is given no more events."""
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
    """Where a consumer of one attempt of a run stands between two events."""

    run_name: str
    attempt: int
    positions: Mapping[int, tuple[int, int]]
    """Of each rank ``(seq, base_seq)`` of the last event that need not come again."""
    last: Snapshot | None
    """The event handled last."""
    handled: int
    """Events that at least one callback was given."""
    callbacks: tuple[CallbackState, ...]
    destinations: tuple[DestinationState, ...]
    gaps: tuple[Gap, ...]
    """Events that are lost, as far as that was known."""
    ending: Ending | None
    """How the run ended, once everything is handled, closed and written: nothing is left to do then."""
    damage: str | None
    """What of the recording could not be read, at the end."""
    workers: tuple[WorkerProgress, ...] = ()
    """The background callbacks."""
    named: tuple[str, ...] = ()
    """The hyperparameters that callbacks have logged."""

    def pack(self) -> bytes:
        """The stored form: a version, a checksum, and MessagePack.

        Raises:
            ConfigurationError: a callback's or a destination's state holds something that cannot be stored.
        """
        content: bytes = msgpack.packb(
            {
                "run": self.run_name,
                "attempt": self.attempt,
                "positions": dict(self.positions),
                "last": None if self.last is None else pack_snapshot(self.last),
                "handled": self.handled,
                "callbacks": [
                    [name, errors, disabled, pack_state("callback", name, state)]
                    for name, errors, disabled, state in self.callbacks
                ],
                "destinations": [[name, pack_state("logger", name, state)] for name, state in self.destinations],
                "gaps": self.gaps,
                "ending": None if self.ending is None else list(astuple(self.ending)),
                "damage": self.damage,
                "named": self.named,
                "workers": [
                    [dict(worker.positions), name, errors, disabled, pack_state("callback", name, state)]
                    for worker in self.workers
                    for name, errors, disabled, state in (worker.callback,)
                ],
            }
        )
        return seal(content)

    @classmethod
    def unpack(cls, packed: bytes) -> "Committed":
        """Reads the stored form.

        Raises:
            RecordingError: it is damaged, or of a newer version; the message is to be completed by what it is about.
        """
        return unseal(packed, cls._from_content)

    @classmethod
    def _from_content(cls, content: dict[str, Any]) -> "Committed":
        return cls(
            run_name=str(content["run"]),
            attempt=_whole(content["attempt"]),
            positions=_positions(content["positions"]),
            last=None if content["last"] is None else unpack_snapshot(content["last"]),
            handled=_whole(content["handled"]),
            callbacks=tuple(_callback(*told) for told in content["callbacks"]),
            destinations=tuple(
                DestinationState(str(name), unpack_state(state)) for name, state in content["destinations"]
            ),
            gaps=tuple(Gap(*map(_whole, gap)) for gap in content["gaps"]),
            ending=None if content["ending"] is None else Ending(*content["ending"]),
            damage=content["damage"],
            workers=tuple(
                WorkerProgress(_positions(positions), _callback(*told))
                for positions, *told in content.get("workers", ())
            ),
            named=tuple(map(str, content.get("named", ()))),
        )


def seal(content: bytes) -> bytes:
    """Adds a version and a checksum to packed content.

    Raises :class:`offloop.bus.errors.ConfigurationError` when it is too large."""
    packed: bytes = msgpack.packb([_VERSION, zlib.crc32(content), content])
    if len(packed) > MAX_BYTES:
        raise ConfigurationError(
            f"the callbacks' state_dict() of {len(packed)} bytes are over the limit of {MAX_BYTES}: "
            "keep in them only what is needed to continue"
        )
    return packed


def unseal(packed: bytes, read: Callable[[Any], Content]) -> Content:
    """What ``read`` makes of the map in what :func:`seal` gave.

    Raises :class:`offloop.bus.errors.RecordingError` when it is damaged, or of a newer version; the message is to be
    completed by what it is about."""
    try:
        version, checksum, content = msgpack.unpackb(packed)
        if version > _VERSION:
            raise RecordingError(f"is of version {version}, and this offloop reads up to {_VERSION}: update it")
        if zlib.crc32(content) != checksum:
            raise ValueError("its checksum does not hold")
        return read(msgpack.unpackb(content, strict_map_key=False))
    except (
        *(ValueError, TypeError, OverflowError, KeyError, AttributeError, RecursionError),
        *(msgpack.UnpackException, ProtocolError),
    ) as error:
        raise RecordingError(f"is damaged: {error or type(error).__name__}") from None


class CommitStore(Protocol):
    """Where a runner's progress is kept."""

    def load(self) -> Committed | None:
        """What was committed last; ``None`` at the first start."""

    def commit(self, committed: Committed) -> None:
        """Stores it in the place of what was there, as a whole or not at all.

        Raises:
            RunDirectoryError: it cannot be stored at this moment.
            ReplacedError: another consumer has taken over the name, where that is possible.
        """


def _positions(told: dict[Any, Any]) -> dict[int, tuple[int, int]]:
    return {_whole(rank): (_whole(seq), _whole(base_seq)) for rank, (seq, base_seq) in told.items()}


def _callback(name: Any, errors: Any, disabled: Any, state: Any) -> CallbackState:
    return CallbackState(str(name), _whole(errors), bool(disabled), unpack_state(state))


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def pack_state(kind: str, name: str, state: dict[str, Any]) -> bytes:
    """A ``state_dict()`` as MessagePack.

    Raises :class:`offloop.bus.errors.ConfigurationError` when it holds something that cannot be stored."""
    try:
        return bytes(msgpack.packb(state))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"the state_dict() of {kind} {name} cannot be stored, {error}: "
            "only numbers of up to 64 bits, strings, bytes, lists, maps and None can"
        ) from None


def unpack_state(packed: bytes) -> dict[str, Any]:
    """What :func:`pack_state` was given; tuples are lists.

    Raises :class:`ValueError` and what MessagePack raises when it is none."""
    state = msgpack.unpackb(packed, strict_map_key=False)
    if not isinstance(state, dict):
        raise ValueError("a state_dict() is not a map")
    return state


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
    """The snapshot of such a frame.

    Raises:
        ProtocolError: the bytes are not a frame.
        ValueError: the frame is not an event.
    """
    topic, body = split_frame(frame)
    if topic is None:
        raise ValueError("a stored event is none")
    return Snapshot(Event(topic.name), topic.run, topic.rank, decode_event(body))
