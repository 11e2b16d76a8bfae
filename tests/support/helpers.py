"""What several test files need and what is no fixture."""

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from paths import DATA

REFERENCE = DATA / "reference"
"""Recorded behaviour that the tests hold the project to."""

Value = TypeVar("Value")


def wait_for(condition: Callable[[], Value], name: str, timeout: float = 100.0) -> Value:
    """Asks for a condition until it holds and returns its value; ``name`` says what was waited for if it never does."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout:g} s in vain for {name}; last value: {value!r}")
        time.sleep(0.005)
    return value


def strict_json(text: str) -> Any:
    """The value of a text that is JSON as every program reads it: without NaN and infinities."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)
