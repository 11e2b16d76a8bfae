"""Peers of a broker that keep to no rules: the bytes of ZMTP by hand, and floods. As a program, a flood in a process of
its own: ``python raw_peers.py ADDRESS KIND``, which goes on until it is killed."""

import os
import socket
import struct
import sys
from pathlib import Path

import msgpack
import zmq

sys.path.insert(0, str(Path(__file__).parents[2]))

from offloop.bus.protocol.frames import Topic, encode_control, encode_frame_batch, event_encoder, pack_map

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + b"\0" + bytes(31)


def _command(name: bytes, data: bytes) -> bytes:
    body = bytes([len(name)]) + name + data
    return bytes([4, len(body)]) + body


def connect(address: str, kind: bytes = b"DEALER") -> socket.socket:
    """A connection that has shaken hands, as a socket of that kind."""
    made = open_connection(address)
    try:
        shake_hands(made, kind)
    except BaseException:
        made.close()
        raise
    return made


def open_connection(address: str) -> socket.socket:
    """A connection on which nothing was said."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def shake_hands(made: socket.socket, kind: bytes = b"DEALER") -> None:
    """Says what ZMTP begins with, and hears it."""
    made.sendall(GREETING)
    properties = b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind + b"\x08Identity" + bytes(4)
    made.sendall(_command(b"READY", properties))
    received = b""
    while len(received) < len(GREETING) + 2 or len(received) < len(GREETING) + 2 + received[len(GREETING) + 1]:
        piece = made.recv(4096)
        assert piece, "the broker closed the connection"
        received += piece


def frame(data: bytes) -> bytes:
    """A message."""
    return bytes([0, len(data)]) + data if len(data) < 256 else large_frame(len(data)) + data


def large_frame(size: int) -> bytes:
    """The beginning of a message of that size."""
    return b"\x02" + struct.pack(">Q", size)


def ping() -> bytes:
    """A heartbeat of ZeroMQ's own, which asks for an answer."""
    return _command(b"PING", b"\0\0context")


def reset(connection: socket.socket) -> None:
    """Ends it as a process does that dies with unread data: the other side is told at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def hello(run: str) -> bytes:
    """The greeting of a publisher that is not a process of this machine."""
    content = {"run": run, "rank": 0, "world_size": 1, "pid": None, "started": None, "host": "elsewhere"}
    return encode_control("hello", {**content, "publisher_id": os.urandom(8).hex(), "info": {}, "events": []})


def _event(fields: dict[str, object]) -> bytes:
    return event_encoder(Topic("flood", "batch_end", 0), 1)(1, 1, 1, [0] * 14, None, fields, pack_map({}))


FLOODS = {
    "junk": lambda: os.urandom(100),
    "small events": lambda: _event({}),
    "large events": lambda: _event({"x": b"x" * 1_000_000}),
    "batches": lambda: encode_frame_batch([_event({})] * 1000),
    "large requests": lambda: (
        b"\0" + msgpack.packb([1, "lease", {"run": "flood", "demand": {}, "more": b"x" * 2_000_000}])
    ),
    "requests": lambda: encode_control("runs", {"run": "flood"}),
    # Of a publisher: the same event again and again, one that takes long to decode.
    "known": lambda: _event({"x": list(range(10_000))}),
}


def main() -> None:
    """The program."""
    address, kind = sys.argv[1:]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    control = context.socket(zmq.DEALER)
    control.connect(address)
    message = FLOODS[kind]()
    if kind == "known":
        control.send(hello("flood"))
        control.recv()
    print("flooding", flush=True)
    while True:
        control.send(message)


if __name__ == "__main__":
    main()
