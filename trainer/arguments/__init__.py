"""Groups of the trainer's arguments, their checks, durations, and values as people write them; holds no state.

Begin with ``config``."""

__all__ = ["explain_missing", "missing_extra"]

_EXTRA = {"cloudpickle", "safetensors", "torch", "torchmetrics"}


def missing_extra(module: str) -> str:
    """The message for a ``module`` that is not installed."""
    return f"the trainer needs {module}; install it with: pip install 'offloop[trainer]'"


def explain_missing(module: str) -> str | None:
    """The same message for a module that the extra installs, ``None`` for every other one."""
    return missing_extra(module) if module in _EXTRA else None
