"""Tags, note and marks of a run, in a file in its directory."""

from collections.abc import Collection
from pathlib import Path

import msgspec

from offloop.bus.errors import ConfigurationError
from offloop.bus.run_files import JsonFile

MAX_TAG = 64
MAX_TAGS = 1000
MAX_NOTE = 10_000


class Annotations(msgspec.Struct, frozen=True, omit_defaults=True):
    tags: tuple[str, ...] = ()
    note: str = ""
    pinned: bool = False
    archived: bool = False


ANNOTATIONS = JsonFile("annotations.json", Annotations)


def read_annotations(run: Path) -> Annotations:
    return ANNOTATIONS.find(run) or Annotations()


def annotate(
    run: Path,
    *,
    add: Collection[str] = (),
    remove: Collection[str] = (),
    note: str | None = None,
    pinned: bool | None = None,
    archived: bool | None = None,
) -> Annotations:
    """Add and remove tags, replace the note, pin or archive a run. Safe for several processes."""
    new = [check_tag(tag) for tag in add]
    if note is not None and len(note) > MAX_NOTE:
        raise ConfigurationError(f"a note of {len(note):,} characters is too long: use {MAX_NOTE:,} at most")
    try:
        (note or "").encode()
    except UnicodeEncodeError:
        raise ConfigurationError("the note is not UTF-8: use text that is") from None

    def change(before: Annotations | None) -> Annotations:
        before = before or Annotations()
        tags = tuple(tag for tag in dict.fromkeys([*before.tags, *new]) if tag not in remove)
        if len(tags) > max(MAX_TAGS, len(before.tags)):
            raise ConfigurationError(
                f"run {run.name} would have {len(tags):,} tags, and {MAX_TAGS:,} are allowed: remove some first"
            )
        given = {"note": note, "pinned": pinned, "archived": archived}
        return msgspec.structs.replace(
            before, tags=tags, **{name: one for name, one in given.items() if one is not None}
        )

    return ANNOTATIONS.update(run, change)


def check_tag(tag: str) -> str:
    """Strip a tag. Raises ConfigurationError if it is not allowed."""
    tag = tag.strip()
    if not tag or len(tag) > MAX_TAG or "," in tag or not tag.isprintable():
        raise ConfigurationError(
            f"{tag!r} is not a tag: use 1 to {MAX_TAG} characters on one line, without a comma, such as 'baseline'"
        )
    return tag
