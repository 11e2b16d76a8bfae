"""Who has the terminal in which the command ``consumer`` runs: callbacks or loggers."""

import signal
from collections.abc import Sequence

from bus.errors import ConfigurationError
from consumers.api.callback import Callback
from consumers.api.logger import LoggerDestination
from consumers.runner.entries import unique_names


def beside_terminal(
    callbacks: Sequence[Callback], destinations: list[LoggerDestination], is_default: bool
) -> list[LoggerDestination]:
    """The destinations that can be had beside callbacks that draw on the whole terminal: none of them when
    ``is_default``, that is when nobody named them.

    Raises:
        ConfigurationError: two would write to the terminal, of which one draws on all of it.
    """
    owners = [
        shown for shown, callback in zip(unique_names(callbacks), callbacks, strict=True) if callback.owns_terminal
    ]
    if len(owners) > 1:
        raise ConfigurationError(f"{' and '.join(owners)} both draw on the whole terminal: give one of them")
    if not owners:
        return destinations
    if is_default:
        return []
    writing = [type(one).__name__ for one in destinations if one.writes_to_terminal]
    if writing:
        raise ConfigurationError(
            f"{owners[0]} draws on the whole terminal, where {' and '.join(writing)} would write too: "
            "log to a file ('--log csv'), or run them in a second terminal"
        )
    return destinations


def hold_open(callbacks: Sequence[Callback]) -> None:
    """Keeps callbacks open that show something, until SIGINT or SIGTERM."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        # First those that have the terminal: they give it back.
        for callback in sorted(callbacks, key=lambda one: not one.owns_terminal):
            callback.hold_open()
    except KeyboardInterrupt:
        """The signal ends it."""
    finally:
        signal.signal(signal.SIGTERM, before)
