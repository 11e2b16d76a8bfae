"""A recording, or a list of snapshots, through callbacks."""

import os
from collections.abc import Iterable, Sequence

from bus.recording import Recording
from bus.snapshot import Snapshot
from consumers.callback import Callback
from consumers.logger import LoggerDestination
from consumers.runner import OnError
from consumers.testing.harness import Harness, as_callbacks
from consumers.testing.logged import Logged

__all__ = ["replay"]


def replay(
    callbacks: Callback | Sequence[Callback],
    source: Recording | str | os.PathLike[str] | Iterable[Snapshot],
    *,
    loggers: Sequence[LoggerDestination] = (),
    on_error: OnError = "stop",
) -> Logged:
    """Takes a run through callbacks, as fast as it can be read, and returns what they logged.

    They are run by what runs them live, in this process and thread, one after the other at each event; a callback with
    ``own_cursor`` too, so that the order of what is logged is always the same. Commands that they send are kept in
    :attr:`Logged.commands` and go nowhere.

    Args:
        callbacks: one, or several; objects that have not run before.
        source: a recording, the path of one or of a run's directory, a :class:`~consumers.testing.MemoryStream`, or
            snapshots in order.
        loggers: destinations of your own, to be given what is logged as well.
        on_error: what happens when a callback raises. ``stop`` raises its exception here, with its traceback, also when
            it comes from ``close``; with ``continue`` and ``disable`` the errors are counted in
            ``Logged.statistics.errors``.

    Raises:
        RecordingError: there is no such recording, or it is not one.
        ConfigurationError: a callback handles no event.
        OffloopError: one of ``loggers`` failed.
    """
    made = as_callbacks(callbacks)
    stream = Recording(source) if isinstance(source, str | os.PathLike) else source
    return Harness(stream, made, loggers, on_error).run()
