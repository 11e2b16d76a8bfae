"""Messages about packages that are not installed."""

from collections.abc import Collection


def missing(
    error: ModuleNotFoundError, needed_by: str, install: str, brings: Collection[str] = ()
) -> ModuleNotFoundError:
    """Replace an import error by one that says what to install. Errors about other modules than those of ``install``
    and ``brings`` are returned as they are."""
    module = (error.name or "").partition(".")[0]
    # pytorch-ignite brings ignite.
    if module not in (*install.replace("-", " ").split(), *brings):
        return error
    return ModuleNotFoundError(f"{needed_by} needs {module}; install it with: pip install {install}", name=error.name)
