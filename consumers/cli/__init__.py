"""The command ``consumer``, the process of attached callbacks, the registry of callbacks and loggers.

Begin with ``main``."""
