"""The switch with which a training runs as if offloop were not in it."""

import os

from offloop.bus.errors import ConfigurationError

VARIABLE = "OFFLOOP_DISABLED"
"""The environment variable: ``1`` disables every publishing end."""
_MEANINGS = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("", "0", "false", "no", "off"), False)}


def is_disabled() -> bool:
    """``OFFLOOP_DISABLED`` disables offloop in this process.

    Raises :class:`offloop.bus.errors.ConfigurationError` for a value that is neither yes nor no."""
    value = os.environ.get(VARIABLE, "")
    meaning = _MEANINGS.get(value.strip().lower())
    if meaning is None:
        raise ConfigurationError(
            f"invalid {VARIABLE}={value!r}: use 1, true, yes or on to disable offloop; 0, false, no, off or nothing "
            "to enable it",
            name=VARIABLE,
            value=value,
        )
    return meaning
