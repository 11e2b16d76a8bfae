"""The dashboard in a terminal, ``top``.

May import: bus.protocol, bus.subscriber, api, dashboard.view. Begin with ``top``, then ``frame``.
"""
