"""The command ``trainer``. Start with ``main``."""
