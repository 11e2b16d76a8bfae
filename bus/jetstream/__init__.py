"""Copies recordings into NATS JetStream, and reads runs from there.

May import: net, protocol, recording, runs. Begin with ``bridge`` for the way there, and with ``gateway`` for the way
back. Needs the extra ``nats``.
"""
