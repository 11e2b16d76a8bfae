"""What is trained, and on what: models, metrics, data, evaluators, resuming within an epoch.

May import: arguments, device. Begin with ``spec`` and ``models``.
"""
