"""The dashboard in a terminal, ``top``, and the table of all runs there.

Begin with ``top``, then ``frame``; for the table with ``home``, then ``table``."""
