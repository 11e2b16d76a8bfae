"""Checks of the trainer's arguments, before anything is started. Does not import torch."""

import math
import os
from collections.abc import Collection, Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from offloop.bus.errors import ConfigurationError, InvalidTimeError
from offloop.bus.types.event import ANY_CUSTOM, ANY_TABLE, Event
from offloop.bus.types.metrics import check_goals
from offloop.bus.types.time import Time, TimeInput, TimeUnit

MAX_BATCHES = 1_000_000  # limit of a flight recorder, whose memory is bounded besides
PRECISIONS = ("fp32", "amp_bf16", "amp_fp16")


def as_list(given: Any, kind: type[Any], argument: str) -> list[Any]:
    if given is None:
        return []
    items: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    for item in items:
        if not isinstance(item, kind):
            raise ConfigurationError(f"{argument} has {kind_of(item)}: give one {kind.__name__} or a list of them")
    return items


NUMBERS = (int, float, Real)  # the types of a number. Real includes numpy's scalars, but testing for it is slow


def check_number(
    number: Any, argument: str, *, least: float = 0.0, above: float | None = None, most: float = math.inf
) -> float:
    is_number = isinstance(number, NUMBERS) and not isinstance(number, bool)
    if is_number and (number >= least if above is None else number > above) and number <= most and number < math.inf:
        return float(number)
    lowest = f"from {least:g}" if above is None else f"above {above:g}"
    highest = f" to {most:g}" if most < math.inf else ""
    raise ConfigurationError(f"{argument} {number!r} is not allowed: use a finite number {lowest}{highest}")


def check_count(number: Any, argument: str, least: int = 1) -> int:
    if isinstance(number, int) and not isinstance(number, bool) and number >= least:
        return number
    raise ConfigurationError(f"{argument} {number!r} is not allowed: use a whole number from {least}")


def check_choice(text: str, argument: str, choices: Collection[str]) -> str:
    if text in choices:
        return text
    raise ConfigurationError(f"{argument} {text!r} is not allowed: use {', '.join(choices)}")


def check_flight_recorder(given: TimeInput, argument: str = "flight_recorder") -> int:
    try:
        time = None if isinstance(given, bool) else Time.from_input(given, TimeUnit.BATCH)
    except InvalidTimeError:
        time = None
    if time is None or time.unit is not TimeUnit.BATCH or not 1 <= time.value <= MAX_BATCHES:
        raise ConfigurationError(
            f"{argument} {given!r} is not allowed: use a number of batches from 1 to {MAX_BATCHES:,}, such as 200ba"
        )
    return int(time.value)


def check_record(record: str | Iterable[Event | str], argument: str) -> set[Event]:
    if isinstance(record, str):
        if record.lower() == "all":
            return {*Event, ANY_CUSTOM, ANY_TABLE}
        return {Event(name.strip()) for name in record.split(",")}
    if isinstance(record, Mapping) or not isinstance(record, Iterable):
        raise ConfigurationError(f"{argument} {record!r} is not allowed: use 'all' or a list of events")
    return {Event(event) for event in record}


def check_config(config: Any, argument: str) -> None:
    if not isinstance(config, Mapping):
        raise ConfigurationError(f"{argument} is {config!r}: give a dict of names and values")
    check_goals(config, argument)


def check_path(path: Any, argument: str) -> Path:
    if not isinstance(path, str | os.PathLike) or not isinstance(text := os.fspath(path), str) or not text:
        raise ConfigurationError(f"{argument} is {path!r}: give a path, as a text or a pathlib.Path")
    return Path(text)


def check_text(text: Any, argument: str) -> None:
    if not isinstance(text, str):
        raise ConfigurationError(f"{argument} is {text!r}: give a text")


def check_flag(flag: Any, argument: str) -> None:
    if not isinstance(flag, bool):
        raise ConfigurationError(f"{argument} is {flag!r}: use True or False")


def check_function(function: Any, argument: str, call: str) -> None:
    """Refuse an object that cannot be called; ``call`` shows the call, for the message."""
    if not callable(function):
        raise ConfigurationError(f"{argument} is {function!r}: give a function that is called with {call}")


def check_subset(batches: Any, argument: str) -> int:
    if isinstance(batches, int) and not isinstance(batches, bool) and (batches == -1 or batches > 0):
        return batches
    raise ConfigurationError(f"{argument} is {batches!r}: use a number of batches from 1, or -1 for all of them")


def kind_of(item: Any) -> str:
    kind = type(item).__name__
    article = "an" if kind[0] in "aeiouAEIOU" else "a"
    return f"the class {item.__name__}" if isinstance(item, type) else f"{article} {kind}"
