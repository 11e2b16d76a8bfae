"""Copies recordings into NATS JetStream, and reads runs from there.

Begin with ``bridge`` for the way there, and with ``nats_connection`` and ``stream_bytes`` for the way back. Needs the
extra ``nats``.
"""
