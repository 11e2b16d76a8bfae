"""The index of a folder of runs, and the table of them.

Begin with ``index``; ``entry`` is what it knows of a run, ``store`` keeps that, ``checkpoints`` finds these,
``annotations`` is what people say of runs, ``manage`` renames and removes them. ``table`` finds, sorts and groups runs
by ``columns`` and ``filters``."""
