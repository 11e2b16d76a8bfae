"""Data frames of a library that may be installed."""

from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, Literal, TypeAlias

from offloop.bus.errors import ConfigurationError
from offloop.consumers.api.optional import np
from offloop.consumers.dashboard.view.series import Floats

Library: TypeAlias = Literal["pandas", "polars", "dict"]

_LIBRARIES = ("pandas", "polars")


def library(to: Library | None) -> Any:
    """Import that library, ``None`` for ``dict``; by default the first that is installed. Raises ConfigurationError."""
    if to in _LIBRARIES:
        return load(to, f"to={to!r}")
    if to not in ("dict", None):
        raise ConfigurationError(f"to={to!r} is not known: use {', '.join(_LIBRARIES)} or dict", name="to", value=to)
    for name in _LIBRARIES if to is None else ():
        with suppress(ImportError):
            return import_module(name)
    return None


def load(module: str, needed_by: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ConfigurationError(f"{needed_by} needs {module}: install it with pip install {module}") from None


def as_table(columns: Mapping[str, Any], to: Any) -> Any:
    if to is None:
        return dict(columns)
    # A column may have numbers in one row and text in another, which strict types in polars refuse.
    return to.DataFrame(dict(columns), **({"strict": False} if to.__name__ == "polars" else {}))


def by_step(series: Mapping[str, tuple[Floats, Floats]], to: Any) -> Any:
    """Return metrics as a frame with a row for each step, the index in pandas, else the first column."""
    is_pandas = to is not None and to.__name__ == "pandas"
    steps = np.unique(np.concatenate([steps for steps, _ in series.values()] or [np.empty(0)]))
    columns: dict[str, Any] = {"step": steps.astype(np.int64)}
    for name, (at, values) in series.items():
        # In pandas missing values are NaN; elsewhere NaN is a value.
        columns[name] = np.full(len(steps), *([np.nan] if is_pandas else [None, object]))
        columns[name][steps.searchsorted(at)] = values
    if is_pandas:
        return as_table(columns, to).set_index("step")
    return as_table({name: column.tolist() for name, column in columns.items()}, to)
