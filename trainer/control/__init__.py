"""What changes a training from outside: commands, settings, consumers that are waited for, signals.

May import: engine, distributed. Begin with ``remote_control``.
"""
