"""Views of all runs that people have saved by name: a file beside the runs, which every page of that folder reads."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from offloop.bus.errors import ConfigurationError, OffloopError, RunDirectoryError
from offloop.bus.files import check_owner, lock_directory, open_directory, read_file, replace_file

VIEWS_FILE = "views.json"
MAX_NAME = 64
MAX_ADDRESS = 4_000
MAX_VIEWS = 100
_MAX_BYTES = 1 << 20


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    views: dict[str, str]


def read_views(folder: Path) -> dict[str, str]:
    """The saved views of a folder of runs: of each name the part of the page's address behind the ``#``. None where
    nothing is saved.

    Raises:
        RunDirectoryError: the file cannot be read, or is none of saved views.
    """
    path = folder / VIEWS_FILE
    try:
        return _decoded(read_file(path, _MAX_BYTES))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror or error}", path=path) from None
    except (ValueError, RecursionError) as error:
        raise RunDirectoryError(
            f"{path} is not a file of saved views: {error}; move it to another place or delete it", path=path
        ) from None


def save_view(folder: Path, name: str, address: str) -> dict[str, str]:
    """Saves a view, in the place of one of that name; returns all of them. Two processes may do so at once.

    Raises:
        ConfigurationError: a name or an address that is not allowed, or too many views.
        RunDirectoryError: it cannot be written.
    """
    name = check_name(name)
    _check_address(address)

    def save(views: dict[str, str]) -> None:
        if name not in views and len(views) >= MAX_VIEWS:
            raise ConfigurationError(f"{MAX_VIEWS} views are saved: delete one first")
        views[name] = address

    return _change(folder, save)


def delete_view(folder: Path, name: str) -> dict[str, str]:
    """Deletes a saved view, if there is one of that name; returns the others.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    return _change(folder, lambda views: views.pop(name, None))


def check_name(name: str) -> str:
    """A view's name without what surrounds it.

    Raises :class:`offloop.bus.errors.ConfigurationError` for one that is empty, too long, or has a control
    character."""
    name = name.strip()
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise ConfigurationError(
            f"{name[: 2 * MAX_NAME]!r} is not a name for a view: use 1 to {MAX_NAME} characters on one line"
        )
    return name


def _check_address(address: str) -> None:
    # As browsers write it: everything else is escaped by per cent signs.
    if len(address) > MAX_ADDRESS or not address.isascii() or not address.isprintable() or " " in address:
        raise ConfigurationError(
            f"a view with an address of {len(address):,} characters cannot be saved: use {MAX_ADDRESS:,} at most, "
            "for example without the selected runs"
        )


def _decoded(content: bytes) -> dict[str, str]:
    views = msgspec.json.decode(content, type=_Saved).views
    if len(views) > MAX_VIEWS:
        raise ValueError(f"it has {len(views):,} views, and {MAX_VIEWS} are allowed")
    for name, address in views.items():
        _check_address(address)
        if check_name(name) != name:
            raise ValueError(f"{name!r} has blanks around it")
    return views


def _change(folder: Path, change: Callable[[dict[str, str]], object]) -> dict[str, str]:
    try:
        with _locked(folder) as directory:
            views = read_views(folder)
            before = dict(views)
            change(views)
            if views != before:
                replace_file(directory, VIEWS_FILE, msgspec.json.encode(_Saved(views)).decode())
    except OffloopError:
        raise
    except OSError as error:
        path = folder / VIEWS_FILE
        raise RunDirectoryError(f"{path} cannot be written: {error.strerror or error}", path=path) from None
    return views


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[int]:
    # Not as in a run's own directory: people may name the folder by a symbolic link.
    directory = open_directory(folder.resolve())
    try:
        check_owner(directory)
        lock_directory(directory)
        yield directory
    finally:
        os.close(directory)
