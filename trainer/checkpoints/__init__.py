"""Checkpoints: when one is saved, what it contains, its file, its folder.

Begin with ``checkpoints``; ``file`` is the format."""
