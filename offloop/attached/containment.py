"""Errors of an adapter: shown once, never raised in the training."""

import functools
import logging
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from offloop.bus.errors import OffloopError

_log = logging.getLogger("offloop")
_Adapter = TypeVar("_Adapter", bound=type[Any])
_Function = TypeVar("_Function", bound=Callable[..., Any])


def contained(method: _Function) -> _Function:
    """Wrap a method of an adapter so that it raises nothing and does nothing while the adapter is ``detached``. The
    first error detaches it, by its method ``detach(error)``. Ctrl-C and the like go through."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.detached:
            return None
        try:
            return method(self, *args, **kwargs)
        # Whatever is wrong in here, the training is worth more.
        except Exception as error:  # noqa: BLE001
            self.detached = True
            _report(error)
            try:
                self.detach(error)
            except Exception as further:  # noqa: BLE001
                _report(further)
            return None

    return call  # type: ignore[return-value]


def contain(*names: str, hooks: bool = False, outside: str = "") -> Callable[[_Adapter], _Adapter]:
    """Make these methods of a class :func:`contained`, and with ``hooks`` all that begin with ``on_``, but the one
    ``outside``, which ends the time without a run."""

    def decorate(adapter: _Adapter) -> _Adapter:
        for name, method in list(vars(adapter).items()):
            if name in names or (hooks and name.startswith("on_") and name != outside):
                setattr(adapter, name, contained(method))
        return adapter

    return decorate


def _report(error: Exception) -> None:
    _log.debug("the error that detached offloop", exc_info=error)
    if isinstance(error, OffloopError):
        _log.error("offloop is detached, the training continues without it: %s", error)
        return
    frame = traceback.extract_tb(error.__traceback__)[-1]
    _log.error(
        "offloop is detached, the training continues without it: %s: %s (%s, line %s, in %s); please report this",
        *(type(error).__name__, error, frame.filename, frame.lineno, frame.name),
    )
