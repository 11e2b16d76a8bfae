"""Columns as a frame of a library that may be installed."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Literal, TypeAlias

from bus.errors import ConfigurationError

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


def as_table(columns: Mapping[str, list[Any]], to: Library | None = None, index: str | None = None) -> Any:
    """Columns as a frame; ``index`` is the column that is the index where a library has one.

    Raises:
        ConfigurationError: the library is not installed, or not known.
    """
    chosen = usable(to)
    if chosen == "pandas":
        frame = load(chosen, "to='pandas'").DataFrame(dict(columns))
        return frame if index is None else frame.set_index(index)
    if chosen == "polars":
        # A column may have numbers in one row and text in another.
        return load(chosen, "to='polars'").DataFrame(dict(columns), strict=False)
    return dict(columns)
