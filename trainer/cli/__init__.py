"""The command ``trainer``.

May import: bus.cli, bus.runs, algorithms, arguments, config, device, distributed, fields, stream, tasks, trainer. Begin
with ``main``.
"""
