"""Keys: pairs of CURVE keys in files, as pyzmq's ``zmq.auth.certs`` writes them (ZPL, https://rfc.zeromq.org/spec/4)."""

import os
import re
import shlex
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from offloop.bus.errors import ConfigurationError

SECRET_SUFFIX = ".key_secret"
PUBLIC_SUFFIX = ".key"

_KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
_Z85_KEY = re.compile(rb"[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}\Z")


@dataclass(frozen=True)
class KeyPair:
    """A public key and the secret one that belongs to it, 40 characters of Z85 each."""

    public: bytes
    secret: bytes = field(repr=False)


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


def load_public_key(path: str | os.PathLike[str]) -> bytes:
    """Reads the public key in a file that was given away.

    Raises:
        ConfigurationError: there is no such key in it, or a secret one too, which is not to be given away.
    """
    public, secret = _load(Path(path))
    if secret is not None:
        raise ConfigurationError(
            f"{path} holds a secret key where a public one is needed: use the file '{PUBLIC_SUFFIX}' beside it, and "
            "keep the secret one"
        )
    return public


def load_secret_key(path: str | os.PathLike[str]) -> KeyPair:
    """Reads one's own key pair.

    Raises:
        ConfigurationError: it is not there, is damaged, holds only the public key, or others can get at it.
    """
    file = Path(path)
    mode = _mode(file)
    public, secret = _load(file)
    if secret is None:
        raise ConfigurationError(
            f"{path} holds a public key where a secret one is needed: use the file '{SECRET_SUFFIX}' beside it"
        )
    if mode & 0o077:
        raise ConfigurationError(
            f"the secret key {path} is open to others (mode {mode:04o}): chmod 600 {shlex.quote(str(path))}"
        )
    check_not_writable_by_others(file.absolute().parent)
    import zmq

    try:
        belongs = zmq.curve_public(secret) == public
    except zmq.ZMQError:
        belongs = False  # not every 40 characters of the alphabet are a number of 32 bytes
    if not belongs:
        raise ConfigurationError(f"{path} is damaged: its public and its secret key do not belong together")
    return KeyPair(public, secret)


def is_key(value: bytes) -> bool:
    """Whether this is a key as it is written: 40 characters of Z85 (https://rfc.zeromq.org/spec/32)."""
    return _Z85_KEY.match(value) is not None


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


def _load(path: Path) -> tuple[bytes, bytes | None]:
    import zmq.auth

    public: bytes | None
    try:
        public, secret = zmq.auth.load_certificate(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, IndexError):
        public = secret = None
    if public is None or not is_key(public) or (secret is not None and not is_key(secret)):
        raise ConfigurationError(f"{path} is damaged or no key file: use NAME{PUBLIC_SUFFIX} or NAME{SECRET_SUFFIX}")
    return public, secret


def _unreadable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"{path} cannot be read: {error.strerror or error}")
