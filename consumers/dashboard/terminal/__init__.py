"""The dashboard in a terminal, ``top``, and the table of all runs there.

May import: bus.index, bus.protocol, bus.runs, bus.subscriber, api, dashboard.view, runner. Begin with ``top``, then
``frame``; for the table with ``home``, then ``table``.
"""
