"""The model of a run that both dashboards draw, and of the table of all runs.

May import: bus.hosts, bus.index, bus.jetstream, bus.protocol, bus.recording, bus.runs, bus.subscriber, bus.trace, api,
callbacks, loggers, runner. Begin with ``run_view``.
"""
