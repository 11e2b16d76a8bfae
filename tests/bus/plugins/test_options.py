"""Options as they are written down: which a class has, and values of their types from text."""

import enum
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from offloop.bus.errors import ConfigurationError
from offloop.bus.plugins.options import PluginOption, convert_options, options_of
from offloop.bus.types.timestamp import Time, TimeInput


class Colour(enum.Enum):
    RED = "r"


class Typed:
    def __init__(
        self,
        flag: bool = False,
        count: int | None = None,
        share: float = 0.5,
        name: str = "x",
        path: Path | None = None,
        mode: Literal["a", "b"] = "a",
        sizes: list[int] = [],  # noqa: B006  as people write it
        names: Sequence[str] = ("x", "y"),
        colour: Colour = Colour.RED,
        either: int | str = 1,
        maybe: str | None = None,
        untyped=None,  # type: ignore[no-untyped-def]
        inferred=3,  # type: ignore[no-untyped-def]
        start: TimeInput | None = "0.5dur",
        **further: Any,
    ) -> None: ...


WRITTEN: dict[str, dict[str, Any]] = {
    "flag": {"true": True, "False": False},
    "count": {"none": None, "7": 7},
    "share": {"1e-3": 0.001},
    "name": {"1": "1"},
    "path": {"a/b": Path("a/b")},
    "mode": {"b": "b"},
    "sizes": {"1,2, 3": [1, 2, 3]},
    "names": {"a,b": ("a", "b"), "": ()},
    "colour": {"r": Colour.RED},
    "either": {"5": 5, "five": "five"},
    "maybe": {"none": None, "some": "some"},
    "untyped": {"2.5": 2.5, "some text": "some text"},
    "inferred": {"4": 4},
    "start": {"10ba": Time(10, "ba"), "none": None},
}


def test_texts_become_values_of_the_annotated_type() -> None:
    for name, text, value in ((name, *pair) for name, texts in WRITTEN.items() for pair in texts.items()):
        converted = convert_options("typed", options_of(Typed), {name: text})
        assert converted == {name: value}
        assert type(converted[name]) is type(value)
    for name, text in (("flag", "maybe"), ("count", "1.5"), ("share", "half"), ("mode", "c"), ("sizes", "1,x")):
        with pytest.raises(ConfigurationError, match=rf"typed\.{name} "):
            convert_options("typed", options_of(Typed), {name: text})


def test_options_show_their_default_as_it_would_be_written() -> None:
    shown = [str(option) for option in options_of(Typed)]
    assert {"flag=false", "count=none", "share=0.5", "sizes=", "names=x,y"} <= set(shown)
    assert not any(option.startswith("further") for option in shown)
    assert str(PluginOption("needed", int)) == "needed=..."


def test_kinds_of_options_are_described_in_words() -> None:
    kinds = {option.name: option.kind for option in options_of(Typed)}
    assert kinds["count"] == "a whole number or none"
    assert kinds["start"] == "a time such as 10ba or none"
    assert PluginOption("key", int | str | list[int] | tuple[Callable[..., int], int], 0).kind == (
        "a whole number or text or a list with commas"
    )
    assert PluginOption("function", Callable[..., int]).kind == "a Callable, only from Python"
