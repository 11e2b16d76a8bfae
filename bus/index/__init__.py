"""What is known of all runs of a folder, at once: an index of them, and questions to it.

May import: checkpoints, protocol, recording, runs. Begin with ``index``; ``entry`` is what it knows of a run, ``store``
keeps that, ``checkpoints`` finds these, ``query`` finds, sorts and compares, ``annotations`` is what people say of
runs, and ``manage`` renames and removes them.
"""
