"""What people say of a run: a file in its directory, so that it goes wherever the run goes."""

import fcntl
import logging
import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from bus.errors import ConfigurationError, RunDirectoryError
from bus.files import check_owner, open_directory, open_file, replace_file

_log = logging.getLogger("offloop.index")

ANNOTATIONS_FILE = "annotations.json"
MAX_TAG = 64
MAX_NOTE = 10_000
_MAX_BYTES = 1 << 20


class Annotations(msgspec.Struct, frozen=True, omit_defaults=True):
    """What people say of a run."""

    tags: tuple[str, ...] = ()
    """In the order in which they were given, each once."""
    note: str = ""
    pinned: bool = False
    """Whether it stands before all others."""
    archived: bool = False
    """Whether it is left out unless it is asked for."""


def read_annotations(run: Path) -> Annotations:
    """What is said of the run in that directory; nothing where the file is missing. One that cannot be read is named in
    the log."""
    try:
        descriptor = open_file(run / ANNOTATIONS_FILE)
    except FileNotFoundError:
        return Annotations()
    except OSError as error:
        return _unread(run, error.strerror or str(error))
    try:
        return msgspec.json.decode(os.read(descriptor, _MAX_BYTES), type=Annotations)
    except (OSError, ValueError, RecursionError) as error:
        return _unread(run, str(error))
    finally:
        os.close(descriptor)


def annotate(
    run: Path,
    *,
    add: Collection[str] = (),
    remove: Collection[str] = (),
    note: str | None = None,
    pinned: bool | None = None,
    archived: bool | None = None,
) -> Annotations:
    """Changes what is said of a run and leaves the rest as it is: adds and removes tags, replaces the note, pins,
    archives. Two processes may do so at once.

    Raises:
        ConfigurationError: a tag or a note that is not allowed.
        RunDirectoryError: it cannot be written.
    """
    new = [check_tag(tag) for tag in add]
    if note is not None and len(note) > MAX_NOTE:
        raise ConfigurationError(f"a note of {len(note):,} characters is too long: use {MAX_NOTE:,} at most")
    try:
        directory = open_directory(run)
        try:
            check_owner(directory)
            fcntl.flock(directory, fcntl.LOCK_EX)
            before = read_annotations(run)
            tags = dict.fromkeys([*before.tags, *new])
            changed = Annotations(
                tuple(tag for tag in tags if tag not in remove),
                before.note if note is None else note,
                before.pinned if pinned is None else pinned,
                before.archived if archived is None else archived,
            )
            if changed != before:
                replace_file(directory, ANNOTATIONS_FILE, msgspec.json.encode(changed).decode())
        finally:
            os.close(directory)
    except OSError as error:
        raise RunDirectoryError(
            f"{run / ANNOTATIONS_FILE} cannot be written: {error.strerror or error}", path=run
        ) from None
    return changed


def check_tag(tag: str) -> str:
    """A tag without what surrounds it.

    Raises :class:`bus.errors.ConfigurationError` for one that is empty, too long, or has a comma or a control
    character."""
    tag = tag.strip()
    if not tag or len(tag) > MAX_TAG or "," in tag or not tag.isprintable():
        raise ConfigurationError(
            f"{tag!r} is not a tag: use 1 to {MAX_TAG} characters on one line, without a comma, such as 'baseline'"
        )
    return tag


def _unread(run: Path, why: str) -> Annotations:
    _log.warning("%s is left out, it cannot be read: %s", run / ANNOTATIONS_FILE, why)
    return Annotations()
