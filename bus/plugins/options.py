"""Options of plug-ins: parameters of the constructor, with values read from text."""

import contextlib
import datetime
import enum
import inspect
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from offloop.bus.errors import ConfigurationError, close_matches
from offloop.bus.types.time import Time

REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class PluginOption:
    """A parameter of a constructor that the command line can set."""

    name: str
    type: Any  # the annotation, else the type of the default
    default: Any = REQUIRED

    @property
    def kind(self) -> str:
        return _kind(self.type)

    def __str__(self) -> str:
        if self.default is REQUIRED:
            return f"{self.name}=..."
        if isinstance(self.default, list | tuple):
            return f"{self.name}={','.join(map(str, self.default))}"
        return f"{self.name}={str(self.default).lower() if self.default in (None, True, False) else self.default}"


def options_of(made: type) -> list[PluginOption]:
    try:
        hints = get_type_hints(made.__init__)  # type: ignore[misc]
    except NameError:
        hints = {}  # An annotation names something that exists only for the type checker.
    parameters = list(inspect.signature(made.__init__).parameters.values())[1:]  # type: ignore[misc]
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return [PluginOption(one.name, hints.get(one.name, _type_of_default(one.default)), one.default) for one in named]


def parse_assignment(text: str) -> tuple[str, str, str]:
    """Split ``speed.window_size=50`` into owner, option and value. Raises ConfigurationError for another form."""
    left, equals, value = text.partition("=")
    owner, dot, option = left.strip().rpartition(".")
    if not (equals and dot and owner and option):
        raise ConfigurationError(f"{text!r} is not an option: write NAME.OPTION=VALUE", value=text)
    return owner, option, value.strip()


def convert_options(owner: str, options: Sequence[PluginOption], texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the constructor's arguments. Raises ConfigurationError for unknown, missing and invalid options."""
    known = {option.name: option for option in options}
    for name in texts:
        if name not in known:
            allowed = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise ConfigurationError(
                f"{owner} has no option {name!r}: {close_matches(name, known)}{allowed}", name=f"{owner}.{name}"
            )
    for option in options:
        if option.default is REQUIRED and option.name not in texts:
            raise ConfigurationError(
                f"{owner} needs '-o {owner}.{option.name}=...' ({option.kind})", name=f"{owner}.{option.name}"
            )
    converted = {}
    for name, text in texts.items():
        try:
            converted[name] = _convert(text, known[name].type)
        except ValueError:
            raise ConfigurationError(
                f"option {owner}.{name} takes {known[name].kind}, not {text!r}", name=f"{owner}.{name}", value=text
            ) from None
    return converted


def _convert(text: str, kind: Any) -> Any:
    """Convert a text. Raises ValueError if it is not a value of the type."""
    if kind in (Any, inspect.Parameter.empty):
        kind = int | float | bool | str
    if get_origin(kind) in (Union, types.UnionType):
        # Text last, because everything is a text.
        for one in sorted(get_args(kind), key=lambda one: one is str):
            with contextlib.suppress(ValueError):
                return _convert(text, one)
        raise ValueError
    if get_origin(kind) in (list, tuple, Sequence) or kind in (list, tuple):
        item = (*get_args(kind), str)[0]
        items = [_convert(part.strip(), item) for part in text.split(",") if part.strip()]
        return items if (get_origin(kind) or kind) is list else tuple(items)
    if kind is Time:
        return Time.from_input(text)
    if kind is Path:
        return Path(text)
    try:
        return msgspec.convert("null" if text.lower() == "none" and kind is type(None) else text, kind, strict=False)
    except TypeError:  # a type that msgspec does not know
        raise ValueError from None


def _type_of_default(default: Any) -> Any:
    return Any if default is None or default is REQUIRED else type(default)


_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    Time: "a time such as 10ba",
    type(None): "none",
}
# Alternatives to a Time that are written in the same way.
_TIMES = {datetime.timedelta, str, float, int}
_UNWRITABLE = ", only from Python"


def _kind(kind: Any) -> str:
    if get_origin(kind) in (Union, types.UnionType):
        kinds = get_args(kind)
        words = [_kind(one) for one in kinds if Time not in kinds or one not in _TIMES]
        return " or ".join(dict.fromkeys([one for one in words if not one.endswith(_UNWRITABLE)] or words))
    if get_origin(kind) is Literal:
        return " or ".join(str(value) for value in get_args(kind))
    if get_origin(kind) in (list, tuple, Sequence) or kind in (list, tuple):
        return "a list with commas"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " or ".join(str(member.value) for member in kind)
    return _WORDS.get(kind) or ("a value" if kind is Any else f"a {getattr(kind, '__name__', kind)}{_UNWRITABLE}")
