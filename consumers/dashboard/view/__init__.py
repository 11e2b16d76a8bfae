"""The model of a run that both dashboards draw.

May import: api, callbacks, loggers. Begin with ``run_view``.
"""
