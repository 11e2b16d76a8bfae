"""Copies recordings into NATS JetStream, and reads runs from there.

Begin with ``bridge`` for the way there, and with ``nats_connection`` and ``stream_bytes`` for the way back. Without the
extra ``nats`` its import raises ConfigurationError."""

from offloop.bus.errors import require

require("a stream at nats://", "nats", "nats")
