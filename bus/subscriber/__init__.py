"""Reads a run's events in order, live and recorded, from a folder or from NATS; sends commands.

May import: jetstream, net, protocol, recording, runs, tensors. Begin with ``subscriber``.
"""
