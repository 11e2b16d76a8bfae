"""Directories of runs. Begin with ``directory``; ``writing`` is for brokers."""
