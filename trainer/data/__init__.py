"""What is trained, and on what: models, metrics, data, evaluators, resuming within an epoch.

May import: device, arguments. Begin with ``spec`` and ``models``.
"""
