"""Recordings: MCAP files, read from ``recording`` and ``reader``, written by ``writer``."""
