"""Copies recordings into NATS JetStream, and reads runs from there.

May import: net, protocol, recording, runs. Begin with ``bridge`` for the way there, and with
``nats_connection`` and ``stream_bytes`` for the way back. Needs the extra ``nats``.
"""
