"""Dashboards: what people watch while a run goes on, in a browser or in a terminal."""

from consumers.dashboard.callback import Dashboard
from consumers.dashboard.top import Top

__all__ = ["Dashboard", "Top"]
