"""Packages of extras, imported at their first use."""

from typing import TYPE_CHECKING

from offloop.bus.lazy import LazyModule

if TYPE_CHECKING:
    import fastapi
    import numpy as np
    import torch
    import wandb
    from nicegui import events as ui_events
    from nicegui import ui
else:
    fastapi, np, torch, wandb = map(LazyModule, ("fastapi", "numpy", "torch", "wandb"))
    ui, ui_events = map(LazyModule, ("nicegui.ui", "nicegui.events"))

__all__ = ["fastapi", "np", "torch", "ui", "ui_events", "wandb"]
