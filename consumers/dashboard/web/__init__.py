"""The dashboard in a browser.

May import: bus.cli, bus.net, bus.protocol, bus.recording, bus.runs, bus.subscriber, api, dashboard.view, runner. Begin
with ``page`` for what is drawn and ``server`` for who may see it.
"""
