"""The errors that offloop raises for a cause that the user can remove, all derived from :class:`OffloopError`.

A message names the value, what is allowed and what to do, in one line; the commands print it unchanged. Attributes
carry the data, ``None`` where it is unknown::

    try:
        run = find_run("digits")
    except RunNotFoundError as error:
        print(error.run)"""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from offloop.bus.printing import one_line

__all__ = [
    "BrokerError",
    "CheckpointError",
    "ClosedError",
    "ConfigurationError",
    "FieldNotAvailableError",
    "FrozenSnapshotError",
    "InvalidRunNameError",
    "InvalidTimeError",
    "OffloopError",
    "ProtocolError",
    "RankError",
    "RecordingError",
    "RunDirectoryError",
    "RunError",
    "RunIsLiveError",
    "RunNotFoundError",
    "TimeUnitError",
]


class OffloopError(Exception):
    """Base of all errors raised by offloop.

    Its text is one line without control characters, as it may quote a peer or a file. Keyword arguments set the
    attributes that the class declares."""

    def __init__(self, *text: object, **data: Any) -> None:
        super().__init__(*text)
        if unknown := [name for name in data if not hasattr(type(self), name)]:
            raise TypeError(f"{type(self).__name__} has no attribute {', '.join(unknown)}")
        # Pickling keeps these, as with any exception.
        self.__dict__.update(data)

    def __str__(self) -> str:
        return one_line(super().__str__())


class InvalidTimeError(OffloopError, ValueError):
    """An invalid time, such as ``'5'`` or ``'1.5ep'``. Also a ValueError."""

    value: object = None
    """The given time or number."""


class TimeUnitError(InvalidTimeError):
    """Two times of different units were combined or ordered."""


class RunError(OffloopError):
    """Base of errors about a run and its directory."""

    run: str | None = None
    """Name of the run."""
    path: Path | None = None
    """The file or directory."""


class InvalidRunNameError(RunError, ValueError):
    """A run name with characters that are not allowed in a topic or a path."""


class RunNotFoundError(RunError):
    """No run of that name, or no run at all, in the searched folder."""


class RunIsLiveError(RunError):
    """The run already has a broker, so it cannot be started again."""


class RunDirectoryError(RunError):
    """A run's directory cannot be created, read or written."""


class RecordingError(OffloopError):
    """A file is not a recording, or cannot be read."""

    path: Path | None = None
    """The file."""


class CheckpointError(OffloopError):
    """A checkpoint is missing, damaged, of another training, or cannot be written."""

    path: Path | None = None
    """The file or folder."""


class ProtocolError(OffloopError):
    """Bytes from the network or a recording are not a message of the protocol."""

    size: int | None = None
    """The size in bytes, if it exceeds a limit."""
    limit: int | None = None
    """The limit in bytes."""


class BrokerError(OffloopError):
    """The broker could not be started or reached, or refused a request."""

    address: str | None = None
    """Address of the broker."""


class RankError(OffloopError):
    """A process of a distributed training did not arrive, or is gone."""

    rank: int | None = None
    """Rank of this process."""


class ClosedError(OffloopError):
    """An object was used after its ``close()``."""


class FieldNotAvailableError(OffloopError, AttributeError):
    """A snapshot does not have the requested field."""

    field: str | None = None
    """Name of the field."""


class FrozenSnapshotError(OffloopError, AttributeError):
    """A snapshot was assigned to; snapshots are read-only."""

    field: str | None = None
    """Name of the field."""


class ConfigurationError(OffloopError, ValueError):
    """An argument, an option or a name is not allowed."""

    name: str | None = None
    """The argument or option, or the name that was not found."""
    value: object = None
    """The value that is not allowed."""


def close_matches(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """Return ``did you mean speed? `` or nothing, as a part of a message."""
    matches = get_close_matches(name, dict.fromkeys(known), n=2, cutoff=0.5)
    return f"did you mean {' or '.join(matches)}? " if matches else ""


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise ConfigurationError unless the value is one of the choices."""
    if value not in (known := tuple(choices)):
        raise ConfigurationError(f"{name} {value!r} is not known: use {', '.join(known)}", name=name, value=value)


def check_at_least(name: str, value: float, least: float) -> None:
    """Raise ConfigurationError for a value below the least, or not a number."""
    if not value >= least:
        raise ConfigurationError(f"{name} is {value}: use a number from {least} on", name=name, value=value)


def require(what: str, extra: str, *modules: str) -> None:
    """Raise ConfigurationError, with the extra to install, if one of the modules is not installed."""
    from importlib.util import find_spec

    for module in modules:
        package = module.partition(".")[0]
        if find_spec(package) is None or find_spec(module) is None:
            raise ConfigurationError(f"{what} needs {package}: install it with pip install 'offloop[{extra}]'")
