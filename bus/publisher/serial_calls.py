"""Calls of several threads and signal handlers, one at a time, without a wait."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from threading import get_ident


class SerialCalls(ABC):
    """Lets one call at a time into the state of an object. A call that comes meanwhile, from another thread or a signal
    handler, returns at once: the one at work does it as its last act.

    Python switches to another thread or to a signal handler only after calls and jumps back: nothing comes between a
    look at ``_waiting`` and ``_inside`` and the note after it. Frequent calls do as :meth:`_in_turn` does, themselves.
    """

    def __init__(self) -> None:
        self._inside = 0  # the thread that is in a call, by its number; 0 when none is
        self._waiting: deque[Callable[[], object]] = deque()  # the calls that came meanwhile

    def _in_turn(self, call: Callable[[], object]) -> None:
        me = get_ident()
        if self._waiting or self._inside:
            self._postpone(call)
            return
        self._inside = me
        try:
            call()
        finally:
            self._inside = 0
            if self._waiting:
                self._catch_up()

    def _postpone(self, call: Callable[[], object]) -> None:
        self._waiting.append(call)
        # The call that was at work may have come to its end in between.
        self._catch_up()

    def _catch_up(self) -> None:
        while self._waiting:
            me = get_ident()
            if self._inside:
                return
            self._inside = me
            try:
                self._do_waiting()
            finally:
                self._inside = 0

    def _do_waiting(self) -> None:
        """Does what waits now. More may come as fast as it is done, which must not keep a stream from its end."""
        left = len(self._waiting)
        while left and self._waiting:
            left -= 1
            if self._refuses_waiting():
                self._waiting.clear()
                return
            before = self._progress()
            call = self._waiting[0]
            try:
                del self._waiting[0]
                call()
            # Its caller has left, and who is here has nothing to do with it.
            except Exception as error:  # noqa: BLE001
                self._note_failed(error)
            except BaseException:
                # Raised by a signal handler, which is not to cost a call of another thread.
                if self._progress() == before:
                    self._waiting.appendleft(call)
                raise

    @abstractmethod
    def _refuses_waiting(self) -> bool: ...

    @abstractmethod
    def _progress(self) -> object:
        """A value that changes with each call that has done something."""

    @abstractmethod
    def _note_failed(self, error: Exception) -> None: ...
