"""A snapshot as bytes, to be stored and to be made into the same snapshot again."""

from bus.event import Event
from bus.snapshot import Snapshot
from bus.wire import Topic, decode_event, event_encoder, pack_map, split_frame

__all__ = ["pack_snapshot", "unpack_snapshot"]


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
        ProtocolError: the bytes are no frame.
        ValueError: the frame is no event.
    """
    topic, body = split_frame(frame)
    if topic is None:
        raise ValueError("a stored event is none")
    return Snapshot(Event(topic.name), topic.run, topic.rank, decode_event(body))
