"""The dashboard in a browser: the pages of some runs (``page``) and of all (``home``), and their ``gate``."""
