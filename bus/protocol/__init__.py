"""Frames and their limits, snapshots, and the order in which events are delivered.

Begin with ``frames``; ``docs/protocol.md`` is the specification."""
