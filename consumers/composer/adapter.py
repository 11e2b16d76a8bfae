"""Callbacks that were written for MosaicML Composer, recognised by their methods, in a consumer."""

import functools
import inspect
import sys
from typing import Any

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.consumers.api.callback import Callback, MaybeAwaitable
from offloop.consumers.api.logger import Logger
from offloop.consumers.composer.names import METHODS, ROOT, stand_in
from offloop.consumers.composer.state import ComposerState, handling


class AdaptedCallback(Callback):
    """A callback of Composer, with its ``fields``, ``every``, ``background`` and ``barrier_events`` if it has them."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        for name in ("fields", "every", "background", "barrier_events"):
            if hasattr(callback, name):
                setattr(self, name, getattr(callback, name))
        if not _overrides(callback, "run_event"):
            self.events = [event for event in Event if _overrides(callback, event.value)]  # type: ignore[misc]

    @property
    def shown_as(self) -> str:
        return type(self.callback).__name__

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        with handling(state):
            core = sys.modules.get(f"{ROOT}.core")
            theirs = event if core is None else core.Event(event.value)
            result: MaybeAwaitable = self.callback.run_event(theirs, ComposerState(state), logger)
        return result

    def close(self, state: Snapshot, logger: Logger) -> MaybeAwaitable:
        with handling(state):
            result: MaybeAwaitable = self.callback.close(ComposerState(state), logger)
        return result

    def post_close(self) -> MaybeAwaitable:
        result: MaybeAwaitable = self.callback.post_close()
        return result

    @property
    def has_state(self) -> bool:
        return _overrides(self.callback, "state_dict")

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.callback.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.callback.load_state_dict(state)


def adapt(found: object) -> type[Callback] | None:
    """Return our class for a class with all methods of Composer's callbacks; ``None`` for anything else."""
    if not isinstance(found, type) or not all(callable(getattr(found, name, None)) for name in METHODS):
        return None
    return _adapted_class(found)


def _adapted_class(theirs: type[Any]) -> type[AdaptedCallback]:
    signature = inspect.signature(theirs.__init__)
    named = [one for one in signature.parameters.values() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]

    @functools.wraps(theirs.__init__)
    def make(self: AdaptedCallback, *arguments: Any, **options: Any) -> None:
        with stand_in():
            made = theirs(*arguments, **options)
        AdaptedCallback.__init__(self, made)

    make.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    members = {"__init__": make, "__module__": theirs.__module__, "__doc__": inspect.getdoc(theirs)}
    return type(theirs.__name__, (AdaptedCallback,), members)


def _overrides(callback: Any, name: str) -> bool:
    if name in vars(callback):
        return True
    defined = [base for base in type(callback).__mro__ if name in vars(base)]
    root = next(base for base in reversed(type(callback).__mro__) if "run_event" in vars(base))
    return defined[0] is not root
