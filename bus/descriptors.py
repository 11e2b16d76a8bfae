"""File descriptors that are kept for files, however many connections a broker has."""

import contextlib
import errno
import resource
from collections.abc import Callable
from typing import TypeVar

__all__ = ["allow_many_connections", "with_reserve"]

RESERVED = 64

Opened = TypeVar("Opened")


def allow_many_connections() -> None:
    """Lets this process have as many as the system permits, but for a few that only :func:`with_reserve` takes: each
    connection is a file descriptor, and systems give programs few of them unless they ask for more."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard - RESERVED if hard > 4 * RESERVED else hard
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def with_reserve(open_it: Callable[[], Opened]) -> Opened:
    """Opens something; when no file descriptor is left, with one of those that connections cannot have.

    Raises:
        OSError: it cannot be opened.
    """
    try:
        return open_it()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # libzmq accepts connections in a thread of its own: the limit is lifted for this one call.
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        return open_it()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
