"""Classes by name, and their options from text, for callbacks, loggers and algorithms. Begin with ``registry``."""
