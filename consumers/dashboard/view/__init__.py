"""The model of a run that both dashboards draw.

May import: bus.protocol, bus.recording, bus.subscriber, bus.trace, api, callbacks, loggers. Begin with ``run_view``.
"""
