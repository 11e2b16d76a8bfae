"""The command ``consumer``, the process of attached callbacks, the registry of callbacks and loggers.

May import everything in ``consumers``. Begin with ``main``.
"""
