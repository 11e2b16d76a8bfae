"""The environment variable that switches offloop off."""

import os

from offloop.bus.errors import ConfigurationError

VARIABLE = "OFFLOOP_DISABLED"
_MEANINGS = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("", "0", "false", "no", "off"), False)}


def is_disabled() -> bool:
    """Return whether ``OFFLOOP_DISABLED`` disables offloop. Raises ConfigurationError for an invalid value."""
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
