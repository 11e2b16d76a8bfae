"""A value that is on its way from a device."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Deferred(Protocol):
    """A value that is on its way."""

    def ready(self) -> bool:
        """Whether :meth:`value` can be had without waiting. Must not wait itself."""

    def value(self) -> Any:
        """The value; may wait, and is asked only once ready, or when the stream is drained."""
