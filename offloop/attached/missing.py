"""What to install where Python lacks a package."""

from collections.abc import Collection


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
