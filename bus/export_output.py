"""Files that commands write from recordings: under their names whole, or not at all."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bus.errors import CheckpointError, ConfigurationError, RunDirectoryError
from bus.replacing import replacing

__all__ = ["placing"]


@contextmanager
def placing(output: Path, inputs: Sequence[Path], force: bool = False) -> Iterator[Path]:
    """Gives a path to write a file at, which takes the place of ``output`` when the block ends without an error.

    ``inputs`` are the files that it is made from. With ``force`` a file that is there already is replaced.

    Raises:
        ConfigurationError: ``output`` is there already, or one of the inputs, or no file, or stands in no folder.
        RunDirectoryError: it cannot be written.
    """
    if output.is_dir():
        raise ConfigurationError(f"{output} is a folder: name a file in it with '--output'")
    if output.exists() and not output.is_file():
        raise ConfigurationError(f"{output} is no file that could be replaced: choose another one with '--output'")
    if output.parent.exists() and not output.parent.is_dir():
        raise ConfigurationError(f"{output.parent} is no folder: choose another file with '--output'")
    if any(_is_same(output, path) for path in inputs):
        raise ConfigurationError(f"{output} is what is read: choose another file with '--output'")
    if os.path.lexists(output) and not force:
        raise ConfigurationError(f"{output} exists: choose another file with '--output', or replace it with '--force'")
    try:
        with replacing(output) as draft:
            yield draft
    except CheckpointError as error:
        raise RunDirectoryError(str(error)) from None


def _is_same(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and os.path.samefile(one, other)
