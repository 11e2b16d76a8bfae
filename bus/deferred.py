"""Events that wait for a value which is on its way, such as a loss that is being copied from a GPU."""

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

__all__ = ["Deferred", "HeldEvents"]


@runtime_checkable
class Deferred(Protocol):
    """A value that is on its way."""

    def ready(self) -> bool:
        """Whether :meth:`value` can be had without waiting. Must not wait itself."""

    def value(self) -> Any:
        """The value; may wait, and is asked only once ready, or when the stream is drained."""


class HeldEvents:
    """A queue of events in order, each released once the values in its fields are there and all before it are
    released."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Callable[[dict[str, Any]], bytes], dict[str, Any]]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def hold(self, encode: Callable[[dict[str, Any]], bytes], fields: dict[str, Any]) -> None:
        """Puts an event at the end; ``encode`` makes its frame from its fields once they are all there."""
        self._queue.append((encode, fields))

    def release(self, *, wait: bool) -> list[bytes]:
        """The frames of the events at the front whose values are there; with ``wait`` of all of them, waiting for
        their values."""
        frames: list[bytes] = []
        while self._queue:
            encode, fields = self._queue[0]
            late = {name: value for name, value in fields.items() if isinstance(value, Deferred)}
            if not wait and not all(value.ready() for value in late.values()):
                break
            frames.append(encode({**fields, **{name: value.value() for name, value in late.items()}}))
            self._queue.popleft()
        return frames
