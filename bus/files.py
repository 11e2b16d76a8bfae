"""Files that appear under their names whole or not at all; files opened in folders that others may write."""

import contextlib
import errno
import fcntl
import glob
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from offloop.bus.errors import CheckpointError, ConfigurationError, RunDirectoryError

TEMPORARY_NAME = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.tmp")
"""What a write leaves behind when it is killed: a folder of such a name beside the file ``name``."""

_LOCK_SECONDS = 10.0


@contextlib.contextmanager
def atomic_replace(path: Path, *, is_new: bool = False) -> Iterator[Path]:
    """Gives a path to make a file, a symbolic link or a folder at, which takes the place of ``path`` when the block
    ends. With ``is_new`` a folder does not replace another one in which something is.

    It does so in one step, and a file not before it is on the disk; the files in a folder have to be there already.
    Whatever goes wrong, ``path`` stays as it was and nothing else stays behind; after a kill the next write to the same
    path cleans up. A folder that is there already is moved away first, so a kill just then leaves none.

    Raises :class:`offloop.bus.errors.CheckpointError` for errors of the file system, in the block too."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for stray in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"):
            shutil.rmtree(stray, ignore_errors=True)
        # A folder and not a file: what writes the draft may make files of its own naming beside it.
        workplace = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        workplace.mkdir()
        try:
            draft = workplace / path.name
            yield draft
            if draft.is_dir() and not draft.is_symlink():
                for folder, _, _ in os.walk(draft):
                    sync(Path(folder))
                if os.path.lexists(path) and not is_new:
                    os.replace(path, workplace / "replaced")
            elif not draft.is_symlink():
                # Some writers let the owner alone read what they write; the umask decides, as with any other file.
                draft.chmod(workplace.stat().st_mode & 0o666)
                sync(draft)
            os.replace(draft, path)
            sync(path.parent)
        finally:
            shutil.rmtree(workplace, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}", path=path) from error


def sync(path: Path) -> None:
    """Has what is in a file, or the names in a directory, on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_output(output: Path, inputs: Sequence[Path], force: bool = False) -> Iterator[Path]:
    """Gives a path to write a file at, which takes the place of ``output`` when the block ends without an error.

    ``inputs`` are the files that it is made from. With ``force`` a file that is there already is replaced.

    Raises ConfigurationError: ``output`` is there already, or one of the inputs, or no file, or stands in no folder;
    RunDirectoryError: it cannot be written."""
    if output.is_dir():
        raise ConfigurationError(f"{output} is a folder: name a file in it with '--output'")
    if output.exists() and not output.is_file():
        raise ConfigurationError(f"{output} is not a file that can be replaced: choose another one with '--output'")
    if output.parent.exists() and not output.parent.is_dir():
        raise ConfigurationError(f"{output.parent} is not a folder: choose another file with '--output'")
    if any(output.exists() and path.exists() and output.samefile(path) for path in inputs):
        raise ConfigurationError(f"{output} is what is read: choose another file with '--output'")
    if os.path.lexists(output) and not force:
        raise ConfigurationError(f"{output} exists: choose another file with '--output', or replace it with '--force'")
    try:
        with atomic_replace(output) as draft:
            yield draft
    except CheckpointError as error:
        raise RunDirectoryError(str(error)) from None


class NotAFileError(OSError):
    """A file to be opened is a directory, a FIFO, a socket, a device, or a symbolic link."""


def open_file(
    path: str | os.PathLike[str],
    flags: int = os.O_RDONLY,
    mode: int = 0o600,
    *,
    dir_fd: int | None = None,
    follow: bool = False,
) -> int:
    """Opens a regular file without waiting; one that is made may be read by its owner alone unless ``mode`` says
    otherwise. ``follow`` is for files that the user has named.

    Raises NotAFileError: it is something else; OSError: it cannot be opened."""
    # Opening a FIFO waits for its other end unless it is opened without waiting.
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise NotAFileError(errno.ELOOP, "it is a symbolic link, which is not followed", str(path)) from None
        if error.errno in (errno.ENXIO, errno.EISDIR):
            raise NotAFileError(errno.EINVAL, "it is not a regular file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFileError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def read_file(path: str | os.PathLike[str], limit: int, *, dir_fd: int | None = None) -> bytes:
    """Reads a regular file of at most ``limit`` bytes.

    Raises NotAFileError: it is something else; OSError: it cannot be read, or is larger."""
    descriptor = open_file(path, dir_fd=dir_fd)
    try:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and {limit:,} are allowed", str(path))
        return os.read(descriptor, size)
    finally:
        os.close(descriptor)


def walk_files(folder: str | os.PathLike[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Each file in a folder and in those within it, by name, with what :func:`os.lstat` says of it; however deep they
    are nested. What cannot be read is left out, and no symbolic link is followed."""
    # Not os.walk(), which calls itself for each folder within a folder.
    folders = [os.fspath(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as listed:
                entries = sorted(listed, key=lambda entry: entry.name)
            inner = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            continue
        folders += reversed(inner)
        for entry in entries:
            with contextlib.suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    yield entry.path, entry.stat(follow_symlinks=False)


def open_directory(path: Path) -> int:
    """Opens a run's directory.

    Raises NotADirectoryError: it is something else, or a symbolic link; OSError: it cannot be opened."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
            text = "it is a symbolic link, which is not followed: name the directory to which it leads"
            raise NotADirectoryError(errno.ENOTDIR, text, str(path)) from None
        raise


def check_owner(directory: int) -> None:
    """Raises :class:`PermissionError` for an open directory that belongs to another user.

    Some file systems, such as network drives and what virtual machines share, give one owner to all files: a directory
    is ours if a file that we make in it has the same one."""
    owner = os.fstat(directory).st_uid
    if owner == os.geteuid():
        return
    name = f".{secrets.token_hex(8)}.new"
    descriptor = _make(name, directory)
    try:
        ours = os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        os.unlink(name, dir_fd=directory)
    if owner != ours:
        raise PermissionError(errno.EPERM, f"it belongs to user {owner}, and this process is of user {ours}")


def make_private(directory: int) -> None:
    """Restricts an open directory to its owner."""
    if stat.S_IMODE(os.fstat(directory).st_mode) & 0o077:
        os.fchmod(directory, 0o700)


def lock_directory(directory: int) -> None:
    """Locks an open directory until it is closed. Every process that may read it can lock it too, and be stopped.

    Raises :class:`OSError` when another process keeps it locked for ten seconds."""
    give_up = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up:
                raise OSError(errno.EBUSY, "another process keeps the folder locked") from None
            time.sleep(0.02)
        else:
            return


def reserve_space(directory: int, name: str, size: int) -> None:
    """Makes a file in an open directory that holds ``size`` bytes for :func:`replace_file_in_reserve`."""
    with open(_make(name, directory), "wb") as file:
        file.write(bytes(size))


def replace_file_in_reserve(directory: int, name: str, text: str, reserve: str) -> None:
    """Does what :func:`replace_file` does, in the space that ``reserve`` holds: also on a full disk."""
    try:
        with open(open_file(reserve, os.O_WRONLY, dir_fd=directory), "w") as file:
            file.write(text)
            file.truncate()
        os.replace(reserve, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        # Some file systems write elsewhere what replaces a part of a file.
        with contextlib.suppress(OSError):
            os.unlink(reserve, dir_fd=directory)
        replace_file(directory, name, text)


def replace_file(directory: int, name: str, text: str) -> None:
    """Writes a file in an open directory, whole or not at all; whatever has its name is replaced and not written to."""
    temporary = f".{name}.new"
    with open(_make(temporary, directory), "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)


def _make(name: str, directory: int) -> int:
    """Opens a new file in the place of what has its name."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)


def plain_name(name: object) -> str:
    """A file's name that leads nowhere else.

    Raises :class:`ValueError` for any other."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError("the recording is named by something that is not the name of a file in the run's directory")
    return name
