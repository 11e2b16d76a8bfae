"""Atomic writes of files, and files in folders that other users may write."""

import contextlib
import errno
import fcntl
import glob
import os
import re
import secrets
import shlex
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from offloop.bus.errors import CheckpointError, ConfigurationError, RunDirectoryError

TEMPORARY_NAME = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.tmp")
"""Name of the folder that a killed write leaves beside the file ``name``."""


def read_private(path: Path, what: str) -> str:
    """Return the text of a file with secrets. Raises ConfigurationError if it is unreadable, or others can read it."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"{what} {path} cannot be read: {why}") from None
    if mode & 0o077:
        raise ConfigurationError(
            f"{what} {path} is open to others (mode {mode:04o}): chmod 600 {shlex.quote(str(path))}, and replace the "
            "secrets if another user may have read it"
        )
    return text


@contextlib.contextmanager
def atomic_replace(path: Path, *, is_new: bool = False) -> Iterator[Path]:
    """Yield a path for a new file, symbolic link or folder, which replaces ``path`` when the block ends.

    The replacement is one step, once the file is on the disk; files in a folder must be there before. After an error
    ``path`` is unchanged and nothing else stays; after a kill the next write to the same path cleans up. An existing
    folder is moved away first, so a kill at that moment leaves neither. With ``is_new`` a folder does not replace one
    that is not empty.

    Raises CheckpointError for errors of the file system, also within the block."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for stray in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp"):
            shutil.rmtree(stray, ignore_errors=True)
        # A folder and not a file: the writer of the draft may make further files beside it.
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
                # Some writers make files that only the owner may read; as with other files, the umask decides.
                draft.chmod(workplace.stat().st_mode & 0o666)
                sync(draft)
            os.replace(draft, path)
            sync(path.parent)
        finally:
            shutil.rmtree(workplace, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}", path=path) from error


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_output(output: Path, inputs: Sequence[Path], force: bool = False) -> Iterator[Path]:
    """Yield a path for a new file, which replaces ``output`` when the block ends without an error.

    ``inputs`` are the files that it is made from. An existing file is replaced only with ``force``; a symbolic link
    stays, and its target is replaced.

    Raises ConfigurationError: ``output`` exists, is one of the inputs, not a file, or not in a folder;
    RunDirectoryError: it cannot be written."""
    if output.is_dir():
        raise ConfigurationError(f"{output} is a folder: name a file in it with '--output'")
    if output.exists() and not output.is_file():
        raise ConfigurationError(f"{output} is not a file that can be replaced: choose another one with '--output'")
    if output.parent.exists() and not output.parent.is_dir():
        raise ConfigurationError(f"{output.parent} is not a folder: choose another file with '--output'")
    if any(output.exists() and path.exists() and output.samefile(path) for path in inputs):
        raise ConfigurationError(f"{output} is an input: choose another file with '--output'")
    if os.path.lexists(output) and not force:
        raise ConfigurationError(f"{output} exists: choose another file with '--output', or replace it with '--force'")
    try:
        # Replacing a link such as /dev/stdout would break it for every other program.
        with atomic_replace(Path(os.path.realpath(output))) as draft:
            yield draft
    except CheckpointError as error:
        raise RunDirectoryError(str(error)) from None


class NotAFileError(OSError):
    """The path is a directory, a FIFO, a socket, a device, or a symbolic link."""


def open_file(
    path: str | os.PathLike[str],
    flags: int = os.O_RDONLY,
    mode: int = 0o600,
    *,
    dir_fd: int | None = None,
    follow: bool = False,
) -> int:
    """Open a regular file without waiting. A new file is readable by its owner alone unless ``mode`` differs.

    ``follow`` is for paths from the user. Raises NotAFileError for anything but a regular file."""
    # Opening a FIFO without O_NONBLOCK waits for its other end.
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise NotAFileError(errno.ELOOP, "it is a symbolic link", str(path)) from None
        if error.errno in (errno.ENXIO, errno.EISDIR):
            raise NotAFileError(errno.EINVAL, "it is not a regular file", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFileError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def read_file(path: str | os.PathLike[str], limit: int, *, dir_fd: int | None = None) -> bytes:
    """Read a regular file of at most ``limit`` bytes. Raises NotAFileError, or OSError if it is larger."""
    descriptor = open_file(path, dir_fd=dir_fd)
    try:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and {limit:,} are allowed", str(path))
        return os.read(descriptor, size)
    finally:
        os.close(descriptor)


def walk_files(folder: str | os.PathLike[str]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield each file below a folder, by name, with its :func:`os.lstat`.

    Depth is not limited. Unreadable folders are skipped, symbolic links not followed."""
    # Not os.walk(), which is recursive.
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
    """Open a run's directory. Raises NotADirectoryError for anything else, also for a symbolic link."""
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
            text = "it is a symbolic link: name its target"
            raise NotADirectoryError(errno.ENOTDIR, text, str(path)) from None
        raise


def check_owner(directory: int) -> None:
    """Raise PermissionError for an open directory of another user.

    Some file systems, such as network drives and shared folders of virtual machines, give all files one owner: the
    directory is ours if a new file in it has the same owner."""
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
        raise PermissionError(errno.EPERM, f"it belongs to user {owner}, and this process runs as user {ours}")


def make_private(directory: int) -> None:
    if stat.S_IMODE(os.fstat(directory).st_mode) & 0o077:
        os.fchmod(directory, 0o700)


def lock_directory(directory: int, seconds: float = 10.0) -> None:
    """Lock an open directory until it is closed. Any process that may read it can lock it too, and be stopped.

    Raises OSError if another process keeps it locked for so many seconds."""
    give_up = time.monotonic() + seconds
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
    """Make a file of ``size`` bytes in an open directory, for :func:`replace_file_in_reserve`."""
    with open(_make(name, directory), "wb") as file:
        file.write(bytes(size))


def replace_file_in_reserve(directory: int, name: str, text: str, reserve: str) -> None:
    """As :func:`replace_file`, in the space of the file ``reserve``, so that it works on a full disk."""
    try:
        with open(open_file(reserve, os.O_WRONLY, dir_fd=directory), "w") as file:
            file.write(text)
            file.truncate()
        os.replace(reserve, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        # Some file systems write a replaced part of a file to another place.
        with contextlib.suppress(OSError):
            os.unlink(reserve, dir_fd=directory)
        replace_file(directory, name, text)


def replace_file(directory: int, name: str, content: str | bytes) -> None:
    """Write a file in an open directory atomically. An existing file is replaced, never written to."""
    temporary = f".{name}.new"
    with open(_make(temporary, directory), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
    os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)


def _make(name: str, directory: int) -> int:
    """Open a new file, and remove an existing one of that name."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)


def plain_name(name: object) -> str:
    """Return the name of a file if it leads to no other folder. Raises ValueError for any other."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError("the recording's name is not the name of a file")
    return name
