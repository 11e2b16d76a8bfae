"""The allow-list: which keys a broker admits, and what each may do. A text file, one line ``ROLE KEY NAME`` for each
role of a key; lines that begin with ``#`` are comments."""

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from offloop.bus.errors import ConfigurationError
from offloop.bus.net.keys import check_not_writable_by_others, is_key, keys_dir

ROLES = ("publish", "view", "command")
"""What a key may be allowed: to publish runs, to read the stream and the recordings, to give commands. No role contains
another; a key has the roles of all of its lines."""

_FILE = "allowed"


class Grant(NamedTuple):
    """One line of the list."""

    role: str
    key: str
    """The public key: 40 characters of Z85."""
    name: str
    """What people call it."""


@dataclass(frozen=True)
class AllowList:
    """The list as it was read."""

    grants: tuple[Grant, ...] = ()

    @classmethod
    def read(cls, path: Path) -> "AllowList":
        """Reads the file.

        Raises:
            ConfigurationError: it is not there, others can write to it, or a line is damaged; the message has the
                line's number.
        """
        check_not_writable_by_others(path)
        check_not_writable_by_others(path.absolute().parent)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"the allow-list {path} cannot be read ({error}): repair it, or make another with "
                "'offloop server allow'"
            ) from None
        return cls(tuple(_grants(path, lines)))

    def may(self, key: str, role: str) -> bool:
        """Whether a key has a role."""
        return any(grant.key == key and grant.role == role for grant in self.grants)

    def knows(self, key: str) -> bool:
        """Whether a key has any role."""
        return any(grant.key == key for grant in self.grants)


def _grants(path: Path, lines: Iterable[str]) -> Iterator[Grant]:
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        role, key, *name = [*line.split(maxsplit=2), ""][:3]
        if role not in ROLES or not is_key(key.encode()):
            raise ConfigurationError(
                f"line {number} of the allow-list {path} is damaged: {line[:80]!r} is not ROLE KEY NAME with a role of "
                f"{', '.join(ROLES)} and a key of 40 characters; repair it, or remove it and use 'offloop server allow'"
            )
        yield Grant(role, key, " ".join(name).strip())


def default_allow_list() -> Path:
    """The list beside the keys: ``allowed`` in :func:`offloop.bus.net.keys.keys_dir`."""
    return keys_dir() / _FILE


def allow(path: Path, key: bytes, name: str, roles: Iterable[str]) -> list[str]:
    """Adds a key's roles to the list, which is made if it is not there; returns those that are new. The file is
    replaced as a whole, so a broker reads either the old or the new one.

    Raises:
        ConfigurationError: the list is damaged, or cannot be written.
    """
    text = key.decode()
    # The name comes from a file of another person, and has to stay within its line.
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path.parent):
            there = AllowList.read(path) if path.exists() else AllowList()
            new = [role for role in dict.fromkeys(roles) if not there.may(text, role)]
            if new:
                _replace(path, "".join(f"{role} {text} {label}\n" for role in new))
    except OSError as error:
        raise ConfigurationError(
            f"the allow-list {path} cannot be written: {error.strerror}; choose another file with '--allow-list'"
        ) from None
    return new


def _replace(path: Path, addition: str) -> None:
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    # The temporary file is its owner's alone from the beginning.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(old if not old or old.endswith("\n") else f"{old}\n")
            file.write(addition)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Keeps two that add at the same time from losing each other's lines."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
