"""Publishes one rank's events to the run's broker. Start with ``publisher``, then ``session_state`` and ``outbox``."""
