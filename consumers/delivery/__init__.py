"""From the logger to its destinations: delivery, the spool on disk, what is committed.

Begin with ``fanout``, then ``spool``."""
