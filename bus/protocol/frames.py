"""The protocol's frames as plain functions: bytes in, values out, no sockets. ``docs/protocol.md`` is the
specification."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack

from bus.errors import InvalidRunNameError, ProtocolError
from bus.types.timestamp import TrainingTime

PROTOCOL_VERSION = 1
MAX_FRAME = 16 * 1024 * 1024
MAX_TOPIC = 256
MAX_DEPTH = 16
MAX_ELEMENTS = 1 << 20
MAX_CONTAINERS = 1 << 16
MAX_TIME = (1 << 63) - 1
MAX_NUMBER = 1 << 63

DELIMITER = b"\0"
END = "$end"
HEARTBEAT = "$beat"
DEMAND = "$demand"
COMMAND = "$command"
CHECKPOINT = "$checkpoint"
CUT = "$cut"
FRAME_BATCH = "events"

_COUNTS = len(TrainingTime._fields)
_EVENT_ELEMENTS = 9
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")


class Topic(NamedTuple):
    """Where a frame belongs: the run, the event's value (or a mark such as ``$end``), and the rank."""

    run: str
    name: str
    rank: int

    def encode(self) -> bytes:
        """The topic as it stands at the front of a frame, with the delimiter."""
        return f"{self.run}/{self.name}/{self.rank}".encode() + DELIMITER


class EventBody(NamedTuple):
    """One event as it travels, in the order of the table in ``docs/protocol.md``."""

    version: int
    attempt: int
    seq: int
    base_seq: int
    time: int
    timestamp: TrainingTime
    previous: TrainingTime | None
    fields: dict[str, Any]
    context: dict[str, Any]


class Control(NamedTuple):
    """A message between one peer and the broker."""

    kind: str
    content: dict[str, Any]
    version: int = PROTOCOL_VERSION
    """Version of the protocol that the sender speaks."""


def check_run_name(name: str) -> str:
    """Returns ``name``, or raises :class:`~bus.errors.InvalidRunNameError` when it cannot stand in a topic and a
    path."""
    if not isinstance(name, str) or not _RUN_NAME.match(name):
        raise InvalidRunNameError(
            f"{name!r} cannot be a run name: use 1 to 100 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit",
            run=name,
        )
    return name


def event_encoder(topic: Topic, attempt: int) -> Callable[[int, int, int, Any, Any, dict[str, Any], bytes], bytes]:
    """Makes the function that turns one event of ``topic`` into a frame.

    All that is the same for every event of a topic is packed once, here; the function takes ``(seq, base_seq, time,
    timestamp, previous, fields, context)`` where ``context`` is a map that is packed already.
    """
    # The array is written in two pieces so that `context` can be appended as bytes: its header and the two constant
    # elements stand in the prefix, and `pack` gives the next six with a one-byte header that is cut off.
    constant: bytes = msgpack.packb(PROTOCOL_VERSION) + msgpack.packb(attempt)
    prefix = topic.encode() + bytes([0x90 | _EVENT_ELEMENTS]) + constant
    pack = msgpack.Packer().pack

    def encode(
        seq: int, base_seq: int, time: int, timestamp: Any, previous: Any, fields: dict[str, Any], context: bytes
    ) -> bytes:
        packed: bytes = pack((seq, base_seq, time, timestamp, previous, fields))
        return prefix + packed[1:] + context

    return encode


def pack_map(values: dict[str, Any]) -> bytes:
    """A map as MessagePack: the context of an event."""
    return bytes(msgpack.packb(values))


def encode_control(kind: str, content: dict[str, Any]) -> bytes:
    """A control message as a frame."""
    return DELIMITER + bytes(msgpack.packb([PROTOCOL_VERSION, kind, content]))


def encode_frame_batch(frames: list[bytes]) -> bytes:
    """Several events of one publisher as one message to the control endpoint."""
    return encode_control(FRAME_BATCH, {"frames": frames})


def frames_of(batch: bytes) -> list[bytes]:
    """The frames of a message that :func:`encode_frame_batch` has made."""
    frames: list[bytes] = decode_control(split_frame(batch)[1]).content["frames"]
    return frames


def is_frame_batch(front: bytes) -> bool:
    """Whether a control message that begins like this holds events, without reading it further."""
    return front[3:10] == b"\xa6" + FRAME_BATCH.encode()


def encode_heartbeat(
    run: str,
    attempt: int,
    time: int,
    positions: dict[int, tuple[int, int]],
    size: int = 0,
    on_disk: dict[int, tuple[int, int]] | None = None,
) -> bytes:
    """The broker's sign of life for one run, with the last ``seq`` and ``base_seq`` that it has collected from each
    rank, how many bytes of the recording are on disk, and the last numbers in those."""
    heartbeat = [PROTOCOL_VERSION, attempt, time, _position_rows(positions), size, _position_rows(on_disk or {})]
    return Topic(run, HEARTBEAT, 0).encode() + bytes(msgpack.packb(heartbeat))


def _position_rows(positions: dict[int, tuple[int, int]]) -> list[tuple[int, int, int]]:
    return [(rank, seq, base_seq) for rank, (seq, base_seq) in positions.items()]


def decode_positions(rows: Any) -> dict[int, tuple[int, int]]:
    """Of each rank ``(seq, base_seq)``, from the rows ``[rank, seq, base_seq]`` of a heartbeat.

    Raises:
        ProtocolError: the rows are malformed.
    """
    positions = {}
    for row in rows if type(rows) is list else [None]:
        if type(row) is not list or len(row) < 3 or not all(type(number) is int and number >= 0 for number in row[:3]):
            raise ProtocolError("the positions of a heartbeat are not rows of rank, seq and base_seq")
        positions[row[0]] = row[1], row[2]
    return positions


def split_frame(frame: bytes) -> tuple[Topic | None, bytes]:
    """Splits a frame into topic and body; the topic of a control message is ``None``.

    Raises:
        ProtocolError: the frame is too large, or its front is not a topic.
    """
    if len(frame) > MAX_FRAME:
        raise ProtocolError(
            f"a frame of {len(frame)} bytes is over the limit of {MAX_FRAME}", size=len(frame), limit=MAX_FRAME
        )
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


def parse_topic(topic: bytes) -> Topic:
    """Reads ``RUN/NAME/RANK``; raises :class:`~bus.errors.ProtocolError` when it is anything else."""
    try:
        run, name, rank = topic.decode().split("/")
        parsed = Topic(run, name, int(rank))
    except ValueError:
        raise ProtocolError(f"{topic[:80]!r} is not a topic of the form RUN/EVENT/RANK") from None
    if not _RUN_NAME.match(run) or not name or parsed.rank < 0 or not rank.isascii() or not rank.isdigit():
        raise ProtocolError(f"{topic[:80]!r} is not a topic of the form RUN/EVENT/RANK")
    return parsed


def decode_body(body: bytes) -> list[Any]:
    """Decodes a body within the protocol's limits: an array with a version first.

    Raises:
        ProtocolError: the bytes are malformed, or over a limit.
    """
    if len(body) > MAX_FRAME:
        raise ProtocolError(
            f"a body of {len(body)} bytes is over the limit of {MAX_FRAME}", size=len(body), limit=MAX_FRAME
        )
    try:
        array = msgpack.unpackb(
            body,
            strict_map_key=False,
            max_array_len=MAX_ELEMENTS,
            max_map_len=MAX_ELEMENTS,
            **_counted(body),
        )
    # What msgpack raises for hostile bytes ranges from its own errors over ValueError to RecursionError and TypeError
    # (a map as a key); all of them mean the same to us.
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        # Its own text for what is nested too deep is empty.
        reason = str(error) or ("nested too deep" if isinstance(error, msgpack.StackError) else type(error).__name__)
        raise ProtocolError(f"a body of {len(body)} bytes is not MessagePack: {reason}") from None
    if not isinstance(array, list) or not array or type(array[0]) is not int:
        raise ProtocolError("a body is not an array that begins with the protocol version")
    return array


def _counted(body: bytes) -> dict[str, Callable[[Any], Any]]:
    """What makes ``unpackb`` stop at too many containers: an empty list takes one byte here and 64 in memory."""
    if len(body) <= MAX_CONTAINERS:
        return {}
    left = iter(range(MAX_CONTAINERS))

    def count(container: Any) -> Any:
        if next(left, None) is None:
            raise ValueError(f"more than {MAX_CONTAINERS} arrays and maps")
        return container

    return {"list_hook": count, "object_hook": count}


def decode_event(body: bytes) -> EventBody:
    """Decodes the body of an event or of a ``$end`` mark.

    Raises:
        ProtocolError: the bytes are not an event.
    """
    array = decode_body(body)
    if len(array) < _EVENT_ELEMENTS:
        raise ProtocolError(f"an event has {len(array)} elements, at least {_EVENT_ELEMENTS} are needed")
    version, attempt, seq, base_seq, time, timestamp, previous, fields, context = array[:_EVENT_ELEMENTS]
    well_formed = (
        type(attempt) is type(seq) is type(base_seq) is type(time) is int
        and attempt >= 1
        and 0 <= time <= MAX_TIME
        and 0 <= base_seq <= seq
        and 1 <= seq <= MAX_NUMBER
        and attempt <= MAX_NUMBER
        and is_training_time(timestamp)
        and (previous is None or is_training_time(previous))
        and type(fields) is type(context) is dict
        and is_shallow(fields)
        and is_shallow(context)
    )
    if not well_formed:
        raise ProtocolError("an event's elements do not have the types that the protocol gives them")
    # A later version may add numbers to a training time.
    now = TrainingTime._make(timestamp[:_COUNTS])
    before = None if previous is None else TrainingTime._make(previous[:_COUNTS])
    return EventBody(version, attempt, seq, base_seq, time, now, before, fields, context)


def sequence_number(body: bytes) -> int | None:
    """The ``seq`` of a malformed event, if it can be found."""
    try:
        number = decode_body(body)[2]
    except (ProtocolError, IndexError):
        return None
    return number if type(number) is int and number >= 1 else None


def is_training_time(values: Any) -> bool:
    """Whether these are the numbers of a training time, or more."""
    # A sum is an integer only if all its parts are, and it is taken in C: this is done twice for every frame.
    try:
        return type(values) is list and len(values) >= _COUNTS and type(sum(values)) is int
    except TypeError:
        return False


_PLAIN = frozenset({float, int, str, bool, bytes, type(None)})
_CONTAINERS = (dict, list, tuple)


def is_shallow(container: Any, levels: int = MAX_DEPTH) -> bool:
    """Whether nothing is nested deeper than ``levels``: what is handed on must survive recursive code such as
    ``repr``."""
    for value in container.values() if isinstance(container, dict) else container:
        # The type itself is looked up first: most values are plain, and this is done for every event.
        if type(value) in _PLAIN or not isinstance(value, _CONTAINERS):
            continue
        if levels == 0 or not is_shallow(value, levels - 1):
            return False
    return True


def decode_control(body: bytes) -> Control:
    """Decodes the body of a control message.

    Raises:
        ProtocolError: the bytes are not a control message.
    """
    array = decode_body(body)
    if len(array) < 3 or not isinstance(array[1], str) or not isinstance(array[2], dict):
        raise ProtocolError("a control message is not an array of version, kind and content")
    if not is_shallow(array[2]):
        raise ProtocolError(f"a control message is nested deeper than {MAX_DEPTH}")
    return Control(array[1], array[2], array[0])
