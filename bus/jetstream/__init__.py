"""Copies recordings into NATS JetStream (see ``bridge``), and reads runs from there (see ``nats_connection``).

The import raises ConfigurationError without the extra ``nats``."""

from offloop.bus.errors import require

require("a stream at nats://", "nats", "nats")
