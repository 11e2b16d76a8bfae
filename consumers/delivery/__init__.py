"""From the logger to its destinations: delivery, the spool on disk, what is committed.

May import: api, loggers. Begin with ``delivery``.
"""
