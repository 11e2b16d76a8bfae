"""Frames of the protocol: encoding and decoding. ``docs/protocol.md`` is the specification."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import msgpack
import msgspec

from offloop.bus.errors import ConfigurationError, InvalidRunNameError, ProtocolError
from offloop.bus.types.timestamp import TrainingTime

PROTOCOL_VERSION = 1
MAX_FRAME = 16 * 1024 * 1024
MAX_HELLO = 1 << 20  # limit of our publishers' ``hello``, in bytes
MAX_TOPIC = 256
MAX_DEPTH = 16
MAX_ELEMENTS = 1 << 20
MAX_CONTAINERS = 1 << 16
_MOST_GIVEN = MAX_CONTAINERS - 4096  # in given fields: the rest of the event has further lists and maps
MAX_TIME = (1 << 63) - 1
MAX_NUMBER = (1 << 63) - 1

DELIMITER = b"\0"
END = "$end"
HEARTBEAT = "$beat"
DEMAND = "$demand"
COMMAND = "$command"
CHECKPOINT = "$checkpoint"
CUT = "$cut"
FRAME_BATCH = "events"
ALL = "$all"
BASE = "$base"
MAX_BATCH_FRAMES = 4096

MAX_RUN_NAME = 100
_RUN_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_RUN_NAME - 1}}}\Z")


class Topic(NamedTuple):
    """Address of a frame: run, event (or a mark such as ``$end``), and rank."""

    run: str
    name: str
    rank: int

    def encode(self) -> bytes:
        return f"{self.run}/{self.name}/{self.rank}".encode() + DELIMITER


if TYPE_CHECKING:
    _Map = msgspec.Raw | dict[str, Any]
    _Previous = msgspec.Raw | TrainingTime | None
else:
    _Map = _Previous = msgspec.Raw

_Number = Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)]


class EventHead(msgspec.Struct, array_like=True, eq=False, gc=False):
    """The first elements of an event, enough to count it."""

    version: int
    attempt: _Number
    seq: _Number
    base_seq: Annotated[int, msgspec.Meta(ge=0)]
    time: Annotated[int, msgspec.Meta(ge=0, le=MAX_TIME)]


class EventBody(EventHead, array_like=True, eq=False, gc=False):
    """One event in wire format, in the order of the table in ``docs/protocol.md``.

    ``previous`` and the context are decoded on access, and raise ProtocolError if they are malformed."""

    timestamp: TrainingTime
    previous_: _Previous
    fields: dict[str, Any]
    context_: _Map

    @property
    def previous(self) -> TrainingTime | None:
        """Training time before the last batch, epoch or iteration ended."""
        previous = self.previous_
        if isinstance(previous, msgspec.Raw):
            try:
                previous = self.previous_ = _decode_previous(previous)
            except ValueError as error:
                raise ProtocolError(f"the training time before event {self.seq} is malformed: {error}") from None
        return previous

    @property
    def context(self) -> dict[str, Any]:
        """The fields that seldom change. Limits apply to it as to ``fields``."""
        context = self.context_
        if not isinstance(context, dict):
            context = self.context_ = _decode_map(self, "context", context)
        return context

    def __iter__(self) -> Iterator[Any]:
        elements = self.version, self.attempt, self.seq, self.base_seq, self.time, self.timestamp, self.previous
        return iter((*elements, self.fields, self.context))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EventBody) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return f"EventBody{tuple(self)}"


class Control(NamedTuple):
    """A message between one peer and the broker."""

    kind: str
    content: dict[str, Any]
    version: int = PROTOCOL_VERSION  # protocol version of the sender


def check_run_name(name: str) -> str:
    """Return ``name``, or raise InvalidRunNameError if it cannot be used in topics and paths."""
    if not isinstance(name, str) or not _RUN_NAME.match(name):
        raise InvalidRunNameError(
            f"{name!r} cannot be a run name: use 1 to {MAX_RUN_NAME} letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit",
            run=name,
        )
    return name


def event_encoder(topic: Topic, attempt: int) -> Callable[[int, int, int, Any, Any, dict[str, Any], bytes], bytes]:
    """Return a function that encodes events of ``topic``. Its ``context`` is packed by :func:`pack_map` beforehand."""
    front = topic.encode()
    pack = _events.encode

    def encode(
        seq: int, base_seq: int, time: int, timestamp: Any, previous: Any, fields: dict[str, Any], context: bytes
    ) -> bytes:
        return front + pack((PROTOCOL_VERSION, attempt, seq, base_seq, time, timestamp, previous, fields, context))

    return encode


def _to_plain(value: Any) -> Any:
    kinds: tuple[type[Any], ...] = (float, int, str, bytes)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"can not serialize {type(value).__name__!r} object")


# Three times as fast as msgpack. It also packs dates, sets and other types, so check_plain must refuse these first.
_events = msgspec.msgpack.Encoder(enc_hook=_to_plain)


def pack_map(values: dict[str, Any]) -> bytes:
    return msgspec.Raw(_events.encode(values))


def encode_body(event: EventBody) -> bytes:
    """Encode an event as :func:`event_encoder` does, without its topic."""
    return _events.encode((PROTOCOL_VERSION, *tuple(event)[1:]))


def as_utf8(text: str) -> str:
    """Escape lone surrogates, such as those for bytes of a path that are not UTF-8."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def copy_map(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a map in the form in which it arrives elsewhere.

    Raises TypeError, ValueError, OverflowError or ConfigurationError: it cannot be sent."""
    packed = _events.encode(values)
    check_size(len(packed))
    copied: dict[str, Any] = msgspec.msgpack.decode(packed)
    return copied


def check_size(size: int) -> None:
    """Raise ConfigurationError for an event larger than any peer accepts."""
    if size > MAX_FRAME:
        raise ConfigurationError(f"an event of {size:,} bytes cannot be sent: at most {MAX_FRAME:,} are allowed")


def mark_context(world_size: int, local_world_size: int) -> bytes:
    """Pack the context of marks: the number of ranks, and of those that publish to this broker if it differs."""
    here = {} if local_world_size == world_size else {"local_world_size": local_world_size}
    return pack_map({"world_size": world_size, **here})


def encode_control(kind: str, content: dict[str, Any]) -> bytes:
    return DELIMITER + bytes(msgpack.packb([PROTOCOL_VERSION, kind, content]))


def encode_frame_batch(frames: list[bytes]) -> bytes:
    """Encode events of one publisher as one message to the control endpoint."""
    # This runs in the training thread, and msgpack takes three times as long.
    return DELIMITER + _events.encode([PROTOCOL_VERSION, FRAME_BATCH, {"frames": frames}])


class _Frames(msgspec.Struct, gc=False):
    frames: Annotated[list[bytes], msgspec.Meta(max_length=MAX_BATCH_FRAMES)]


class _FrameBatch(msgspec.Struct, array_like=True, gc=False):
    version: int
    kind: Literal["events"]
    content: _Frames


_decode_frame_batch = msgspec.msgpack.Decoder(_FrameBatch).decode


def decode_frame_batch(body: bytes) -> list[bytes]:
    try:
        return _decode_frame_batch(body).content.frames
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message is not a batch of at most {MAX_BATCH_FRAMES} events: {error}") from None


def is_frame_batch(front: bytes) -> bool:
    return front[3:10] == b"\xa6" + FRAME_BATCH.encode()


def encode_heartbeat(
    run: str,
    attempt: int,
    time: int,
    positions: dict[int, tuple[int, int]],
    size: int = 0,
    on_disk: dict[int, tuple[int, int]] | None = None,
) -> bytes:
    """Encode a heartbeat: last numbers received from each rank, the recording's size on disk, last numbers on disk."""
    heartbeat = [PROTOCOL_VERSION, attempt, time, _position_rows(positions), size, _position_rows(on_disk or {})]
    return Topic(run, HEARTBEAT, 0).encode() + bytes(msgpack.packb(heartbeat))


def _position_rows(positions: dict[int, tuple[int, int]]) -> list[tuple[int, int, int]]:
    return [(rank, seq, base_seq) for rank, (seq, base_seq) in positions.items()]


def decode_positions(rows: Any) -> dict[int, tuple[int, int]]:
    positions = {}
    for row in rows if type(rows) is list else [None]:
        if type(row) is not list or len(row) < 3 or not all(type(number) is int and number >= 0 for number in row[:3]):
            raise ProtocolError("the positions of a heartbeat are not rows of rank, seq and base_seq")
        positions[row[0]] = row[1], row[2]
    return positions


def split_frame(frame: bytes) -> tuple[Topic | None, bytes]:
    """Split a frame into topic (``None`` for control messages) and body, or raise ProtocolError."""
    if len(frame) > MAX_FRAME:
        raise _too_large("frame", len(frame))
    end = frame.find(DELIMITER, 0, MAX_TOPIC + 1)
    if end < 0:
        raise ProtocolError(
            f"a frame of {len(frame)} bytes has no topic in its first {MAX_TOPIC} bytes",
            size=len(frame),
            limit=MAX_TOPIC,
        )
    if end == 0:
        return None, frame[1:]
    return parse_topic(frame[:end]), frame[end + 1 :]


def _too_large(what: str, size: int) -> ProtocolError:
    return ProtocolError(f"a {what} of {size} bytes is over the limit of {MAX_FRAME}", size=size, limit=MAX_FRAME)


def parse_topic(topic: bytes) -> Topic:
    """Parse ``RUN/NAME/RANK``, or raise ProtocolError."""
    try:
        run, name, rank = topic.decode().split("/")
        parsed = Topic(run, name, int(rank))
    except ValueError:
        raise ProtocolError(f"{topic[:80]!r} is not a topic of the form RUN/EVENT/RANK") from None
    if not _RUN_NAME.match(run) or not name or parsed.rank < 0 or not rank.isascii() or not rank.isdigit():
        raise ProtocolError(f"{topic[:80]!r} is not a topic of the form RUN/EVENT/RANK")
    return parsed


def decode_body(body: bytes) -> list[Any]:
    """Decode an array that begins with a version, within the protocol's limits, or raise ProtocolError."""
    if len(body) > MAX_FRAME:
        raise _too_large("body", len(body))
    array = _unpack(body, "a body")
    if not isinstance(array, list) or not array or type(array[0]) is not int:
        raise ProtocolError("a body is not an array that begins with the protocol version")
    return array


def _unpack(packed: bytes | memoryview, what: str) -> Any:
    try:
        return msgpack.unpackb(
            packed,
            strict_map_key=False,
            max_array_len=MAX_ELEMENTS,
            max_map_len=MAX_ELEMENTS,
            timestamp=1,  # seconds
            ext_hook=_refuse_extension,
            **_counted(len(packed)),
        )
    # For hostile bytes msgpack raises its own errors, ValueError, RecursionError, and TypeError for a map as a key.
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        # Its text for a too deep nesting is empty.
        reason = str(error) or ("nested too deep" if isinstance(error, msgpack.StackError) else type(error).__name__)
        raise ProtocolError(f"{what} of {len(packed)} bytes is not MessagePack: {reason}") from None


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError(f"it has a value of the extension type {code}")


def _counted(size: int) -> dict[str, Callable[[Any], Any]]:
    """Make ``unpackb`` stop at too many containers: an empty list takes one byte packed and 64 in memory."""
    if size <= MAX_CONTAINERS:
        return {}
    left = iter(range(MAX_CONTAINERS))

    def count(container: Any) -> Any:
        if next(left, None) is None:
            raise ValueError(f"more than {MAX_CONTAINERS} arrays and maps")
        return container

    return {"list_hook": count, "object_hook": count}


# Type of nearly all maps: text to numbers, texts, lists and maps, a few levels deep. Deeper maps are decoded by
# msgpack: each level doubles the size of this type, which every process builds at its start.
_scalar: Any = bool | int | float | str | None
_plain: Any = _scalar
for _depth in range(4):
    _plain = bool | int | float | str | list[_plain] | dict[str, _plain] | None
_decode_plain_map = msgspec.msgpack.Decoder(dict[str, _plain]).decode
_decode_scalar_map = msgspec.msgpack.Decoder(dict[str, _scalar]).decode


class _PlainFields(EventBody, array_like=True, eq=False, gc=False):
    fields: dict[str, _plain]


class _PlainEvent(_PlainFields, array_like=True, eq=False, gc=False):
    previous_: TrainingTime | None
    context_: dict[str, _plain]


class _PackedFields(EventBody, array_like=True, eq=False, gc=False):
    fields: msgspec.Raw  # type: ignore[assignment]


_decode_head = msgspec.msgpack.Decoder(EventHead).decode
_decode_previous = msgspec.msgpack.Decoder(TrainingTime | None).decode
_decode_plain_fields = msgspec.msgpack.Decoder(_PlainFields).decode
_decode_plain_event = msgspec.msgpack.Decoder(_PlainEvent).decode
_decode_packed_fields = msgspec.msgpack.Decoder(_PackedFields).decode


def decode_head(body: bytes) -> EventHead:
    """Decode the first elements of an event, or raise ProtocolError if they are malformed."""
    return _checked(_decode_head, body)


def decode_event(body: bytes) -> EventBody:
    """Decode an event. Raise ProtocolError if it is malformed, except in what is decoded on access."""
    if len(body) <= MAX_CONTAINERS:
        try:
            event: EventBody = _decode_plain_fields(body)
        except (ValueError, RecursionError):
            pass  # see _decode_map
        else:
            if event.base_seq <= event.seq:
                return event
    whole: EventBody = _checked(_decode_packed_fields, body)
    whole.fields = _decode_map(whole, "fields", whole.fields)
    return whole


def decode_whole_event(body: bytes) -> EventBody:
    """Decode all of an event, in little more time than :func:`decode_event`, or raise ProtocolError."""
    if len(body) <= MAX_CONTAINERS:
        try:
            event: EventBody = _decode_plain_event(body)
        except (ValueError, RecursionError):
            pass  # see _decode_map
        else:
            if event.base_seq <= event.seq:
                return event
    event = decode_event(body)
    tuple(event)
    return event


_Head = TypeVar("_Head", bound=EventHead)


def _checked(decode: Callable[[bytes], _Head], body: bytes) -> _Head:
    if len(body) > MAX_FRAME:
        raise _too_large("body", len(body))
    try:
        event = decode(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"an event's elements have wrong types: {error}") from None
    if event.base_seq > event.seq:
        raise ProtocolError(f"event {event.seq} has the base_seq {event.base_seq}, which is more")
    return event


def decode_scalars(packed: "_Map") -> "_Map":
    """Decode a map of numbers, texts and nil that several events may share; return any other as it is."""
    if not isinstance(packed, dict) and len(memoryview(packed)) <= MAX_CONTAINERS:
        with suppress(ValueError, RecursionError):
            return _decode_scalar_map(packed)
    return packed


def _decode_map(event: EventBody, name: str, packed: Any) -> dict[str, Any]:
    data = memoryview(packed)
    if len(data) <= MAX_CONTAINERS:
        try:
            return _decode_plain_map(data)
        except (ValueError, RecursionError):
            pass  # valid maps with bytes or other keys, and malformed maps: _unpack decodes or rejects them
    what = f"the {name} of event {event.seq}"
    values = _unpack(data, what)
    if type(values) is not dict or not is_shallow(values):
        raise ProtocolError(f"{what} are not a map that is nested at most {MAX_DEPTH} deep")
    return values


def sequence_number(body: bytes) -> int | None:
    try:
        number = decode_body(body)[2]
    except (ProtocolError, IndexError):
        return None
    return number if type(number) is int and number >= 1 else None


_PLAIN = frozenset({float, int, str, bool, bytes, type(None)})
_CONTAINERS = (dict, list, tuple)


def is_shallow(container: Any, levels: int = MAX_DEPTH) -> bool:
    """Return whether the nesting has at most ``levels``, so that recursive code such as ``repr`` is safe."""
    for value in container.values() if isinstance(container, dict) else container:
        # The exact type is checked first: most values are plain, and this runs for every event.
        if type(value) in _PLAIN or not isinstance(value, _CONTAINERS):
            continue
        if levels == 0 or not is_shallow(value, levels - 1):
            return False
    return True


def check_plain(container: Any, levels: int = MAX_DEPTH) -> int:
    """Return the number of lists and maps. Raise TypeError or ValueError for values that readers would refuse."""
    count = 1
    if len(container) > MAX_ELEMENTS:
        raise ValueError(f"a list or map has {len(container):,} elements, at most {MAX_ELEMENTS:,} are allowed")
    if isinstance(container, dict) and not _PLAIN.issuperset(map(type, container)):
        # Readers refuse lists as keys.
        for key in container:
            if type(key) not in _PLAIN:
                _to_plain(key)
    for value in container.values() if isinstance(container, dict) else container:
        if type(value) in _PLAIN:
            continue
        if isinstance(value, _CONTAINERS):
            if levels == 0:
                raise ValueError(f"lists and maps are nested deeper than {MAX_DEPTH}")
            count += check_plain(value, levels - 1)
        elif not isinstance(value, bytearray | memoryview):
            _to_plain(value)
    if count > _MOST_GIVEN:
        raise ValueError(f"it has more than {_MOST_GIVEN:,} lists and maps")
    return count


def unsendable(values: Mapping[str, Any], levels: int = 3) -> str:
    """Return the name of the first value that cannot be sent, with dots between the names of nested maps, or ``""``."""
    for name, value in values.items():
        try:
            check_plain([value])
            _events.encode(value)
        except Exception:  # noqa: BLE001  a value's methods may raise anything
            inner = unsendable(value, levels - 1) if levels and isinstance(value, dict) else ""
            return f"{name}.{inner}" if inner else str(name)
    return ""


def decode_control(body: bytes) -> Control:
    """Decode the body of a control message, or raise ProtocolError."""
    array = decode_body(body)
    if len(array) < 3 or not isinstance(array[1], str) or not isinstance(array[2], dict):
        raise ProtocolError("a control message is not an array of version, kind and content")
    if not is_shallow(array[2]):
        raise ProtocolError(f"a control message is nested deeper than {MAX_DEPTH}")
    return Control(array[1], array[2], array[0])
