"""The command ``trainer``. Begin with ``main``."""
