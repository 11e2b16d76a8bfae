"""The dashboard in a terminal (``top``, then ``frame``), and the table of all runs there (``home``)."""
