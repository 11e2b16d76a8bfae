"""Lazy exports and imports: importing one module does not load its neighbours, nor packages that are seldom used."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


def lazy_exports(
    package: str, explain_missing: Callable[[str], str | None] = lambda module: None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` (:pep:`562`) and ``__all__`` of a package.

    They cover the names that its ``__init__.py`` imports under ``if TYPE_CHECKING:``. ``explain_missing`` turns the
    name of a missing module into the message of the ModuleNotFoundError; with ``None`` the error stays as it is."""
    source = Path(str(sys.modules[package].__file__)).read_bytes()
    block = next(part for part in ast.parse(source).body if isinstance(part, ast.If))
    home_of: dict[str, str] = {}
    for statement in block.body:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            names = [one.name for one in statement.names]
            names = import_module(statement.module).__all__ if names == ["*"] else names
            home_of |= dict.fromkeys(names, statement.module)

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(home_of[name]), name)
        except ModuleNotFoundError as error:
            message = explain_missing(error.name or "")
            if message is None:
                raise
            raise ModuleNotFoundError(message, name=error.name) from None
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *home_of}), sorted(home_of)


class LazyModule(ModuleType):
    """A module that is imported at its first use."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)
