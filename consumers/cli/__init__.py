"""The command ``consumer``, the process of attached callbacks, the registry; begin with ``main``."""
