"""Answers for agents: JSON of bounded size, with escaped texts."""

from collections.abc import Callable, Sequence
from typing import Any

from offloop.bus.printing import escape
from offloop.bus.strict_json import json_text

MAX_ANSWER = 40_000  # characters of an answer
_LONGEST = 2_000  # characters of a text, and entries of a list or map


def answer(value: Any, longest: int = _LONGEST) -> str:
    """Return a value as JSON of at most :data:`MAX_ANSWER` characters, with shortened texts, lists and maps."""
    while len(text := json_text(_cut(value, longest))) > MAX_ANSWER:
        longest //= 2
    return text


def most_that_fits(of_size: Callable[[int], Any], size: int) -> Any:
    """Return ``of_size`` of the first of ``size``, ``size // 2``, ... 1 that an answer contains whole."""
    while len(json_text(_cut(value := of_size(size), _LONGEST))) > MAX_ANSWER and size > 1:
        size //= 2
    return value


def page(items: Sequence[Any], first: int, count: int, describe: Callable[[Any], Any]) -> dict[str, Any]:
    """Describe some of the items, as many as an answer has room for, and return the place of the next one."""
    shown: list[Any] = []
    room = MAX_ANSWER - 2 * _LONGEST  # the rest is for other parts of the answer
    for described in map(describe, items[first : first + count]):
        room -= len(json_text(_cut(described, _LONGEST))) + 1
        if room < 0 and shown:
            break
        shown.append(described)
    following = first + len(shown)
    return {"total": len(items), "items": shown} | ({"next": following} if following < len(items) else {})


def _cut(value: Any, longest: int) -> Any:
    if not isinstance(value, str | dict | list | tuple):
        return value
    more = f"... and {len(value) - longest:,} more" if len(value) > longest else ""
    if isinstance(value, str):
        return "\n".join(map(escape, value[:longest].split("\n"))) + more
    if isinstance(value, dict):
        # Names that begin alike stay different.
        kept = {_cut(str(name), _LONGEST): _cut(one, longest) for name, one in list(value.items())[:longest]}
        return {**kept, more: None} if more else kept
    return [*(_cut(one, longest) for one in value[:longest]), *filter(None, [more])]
