"""Publishes one rank's events: send buffer, session with the broker, launch of a broker of one's own.

Begin with ``publisher``, then ``session_state`` and ``outbox``."""
