"""Calls from several threads and signal handlers, executed one at a time without waiting."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from threading import get_ident


class SerialCalls(ABC):
    """Executes calls one at a time. A call that arrives meanwhile is queued, and the running call executes it last.

    Such calls come from other threads and from signal handlers, and return at once. Python switches threads and runs
    signal handlers only after calls and backward jumps. So nothing runs between a check of ``_waiting`` and ``_inside``
    and the assignment after it. Frequent calls inline :meth:`_in_turn`."""

    def __init__(self) -> None:
        super().__init__()
        self._inside = 0  # identifier of the thread that executes a call, or 0
        self._waiting: deque[Callable[[], object]] = deque()

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
        # The running call may have ended in between.
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
        """Execute the calls that wait now. Calls that arrive meanwhile must not delay the end of a stream."""
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
            # The caller has returned, and the executing thread is not responsible for it.
            except Exception as error:  # noqa: BLE001
                self._note_failed(error)
            except BaseException:
                # Raised by a signal handler: another thread's call must not get lost.
                if self._progress() == before:
                    self._waiting.appendleft(call)
                raise

    @abstractmethod
    def _refuses_waiting(self) -> bool: ...

    @abstractmethod
    def _progress(self) -> object:
        """Value that changes with each call that had an effect."""

    @abstractmethod
    def _note_failed(self, error: Exception) -> None: ...
