"""A value that is on its way from a device."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable

_PLAIN = frozenset({float, int, bool, str, bytes, list, dict, type(None)})


@runtime_checkable
class Deferred(Protocol):
    """A value that is on its way."""

    def ready(self) -> bool:
        """Returns at once whether :meth:`value` can be had without waiting."""

    def value(self) -> Any:
        """The value; may wait, and is asked only once ready, or when the stream is drained."""


def is_deferred(value: Any) -> TypeGuard[Deferred]:
    """The value is on its way."""
    # Asking whether something is a Deferred is slow, and most values obviously are not.
    return type(value) not in _PLAIN and isinstance(value, Deferred)


def deferred_values(fields: Mapping[str, Any]) -> dict[str, Deferred]:
    """Those of the values that are on their way."""
    return {name: value for name, value in fields.items() if is_deferred(value)}
