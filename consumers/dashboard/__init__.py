"""Dashboards in a browser (``web``) and in a terminal (``terminal``); both draw the model in ``view.run_view``."""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports

if TYPE_CHECKING:
    from offloop.consumers.dashboard.terminal.top import Top as Top
    from offloop.consumers.dashboard.web.callback import Dashboard as Dashboard
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__)
