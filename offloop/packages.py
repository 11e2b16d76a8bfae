"""Whether Python finds the packages of this distribution, or files of the user's own with the same names."""

import sys
from importlib.util import find_spec
from pathlib import Path

__all__ = ["HiddenPackageError", "check_packages"]

_ROOT = Path(__file__).resolve().parents[1]


class HiddenPackageError(ImportError):
    """Another file is found under the name of a package of ours. ``name`` is the package, ``path`` the file."""


def check_packages(*names: str) -> None:
    """Raises :class:`HiddenPackageError` for the first of these packages of ours that another file hides."""
    for name in names:
        found = _found(name)
        if found is not None and found.resolve() != _ROOT / name / "__init__.py":
            raise HiddenPackageError(
                f"{found} hides offloop's package {name!r}, because it has the same name and Python finds it first: "
                f"rename it (my_{name}.py, for example) and what imports it, or start the script from another folder",
                name=name,
                path=str(found),
            )


def _found(name: str) -> Path | None:
    """The file that ``import name`` runs; ``None`` when there is none."""
    module = sys.modules.get(name)
    if module is not None:
        file = getattr(module, "__file__", None)
    else:
        spec = find_spec(name)
        # A folder without __init__.py is found last of all, after an installed package.
        file = spec.origin if spec is not None else None
    return None if file is None else Path(file)
