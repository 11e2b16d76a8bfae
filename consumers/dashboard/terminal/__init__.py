"""The dashboard in a terminal: ``top``, then ``frame``."""
