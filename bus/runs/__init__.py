"""Directories of runs: what is written down about a run, its attempts, who holds it, how it ended.

Begin with ``directory``; ``writing`` is what brokers do."""
