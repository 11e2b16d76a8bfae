"""What changes a training from outside: commands, settings, consumers that are waited for, signals.

May import: bus.publisher, arguments, distributed, engine. Begin with ``remote_control``.
"""
