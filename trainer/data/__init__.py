"""What is trained, and on what: models, metrics, data, evaluators, resuming within an epoch.

Begin with ``spec`` and ``models``.
"""
