"""Sockets, requests to brokers, keys.

Begin with ``sockets``."""
