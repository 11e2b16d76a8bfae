"""The index of a folder of runs, and the table of runs. Begin with ``index`` and ``table``."""
