"""Groups of the trainer's arguments, their checks, durations and values; holds no state. Start with ``config``."""

__all__ = ["explain_missing", "missing_extra"]

_EXTRA = {"cloudpickle", "safetensors", "torch", "torchmetrics"}


def missing_extra(module: str) -> str:
    return f"the trainer needs {module}; install it with: pip install 'offloop[trainer]'"


def explain_missing(module: str) -> str | None:
    """Return the same message for a module of the extra ``trainer``, ``None`` for others."""
    return missing_extra(module) if module in _EXTRA else None
