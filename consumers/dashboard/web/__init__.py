"""The dashboard in a browser: the page of one or some runs, and that of all.

May import: bus.cli, bus.index, bus.protocol, bus.recording, bus.runs, api, dashboard.view, runner. Begin with
``page`` and ``home`` for what is drawn and ``server`` for who may see it.
"""
