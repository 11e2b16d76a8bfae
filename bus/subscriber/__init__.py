"""Reads a run's events in order, live and recorded, from a folder or from NATS; sends commands.

Begin with ``subscriber``."""
