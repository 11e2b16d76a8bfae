"""Sockets, requests to brokers, keys.

May import: protocol. Begin with ``sockets``.
"""
