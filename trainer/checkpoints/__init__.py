"""Checkpoints: schedule, contents, file, folder. Start with ``checkpoints``; ``file`` is the format."""
