"""The files of a public key and of the secret one that belongs to it."""

import os
import re
import shlex
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from offloop.bus.errors import ConfigurationError

_KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")


def keys_dir(value: str | os.PathLike[str] | None = None) -> Path:
    """Where keys live: ``value`` if given, else ``$OFFLOOP_KEYS_DIR``, else ``~/.config/offloop/keys``.

    Raises:
        ConfigurationError: the user has no home directory.
    """
    if given := value or os.environ.get("OFFLOOP_KEYS_DIR"):
        return Path(given)
    try:
        return Path.home() / ".config" / "offloop" / "keys"
    except RuntimeError:
        raise ConfigurationError(
            f"user {os.getuid()} has no home directory to keep keys in: name a directory with OFFLOOP_KEYS_DIR"
        ) from None


def write_pair(
    name: str, where: str | os.PathLike[str] | None, make: Callable[[Path], tuple[Path, Path]]
) -> tuple[Path, Path]:
    """Keeps the files of a public key and of the secret one that belongs to it, which ``make`` writes into the folder
    that it is given: the first for all to read, the second for its owner alone. Returns them, in their place.

    Raises:
        ConfigurationError: the name cannot be a file's, a key of that name is there already, or the files cannot be
            written.
    """
    if not _KEY_NAME.match(name):
        raise ConfigurationError(
            f"{name!r} cannot be a key's name: use 1 to 100 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit"
        )
    directory = keys_dir(where)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_not_writable_by_others(directory)
        # Written where no other user can look, whatever the umask is, and only then given their names.
        with tempfile.TemporaryDirectory(dir=directory, prefix=".new-") as workshop:
            made = make(Path(workshop))
            public, secret = (directory / path.name for path in made)
            for path, mode in zip(made, (0o644, 0o600), strict=True):
                path.chmod(mode)
            # Unlike a rename, a link never replaces what is there.
            os.link(made[1], secret)
            try:
                os.link(made[0], public)
            except BaseException:
                secret.unlink()
                raise
    except FileExistsError:
        raise ConfigurationError(
            f"there is a key {name!r} in {directory} already: choose another name, or remove {public.name} and "
            f"{secret.name} once they are not used"
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"the keys cannot be written to {directory}: {error.strerror}; choose another directory with '--dir'"
        ) from None
    return public, secret


def check_not_writable_by_others(path: Path) -> None:
    """Raises :class:`~offloop.bus.errors.ConfigurationError` when others than its owner can change or replace what is
    there."""
    mode = _mode(path)
    if mode & 0o022:
        raise ConfigurationError(
            f"{path} can be written by others (mode {mode:04o}), so what is in it may be theirs: "
            f"chmod go-w {shlex.quote(str(path))}"
        )


def _mode(path: Path) -> int:
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"{path} cannot be read: {error.strerror or error}")
