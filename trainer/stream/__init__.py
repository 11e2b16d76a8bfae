"""Publishes the events of a training. Start with ``publishing``."""
