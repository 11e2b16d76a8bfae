"""Interfaces of callbacks and loggers; begin with ``callback``."""
