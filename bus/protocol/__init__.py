"""Frames, snapshots and their order. Start with ``frames``; ``docs/protocol.md`` is the specification."""
