"""Changes of a training from outside: commands, settings, consumers that are waited for, signals.

Begin with ``remote_control``.
"""
