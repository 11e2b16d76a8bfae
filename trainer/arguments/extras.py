"""What to tell somebody who installed offloop without what the trainer needs."""

__all__ = ["missing_extra"]


def missing_extra(module: str) -> str:
    """The message for a ``module`` that is not installed."""
    return f"the trainer needs {module}; install it with: pip install 'offloop[trainer]'"
