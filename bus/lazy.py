"""Names that a package offers, loaded when they are first used: importing one module does not load its neighbours."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_exports(
    package: str, homes: Mapping[str, Sequence[str]], explain_missing: Callable[[str], str | None] = lambda module: None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the ``__getattr__`` and the ``__dir__`` of ``package`` (:pep:`562`) for the names that each module of
    ``homes`` defines.

    Where a name needs a module that is not installed, ``explain_missing`` turns the name of that module into the
    message of the :class:`ModuleNotFoundError`; with ``None`` the error stays as it is.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

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

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return load, list_names
