"""Publishes one rank's events: buffer, session with the broker, connection, launch of a broker of one's own.

Begin with ``publisher``, then ``session_state`` and ``outbox``.
"""
