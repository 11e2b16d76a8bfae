"""Nkeys identify clients of NATS servers: a secret seed in a file of the user's, and its public key.

See https://docs.nats.io/running-a-nats-service/configuration/securing_nats/auth_intro/nkey_auth"""

import os
import re
import shlex
import stat
from dataclasses import dataclass, field
from pathlib import Path

from offloop.bus.errors import ConfigurationError, require
from offloop.bus.lazy import LazyModule

nkeys: LazyModule = LazyModule("nkeys")

SEED_SUFFIX = ".nkey_secret"
NKEY_SUFFIX = ".nkey"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
_PUBLIC = re.compile(r"U[A-Z2-7]{55}\Z")
_SEED = re.compile(r"SU[A-Z2-7]{56}\Z")
_MOST_BYTES = 4096


@dataclass(frozen=True)
class Nkey:
    public: str
    seed: str = field(repr=False)


def make_nkey(name: str, folder: Path) -> tuple[Path, Path, Nkey]:
    """Create an nkey in a folder.

    Returns its public file ``NAME.nkey``, its secret file ``NAME.nkey_secret``, and the key."""
    require("an nkey", "nats", "nkeys")
    if not _NAME.match(name):
        raise ConfigurationError(
            f"{name!r} cannot be a key's name: use 1 to 100 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit"
        )
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER).decode()
    made = Nkey(_public_of(seed), seed)
    public, secret = folder / f"{name}{NKEY_SUFFIX}", folder / f"{name}{SEED_SUFFIX}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (mode := stat.S_IMODE(folder.stat().st_mode)) & 0o022:
            raise ConfigurationError(
                f"{folder} can be written by others (mode {mode:04o}), so its keys may be theirs: "
                f"chmod go-w {shlex.quote(str(folder))}"
            )
        for path, text, mode in ((secret, seed, 0o600), (public, made.public, 0o644)):
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
                file.write(f"{text}\n")
    except FileExistsError:
        raise ConfigurationError(
            f"key {name!r} exists already in {folder}: choose another name, or remove {public.name} and "
            f"{secret.name} once they are not used"
        ) from None
    except OSError as error:
        raise ConfigurationError(
            f"the keys cannot be written to {folder}: {error.strerror}; choose another directory with '--dir'"
        ) from None
    return public, secret, made


def load_nkey(path: str | os.PathLike[str]) -> Nkey:
    """Read this user's nkey from the file with its seed, which others must not be able to read."""
    require("an nkey", "nats", "nkeys")
    file = Path(path)
    seed, mode = _read(file)
    if not (public := _public_of(seed)):
        what = "a public nkey where a seed is needed" if _PUBLIC.match(seed) else "no seed of a user's nkey"
        raise ConfigurationError(
            f"{path} holds {what}: use the file NAME{SEED_SUFFIX} that 'offloop server keygen NAME' wrote", value=file
        )
    if mode & 0o077:
        raise ConfigurationError(
            f"the seed {path} is open to others (mode {mode:04o}): chmod 600 {shlex.quote(str(path))}, and make a new "
            "one with 'offloop server keygen' if another user may have read it",
            value=file,
        )
    return Nkey(public, seed)


def public_nkey(text: str) -> str:
    if _PUBLIC.match(text):
        return text
    if _SEED.match(text):
        raise ConfigurationError("this is the secret seed of an nkey: use the public nkey, U...")
    if not (text.endswith(NKEY_SUFFIX) or Path(text).is_file()):
        raise ConfigurationError(
            f"{text[:100]!r} is not a public nkey: write U and 55 characters, or the file NAME{NKEY_SUFFIX} "
            "that 'offloop server keygen NAME' wrote"
        )
    found, _ = _read(Path(text))
    if not _PUBLIC.match(found):
        raise ConfigurationError(
            f"{text} holds no public nkey: use a file that 'offloop server keygen NAME' wrote, NAME{NKEY_SUFFIX}"
        )
    return found


def _public_of(seed: str) -> str:
    """Return the public key of a seed, or an empty text if it is invalid."""
    if not _SEED.match(seed):
        return ""
    try:
        prefix, raw = nkeys.decode_seed(seed.encode())
        if nkeys.encode_seed(raw, prefix).decode() != seed:
            return ""  # its checksum is wrong
        return str(nkeys.from_seed(bytearray(seed.encode())).public_key.decode())
    except (nkeys.NkeysError, ValueError):
        return ""


def _read(file: Path) -> tuple[str, int]:
    try:
        with open(file, "rb") as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            return stream.read(_MOST_BYTES).decode("ascii", "replace").strip(), mode
    except OSError as error:
        raise ConfigurationError(
            f"{file} cannot be read: {error.strerror or error}; 'offloop server keygen NAME' makes an nkey", value=file
        ) from None
