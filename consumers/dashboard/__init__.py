"""Dashboards, in a browser (``web``) or in a terminal (``terminal``); both draw the model in ``view``.

``web`` and ``terminal`` do not import each other. Begin with ``view.run_view``.
"""

from typing import TYPE_CHECKING

from bus.lazy import lazy_exports

if TYPE_CHECKING:
    from consumers.dashboard.terminal.top import Top
    from consumers.dashboard.web.callback import Dashboard

__all__ = ["Dashboard", "Top"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {"consumers.dashboard.terminal.top": ["Top"], "consumers.dashboard.web.callback": ["Dashboard"]},
)
