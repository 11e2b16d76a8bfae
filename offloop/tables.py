"""Columns as a frame of a library that may be installed."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from offloop.bus.errors import ConfigurationError

if TYPE_CHECKING:
    from offloop.consumers.dashboard.view.series import Floats

Library: TypeAlias = Literal["pandas", "polars", "dict"]

_LIBRARIES: tuple[Library, ...] = ("pandas", "polars")


def usable(to: Library | None) -> Library:
    """The library of that name; without a name the first that is installed.

    Raises:
        ConfigurationError: it is not installed, or not known.
    """
    if to is None:
        for name in _LIBRARIES:
            try:
                import_module(name)
            except ImportError:
                continue
            return name
        return "dict"
    if to in _LIBRARIES:
        load(to, f"to={to!r}")
    elif to != "dict":
        raise ConfigurationError(f"to={to!r} is not known: use {', '.join(_LIBRARIES)} or dict", name="to", value=to)
    return to


def load(module: str, needed_by: str) -> Any:
    """A module of a package that this one does not depend on.

    Raises:
        ConfigurationError: it is not installed.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ConfigurationError(
            f"{needed_by} needs {package}: install it with pip install {package.lower()}"
        ) from None


def as_table(columns: Mapping[str, Any], to: Library | None = None) -> Any:
    """Columns as a frame.

    Raises:
        ConfigurationError: the library is not installed, or not known.
    """
    chosen = usable(to)
    if chosen == "pandas":
        return load(chosen, "to='pandas'").DataFrame(dict(columns))
    if chosen == "polars":
        # A column may have numbers in one row and text in another.
        return load(chosen, "to='polars'").DataFrame(dict(columns), strict=False)
    return dict(columns)


def by_step(series: Mapping[str, tuple["Floats", "Floats"]], to: Library) -> Any:
    """Steps and values of metrics as a frame with a row for each step: the index in pandas, else the first column."""
    import numpy as np

    steps = np.unique(np.concatenate([steps for steps, _ in series.values()] or [np.empty(0)]))
    columns: dict[str, Any] = {"step": steps.astype(np.int64)}
    for name, (at, values) in series.items():
        # In pandas what is missing is NaN; elsewhere a value that is NaN is another thing.
        column = np.full(len(steps), *([np.nan] if to == "pandas" else [None, object]))
        column[steps.searchsorted(at)] = values
        columns[name] = column
    if to == "pandas":
        return as_table(columns, to).set_index("step")
    return as_table({name: column.tolist() for name, column in columns.items()}, to)
