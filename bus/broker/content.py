"""The content of control messages, key by key: a value has the type that the protocol gives it, or is refused by
name."""

from collections.abc import Mapping
from typing import Any, TypeVar

from offloop.bus.errors import ProtocolError

Container = TypeVar("Container", list[Any], dict[str, Any])

MAX_TEXT = 255
MAX_INTEGER = (1 << 63) - 1

_NAMES = {type(None): "nil", bool: "a boolean", int: "an integer", float: "a float", str: "a text", bytes: "binary"}
_NAMES |= {list: "an array", dict: "a map"}


def text(content: Mapping[Any, Any], key: str, limit: int = MAX_TEXT) -> str:
    """A text of 1 to ``limit`` characters.

    Raises:
        ProtocolError: it is missing, or something else.
    """
    value = content.get(key)
    if type(value) is not str or not 1 <= len(value) <= limit:
        raise ProtocolError(_refusal(content, key, f"a text of 1 to {limit} characters"))
    return value


def text_or_none(content: Mapping[Any, Any], key: str, limit: int = MAX_TEXT) -> str | None:
    """As :func:`text`; ``None`` for nil and where the key is missing."""
    return None if content.get(key) is None else text(content, key, limit)


def integer(content: Mapping[Any, Any], key: str, low: int = 0, high: int = MAX_INTEGER) -> int:
    """An integer of ``low`` to ``high``.

    Raises:
        ProtocolError: it is missing, or something else.
    """
    value = content.get(key)
    if type(value) is not int or not low <= value <= high:
        raise ProtocolError(_refusal(content, key, f"an integer of {low} to {high}"))
    return value


def integer_or_none(content: Mapping[Any, Any], key: str, low: int = 0, high: int = MAX_INTEGER) -> int | None:
    """As :func:`integer`; ``None`` for nil and where the key is missing."""
    return None if content.get(key) is None else integer(content, key, low, high)


def boolean(content: Mapping[Any, Any], key: str) -> bool:
    """A boolean; false for nil and where the key is missing.

    Raises:
        ProtocolError: it is something else.
    """
    value = content.get(key)
    if value is not None and type(value) is not bool:
        raise ProtocolError(_refusal(content, key, "a boolean"))
    return bool(value)


def container(content: Mapping[Any, Any], key: str, kind: type[Container]) -> Container:
    """An array or a map, by ``kind``; an empty one for nil and where the key is missing.

    Raises:
        ProtocolError: it is something else.
    """
    value = content.get(key)
    if value is None:
        return kind()
    if type(value) is not kind:
        raise ProtocolError(_refusal(content, key, _NAMES[kind]))
    return value


def _refusal(content: Mapping[Any, Any], key: str, allowed: str) -> str:
    if key not in content:
        return f"{key!r} is missing: it has to be {allowed}"
    value = content[key]
    shown = f"{str(value)[:40]!r}, " if type(value) in (str, int, float, bool) else ""
    return f"{key!r} is {shown}{_NAMES.get(type(value), 'an extension')}: it has to be {allowed}"
