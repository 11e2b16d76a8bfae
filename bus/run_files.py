"""Opens what is in run directories: nothing that is not a regular file is waited for or read, no symbolic link is
followed, and a directory of somebody else is not written to."""

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path

from bus.descriptors import with_reserve

__all__ = ["NotAFileError", "check_owner", "open_directory", "open_file", "plain_name", "replace_file"]


class NotAFileError(OSError):
    """What was to be opened is a directory, a FIFO, a socket, a device, or a symbolic link."""


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

    Raises:
        NotAFileError: it is something else.
        OSError: it cannot be opened.
    """
    # Opening a FIFO waits for its other end unless it is told not to.
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = with_reserve(lambda: os.open(path, flags, mode, dir_fd=dir_fd))
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


def open_directory(path: Path) -> int:
    """Opens a run's directory.

    Raises:
        NotADirectoryError: it is something else, or a symbolic link.
        OSError: it cannot be opened.
    """
    try:
        return with_reserve(lambda: os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
            text = "it is a symbolic link, which is not followed: name the directory to which it leads"
            raise NotADirectoryError(errno.ENOTDIR, text, str(path)) from None
        raise


def check_owner(directory: int) -> None:
    """Raises :class:`PermissionError` for an open directory that belongs to somebody else.

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


def replace_file(directory: int, name: str, text: str) -> None:
    """Writes a file in an open directory, whole or not at all; whatever has its name is replaced and not written to."""
    temporary = f".{name}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=directory)
    descriptor = _make(temporary, directory)
    with open(descriptor, "w") as file:
        file.write(text)
    os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)


def _make(name: str, directory: int) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return with_reserve(lambda: os.open(name, flags, 0o600, dir_fd=directory))


def plain_name(name: object) -> str:
    """A file's name that leads nowhere else.

    Raises :class:`ValueError` for any other."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError("the recording is named by something that is not the name of a file in the run's directory")
    return name
