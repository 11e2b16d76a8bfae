"""The command ``consumer``, the process of attached callbacks, the registry of callbacks and loggers.

May import: bus.cli, bus.plugins, bus.recording, bus.replay, bus.runs, bus.subscriber,
api, callbacks, composer, dashboard.terminal, delivery, loggers, runner. Begin with ``main``.
"""
