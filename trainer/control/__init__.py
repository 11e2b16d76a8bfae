"""Commands, settings and signals from outside. Start with ``remote_control``."""
