"""Reads a run's events in order, live and recorded, from a folder or from NATS, and sends commands."""
