"""The base of adapters, which contains their errors and restores wrapped methods."""

import functools
import logging
import traceback
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from offloop.attached.options import Options, check_options
from offloop.attached.training import AttachedTraining
from offloop.bus.errors import OffloopError
from offloop.bus.publisher.own_events import OwnEvents
from offloop.bus.types.event import Event

_log = logging.getLogger("offloop")
_Adapter = TypeVar("_Adapter", bound=type[Any])
_Function = TypeVar("_Function", bound=Callable[..., Any])


def contained(method: _Function) -> _Function:
    """Wrap a method of an adapter so that it raises nothing, and does nothing while the adapter is ``detached``.

    The first error detaches the adapter with its method ``detach(error)``. KeyboardInterrupt and SystemExit pass
    through."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.detached:
            return None
        try:
            return method(self, *args, **kwargs)
        # Whatever is wrong here, the training must continue.
        except Exception as error:  # noqa: BLE001
            detach_for(self, error)
            return None

    return call  # type: ignore[return-value]


def detach_for(adapter: Any, error: Exception) -> None:
    """Report an error of offloop, and detach the adapter: the training continues without it."""
    adapter.detached = True
    _report(error)
    try:
        adapter.detach(error)
    except Exception as further:  # noqa: BLE001
        _report(further)


def contain(*names: str, hooks: bool = False, outside: str = "") -> Callable[[_Adapter], _Adapter]:
    """Make these methods of a class :func:`contained`; with ``hooks`` also all ``on_*`` but ``outside``."""

    def decorate(adapter: _Adapter) -> _Adapter:
        if missing := set(names) - vars(adapter).keys():
            raise AttributeError(f"{adapter.__name__} has no {', '.join(sorted(missing))}")
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
        "offloop is detached, the training continues without it: %s (%s, line %s, in %s); please report this",
        # Also of an error that cannot be printed.
        *(traceback.format_exception_only(error)[-1].rstrip(), frame.filename, frame.lineno, frame.name),
    )


class Wrapped:
    """Calls functions before and after a method of one object, with the method's arguments.

    ``after`` receives the result as its first argument, ``failed`` only the exception. ``within`` returns a context
    manager for the call, and receives nothing."""

    def __init__(
        self,
        owner: Any,
        name: str,
        before: Callable[..., object] | None = None,
        after: Callable[..., object] | None = None,
        failed: Callable[[BaseException], object] | None = None,
        within: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        original = getattr(owner, name)
        # Not by setattr, which Keras tracks.
        self._attributes, self._name = vars(owner), name
        self._earlier = self._attributes.get(name)
        self._before, self._after, self._failed = before, after, failed
        work = original if within is None else _calling_within(within, original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._before is not None:
                self._before(*args, **kwargs)
            try:
                result = work(*args, **kwargs)
            except BaseException as error:
                if self._failed is not None:
                    self._failed(error)
                raise
            if self._after is not None:
                self._after(result, *args, **kwargs)
            return result

        self._attributes[name] = self._call = call

    def remove(self) -> None:
        """Stop the calls, and restore the method unless it was wrapped again since."""
        self._before = self._after = self._failed = None
        if self._attributes.get(self._name) is not self._call:
            return
        if self._earlier is None:
            del self._attributes[self._name]
        else:
            self._attributes[self._name] = self._earlier


def _calling_within(
    within: Callable[[], AbstractContextManager[object]], function: Callable[..., Any]
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with within():
            return function(*args, **kwargs)

    return call


class RunEvents(OwnEvents):
    """Events of one's own in the run of an adapter. Errors are reported, never raised."""

    _training: AttachedTraining
    detached: bool

    @property
    def requested_events(self) -> set[Event]:  # type: ignore[override]  # it changes with the training
        return set() if self.detached else self._training.requested_events

    def publish_own(self, event: Event, fields: dict[str, Any]) -> None:
        if not self.detached:
            try:
                self._training.publish_own(event, fields)
            except Exception as error:  # noqa: BLE001  the training must continue
                self._refuse_own(event.value, error)

    def _refuse_own(self, what: str, error: Exception) -> None:
        if not self.detached:
            self._training.leave_out(what, error)

    def room_for_rows(self) -> int:
        publisher = None if self.detached else self._training.publisher
        return 0 if publisher is None else publisher.room_for_rows()

    def _default_step(self) -> int:
        return 0 if self.detached else self._training.batches_done


class Adapter(RunEvents):
    def __init__(self, options: Options) -> None:
        super().__init__()
        check_options(options)
        self.detached: bool = True
        """True if there is no run: outside of a training, if disabled, or after an error of offloop."""
        self._options = options
        self._wrapped: list[Wrapped] = []

    def detach(self, error: BaseException) -> None:
        if hasattr(self, "_training"):
            self._release().detach(error)

    @contained
    def _end(self, error: BaseException | None = None) -> None:
        self._release().close(error)

    def _release(self) -> AttachedTraining:
        self.detached = True
        for one in self._wrapped:
            one.remove()
        self._wrapped.clear()
        training = self._training
        del self._training
        return training


def missing(
    error: ModuleNotFoundError, needed_by: str, install: str, brings: Collection[str] = ()
) -> ModuleNotFoundError:
    """Replace an import error of ``install`` or ``brings`` by one that names the package to install."""
    module = (error.name or "").partition(".")[0]
    # pytorch-ignite has the module ignite.
    if module not in (*install.replace("-", " ").split(), *brings):
        return error
    return ModuleNotFoundError(f"{needed_by} needs {module}; install it with: pip install {install}", name=error.name)
