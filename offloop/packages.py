"""Whether Python finds the packages of this distribution, or files of the user's own with the same names; and what to
install where it lacks another."""

import sys
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

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


def missing(
    error: ModuleNotFoundError, needed_by: str, install: str, brings: Collection[str] = ()
) -> ModuleNotFoundError:
    """The error to raise in the place of one that ``import`` has raised: it says what to install. One about a module
    that ``install`` does not bring stays as it is; ``brings`` are modules that are not in its name."""
    module = (error.name or "").partition(".")[0]
    # pytorch-ignite brings ignite.
    if module not in (*install.replace("-", " ").split(), *brings):
        return error
    return ModuleNotFoundError(f"{needed_by} needs {module}; install it with: pip install {install}", name=error.name)


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
