"""Models, metrics, data, evaluators, resuming within an epoch. Start with ``spec`` and ``models``."""
