"""Models, metrics, data, evaluators, resuming within an epoch.

Begin with ``spec`` and ``models``."""
