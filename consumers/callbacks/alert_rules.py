"""Rules about a run's values, as text: ``loss > 10 for 5ba``, ``nan``, ``failed``."""

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from offloop.bus.errors import ConfigurationError, OffloopError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.runs.alerts import FIRING, RESOLVED, AlertStatus
from offloop.bus.types.time import Time, TimeUnit
from offloop.bus.types.timestamp import Timestamp

DISK, DISK_FREE, STALLED = "disk/free_percent", "disk/free_gb", "stalled"
ENDS = ("finished", "failed", "lost")
_SHORT: dict[str, tuple[str | None, str, float]] = {
    "nan": (None, "not finite", 0.0),
    "disk": (DISK, "<", 5.0),
    **{word: (word, "", 0.0) for word in (*ENDS, STALLED)},
}
"""Words for rules: their name, test and limit."""

_RULE = re.compile(
    r"""\s*(?P<name>[^\s<>=!\[\]]+) (?:\s*\[(?P<key>[^\[\]]+)\])?
    (?:
        \s*(?P<is>is\b) (?:\s*(?P<kind>(?:nan|inf|finite|not[ ]finite)\b))?
      | \s*(?P<test><=|>=|==|!=|<|>) (?:\s*(?P<number>[-+]?(?:inf\b|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)))?
    )?
    (?:\s*(?P<for>for\b) (?:\s*(?P<duration>\S+))?)?""",
    re.VERBOSE,
)
"""Matches a rule as far as it is valid."""

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_IS: dict[str, Callable[[float], bool]] = {
    "nan": math.isnan,
    "inf": math.isinf,
    "finite": math.isfinite,
    "not finite": lambda value: not math.isfinite(value),
}


@dataclass(frozen=True)
class Rule:
    """A rule about a metric, a field, or a word such as ``failed``."""

    text: str
    name: str | None  # its metric or field, or a word; None for every number of the training
    key: str | None  # the entry of a field that is a map
    test: str  # <, >=, ... or nan, inf, finite; nothing for a word
    limit: float  # the number to compare with, where the test takes one
    duration: Time | None  # how long it has to hold

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """Parse ``METRIC OPERATOR NUMBER``, ``METRIC is KIND``, or a word, optionally with ``for DURATION``.

        Raises ConfigurationError with the number of the first wrong character, from 1."""
        if (found := _RULE.match(text)) is None:
            raise _invalid(text, 0, "the name of a metric, or nan")
        name, key, test, kind, number = found.group("name", "key", "test", "kind", "number")
        before = found.end("key") + 1 if key else found.end("name")
        rest, duration = text[found.end() :].strip(), None
        if found["is"] and not kind:
            raise _invalid(text, found.end("is"), "nan, inf, finite or not finite")
        if test and not number:
            raise _invalid(text, found.end("test"), "a number")
        short = None if test or kind or key else _SHORT.get(name)
        if not (test or kind or short) or (short and rest and not found["for"]):
            raise _invalid(text, before, "one of <, <=, >, >=, ==, != or 'is'")
        if found["for"]:
            duration = _parse_duration(text, found["duration"] or "", found.end("for"))
        if rest:
            raise _invalid(
                text, found.end(), "the end of the rule" if duration else "'for' and a duration, or the end of the rule"
            )
        if short and not short[1] and duration and not (name == STALLED and duration.unit is TimeUnit.SECOND):
            raise _invalid(text, found.end("for"), "a time such as 5min, which 'stalled' can have")
        if short:
            return cls(text, short[0], None, *short[1:], duration)
        return cls(text, name, key, test or kind, float(number or 0.0), duration)

    @property
    def field(self) -> str | None:
        """The field of the state to request for it, if it may be one."""
        return self.name if self.name is not None and self.name.isidentifier() and self.test else None

    @property
    def is_of_disk(self) -> bool:
        """True for a rule about the file system of the run's folder."""
        return self.name in (DISK, DISK_FREE)

    def holds(self, value: float) -> bool:
        """Return whether the rule holds for a value."""
        return _COMPARE[self.test](value, self.limit) if self.test in _COMPARE else _IS[self.test](value)

    def lasted(self, since_ns: int, since: Timestamp, state: Snapshot) -> bool:
        """Return whether it has held for its duration at this event."""
        if self.duration is None:
            return True
        unit = self.duration.unit
        if unit is TimeUnit.SECOND:
            return state.time_ns - since_ns >= self.duration.value * 1e9
        return bool(state.timestamp.get(unit) - since.get(unit) >= self.duration)


@dataclass
class RuleState:
    """State of a rule for one metric."""

    since: tuple[int, Timestamp] | None = None
    """Start of the time in which it has held without a break, in nanoseconds and in training time."""
    firing: bool = False

    def take_in(self, rule: Rule, value: float, began: Timestamp, state: Snapshot) -> AlertStatus | None:
        """Judge a value of an event, and the time at which that began; return a changed status."""
        if not rule.holds(value):
            self.since = None
            was_firing, self.firing = self.firing, False
            return RESOLVED if was_firing else None
        self.since = self.since or (state.time_ns, began)
        if self.firing or not rule.lasted(*self.since, state):
            return None
        self.firing = True
        return FIRING


def _parse_duration(text: str, duration: str, at: int) -> Time:
    try:
        read = Time.from_timestring(re.sub(r"(?<=\d)min\b", "m", duration))
    except OffloopError:
        read = None
    if read is None or read.unit is TimeUnit.DURATION or read.value < 0:
        raise _invalid(text, at, "a duration such as 5ba, 2ep or 10min")
    return read


def _invalid(text: str, at: int, expected: str) -> ConfigurationError:
    rest = text[at:].lstrip()
    return ConfigurationError(
        f"alert rule {text!r}: at character {len(text) - len(rest) + 1} there is {repr(rest) if rest else 'its end'} "
        f"instead of {expected}; examples of rules are 'loss > 10 for 5ba', 'nan' and 'failed'"
    )
