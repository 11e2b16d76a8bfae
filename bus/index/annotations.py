"""Tags, note and marks of a run: a file in its directory, so that it moves with the run."""

import logging
import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from offloop.bus.errors import ConfigurationError, RunDirectoryError
from offloop.bus.files import check_owner, lock_directory, open_directory, read_file, replace_file

_log = logging.getLogger("offloop.index")

ANNOTATIONS_FILE = "annotations.json"
MAX_TAG = 64
MAX_TAGS = 1000
MAX_NOTE = 10_000
_MAX_BYTES = 1 << 20


class Annotations(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tags, note and marks of a run."""

    tags: tuple[str, ...] = ()
    note: str = ""
    pinned: bool = False
    """Listed before all others."""
    archived: bool = False
    """Listed on request alone."""


def read_annotations(run: Path) -> Annotations:
    """The annotations in a run's directory, none where the file is missing. An unreadable one is logged."""
    try:
        return _read(run)
    except RunDirectoryError as error:
        _log.warning("%s", error)
        return Annotations()


def annotate(
    run: Path,
    *,
    add: Collection[str] = (),
    remove: Collection[str] = (),
    note: str | None = None,
    pinned: bool | None = None,
    archived: bool | None = None,
) -> Annotations:
    """Adds and removes tags, replaces the note, pins or archives a run; the rest stays. Safe for several processes at
    once. An unreadable file is left as it is.

    Raises:
        ConfigurationError: a tag or a note that is not allowed, or too many tags.
        RunDirectoryError: it cannot be read or written.
    """
    new = [check_tag(tag) for tag in add]
    if note is not None:
        _check_note(note)
    try:
        directory = open_directory(run)
        try:
            check_owner(directory)
            lock_directory(directory)
            before = _read(run)
            tags = tuple(tag for tag in dict.fromkeys([*before.tags, *new]) if tag not in remove)
            if len(tags) > max(MAX_TAGS, len(before.tags)):
                raise ConfigurationError(
                    f"run {run.name} would have {len(tags):,} tags, and {MAX_TAGS:,} are allowed: remove some first"
                )
            changed = Annotations(
                tags,
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
    """Strip a tag.

    Raises:
        ConfigurationError: it is empty, too long, or has a comma or a control character.
    """
    tag = tag.strip()
    if not tag or len(tag) > MAX_TAG or "," in tag or not tag.isprintable():
        raise ConfigurationError(
            f"{tag!r} is not a tag: use 1 to {MAX_TAG} characters on one line, without a comma, such as 'baseline'"
        )
    return tag


def _check_note(note: str) -> None:
    if len(note) > MAX_NOTE:
        raise ConfigurationError(f"a note of {len(note):,} characters is too long: use {MAX_NOTE:,} at most")
    try:
        note.encode()
    except UnicodeEncodeError:
        raise ConfigurationError("the note is not UTF-8: use text that is") from None


def _read(run: Path) -> Annotations:
    path = run / ANNOTATIONS_FILE
    try:
        return msgspec.json.decode(read_file(path, _MAX_BYTES), type=Annotations)
    except FileNotFoundError:
        return Annotations()
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror or error}", path=path) from None
    except (ValueError, RecursionError) as error:
        raise RunDirectoryError(
            f"{path} is damaged: {error}; move it to another place or delete it", path=path
        ) from None
