"""Dashboards, in a browser (``web``) or in a terminal (``terminal``); both draw the model in ``view``.

``web`` and ``terminal`` do not import each other. Begin with ``view.run_view``."""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports

if TYPE_CHECKING:
    from offloop.consumers.dashboard.terminal.top import Top as Top
    from offloop.consumers.dashboard.web.callback import Dashboard as Dashboard

__getattr__, __dir__, __all__ = lazy_exports(__name__)
