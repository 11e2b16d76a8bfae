"""Checkpoints: when one is saved, what it contains, its file, its folder.

May import: engine, distributed, data. Begin with ``checkpoints``; ``file`` is the format.
"""
