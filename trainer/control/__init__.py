"""Changes of a training from outside: commands, settings, signals.

Begin with ``remote_control``."""
