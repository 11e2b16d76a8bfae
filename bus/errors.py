"""The errors that offloop raises for a cause that its user can remove, all derived from :class:`OffloopError`.

Messages name the value, what is allowed and what to do next, in one line: the commands print them as they are. What a
program may need of them is an attribute, ``None`` where it is not known::

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
    "close_matches",
]


class OffloopError(Exception):
    """Base of all errors raised by offloop. Its text is one line, without control characters: it may quote what came
    from a peer or a file. Keyword arguments set the attributes that the class declares."""

    def __init__(self, *text: object, **data: Any) -> None:
        super().__init__(*text)
        if unknown := [name for name in data if not hasattr(type(self), name)]:
            raise TypeError(f"{type(self).__name__} has no attribute {', '.join(unknown)}")
        # Pickling keeps these, as those of any exception.
        self.__dict__.update(data)

    def __str__(self) -> str:
        return one_line(super().__str__())


class InvalidTimeError(OffloopError, ValueError):
    """An invalid time, such as ``'5'`` or ``'1.5ep'``. Also a ValueError."""

    value: object = None
    """The time or number that was given."""


class TimeUnitError(InvalidTimeError):
    """Two times were combined or ordered although their units do not go together."""


class RunError(OffloopError):
    """Base of errors about a run and its directory."""

    run: str | None = None
    """The run's name."""
    path: Path | None = None
    """The file or directory."""


class InvalidRunNameError(RunError, ValueError):
    """A run name with characters that cannot stand in a topic or a path."""


class RunNotFoundError(RunError):
    """No run of that name, or none at all, where runs were looked for."""


class RunIsLiveError(RunError):
    """The run already has a broker, so it cannot be started a second time."""


class RunDirectoryError(RunError):
    """A run's directory cannot be created, read or written."""


class RecordingError(OffloopError):
    """A file is not a recording, or cannot be read."""

    path: Path | None = None
    """The file."""


class CheckpointError(OffloopError):
    """A checkpoint is not there, is damaged, cannot be written, or is one of another training."""

    path: Path | None = None
    """The file or folder."""


class ProtocolError(OffloopError):
    """Bytes from the wire or a recording are not a message of the protocol."""

    size: int | None = None
    """The size in bytes, where that is over a limit."""
    limit: int | None = None
    """The limit in bytes."""


class BrokerError(OffloopError):
    """The broker could not be started or reached, or it refused a request."""

    address: str | None = None
    """Its address."""


class ReplacedError(OffloopError):
    """Another process works under the name of a consumer now."""


class RankError(OffloopError):
    """The processes of a training did not come together, or one of them is gone."""

    rank: int | None = None
    """The rank of this process."""


class ClosedError(OffloopError):
    """An object was used after its ``close()``."""


class FieldNotAvailableError(OffloopError, AttributeError):
    """A snapshot does not carry the field that was asked for."""

    field: str | None = None
    """The field's name."""


class FrozenSnapshotError(OffloopError, AttributeError):
    """A snapshot was assigned to; snapshots are read-only."""

    field: str | None = None
    """The field's name."""


class ConfigurationError(OffloopError, ValueError):
    """An argument, an option or a name is not allowed."""

    name: str | None = None
    """The argument or option, or the name that was not found."""
    value: object = None
    """The value that is not allowed."""


def close_matches(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """``did you mean speed? `` or nothing, to stand in a message."""
    matches = get_close_matches(name, list(known), n=2, cutoff=0.5)
    return f"did you mean {' or '.join(matches)}? " if matches else ""


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raises :class:`ConfigurationError` where an argument is none of the choices."""
    if value not in (known := tuple(choices)):
        raise ConfigurationError(f"{name} {value!r} is not known: use {', '.join(known)}", name=name, value=value)


def check_at_least(name: str, value: float, least: float) -> None:
    """Raises :class:`ConfigurationError` where an argument is less, or not a number."""
    if not value >= least:
        raise ConfigurationError(f"{name} is {value}: use a number from {least} on", name=name, value=value)


def require(what: str, extra: str, *modules: str) -> None:
    """Raises :class:`ConfigurationError` where one of the modules that ``what`` needs is not installed: the extra of
    this package that brings it is named."""
    from importlib.util import find_spec

    for module in modules:
        package = module.partition(".")[0]
        if find_spec(package) is None or find_spec(module) is None:
            raise ConfigurationError(f"{what} needs {package}: install it with pip install 'offloop[{extra}]'")
