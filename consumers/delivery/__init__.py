"""From the logger to its destinations: delivery, the spool on disk, what is committed.

May import: bus.protocol, api, loggers. Begin with ``fanout``, then ``spool``.
"""
