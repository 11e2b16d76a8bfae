"""Hooks for Lightning and Transformers in a process started by ``offloop run``.

Imports only the standard library: Lightning loads it wherever offloop is installed."""

import contextlib
import functools
import json
import logging
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from offloop.startup import note

if TYPE_CHECKING:
    from offloop.attached.options import Options

VARIABLE = "OFFLOOP_RUN"
"""Set by ``offloop run``: JSON with ``folder`` (for notes), ``callbacks``, ``loggers``, their ``settings``, and
``options`` of the adapters."""
ATTACHED = "attached"  # note of a run that has begun

_log = logging.getLogger("offloop")


def lightning_callbacks() -> list[Any]:
    """Return the callbacks for each Lightning trainer, none without ``offloop run``.

    The entry point ``lightning.pytorch.callbacks_factory`` calls it."""
    if VARIABLE in os.environ:
        with _contained():
            from offloop.lightning import AutomaticCallback

            return [AutomaticCallback(**_options())]
    return []


def attach_to_transformers(module: ModuleType) -> None:
    construct = module.Trainer.__init__

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        with _contained():
            from offloop.transformers import OffloopCallback

            self.add_callback(OffloopCallback(self, **_options()))

    module.Trainer.__init__ = init


def note_attached() -> None:
    """Inform ``offloop run``, if it started this process, that a run has begun."""
    if VARIABLE in os.environ:
        note(ATTACHED, json.loads(os.environ[VARIABLE])["folder"])


@contextlib.contextmanager
def _contained() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001
        _log.error("offloop is not attached, the script continues without it: %s", error)


def _options() -> "Options":
    import cloudpickle  # type: ignore[import-untyped]

    from offloop.consumers.cli.registry import create_selected

    given = json.loads(os.environ[VARIABLE])
    callbacks, loggers = create_selected(given["callbacks"], given["loggers"], given["settings"])
    for one in (*callbacks, *loggers):
        module = sys.modules[type(one).__module__]
        if module.__name__.startswith("offloop_file_"):
            # The consumer's process cannot import a class from a file by name.
            cloudpickle.register_pickle_by_value(module)
    options: Options = given["options"]
    return {**options, "callbacks": callbacks, "loggers": loggers}
