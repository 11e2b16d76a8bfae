"""Classes by name, and their options from text: how commands find callbacks, loggers and algorithms.

Begin with ``registry``."""
