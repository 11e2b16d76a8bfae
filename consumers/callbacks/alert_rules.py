"""The rules of alerts: what is written, and whether it holds."""

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from offloop.bus.errors import ConfigurationError, OffloopError
from offloop.bus.types.time import Time, TimeUnit
from offloop.bus.types.timestamp import Timestamp

_RULE = re.compile(
    r"""\s*(?P<name>[^\s<>=!\[\]]+) (?:\s*\[(?P<key>[^\[\]]+)\])?
    (?:
        \s*(?P<is>is\b) (?:\s*(?P<kind>(?:nan|inf|finite|not[ ]finite)\b))?
      | \s*(?P<test><=|>=|==|!=|<|>) (?:\s*(?P<number>[-+]?(?:inf\b|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)))?
    )?
    (?:\s*(?P<for>for\b) (?:\s*(?P<duration>\S+))?)?""",
    re.VERBOSE,
)
"""Matches as far as a rule is one."""

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


class Observation(NamedTuple):
    """The time of a value: its event's in nanoseconds, and training time before and after what it is of."""

    time_ns: int
    began: Timestamp
    ended: Timestamp


@dataclass(frozen=True)
class Rule:
    """One rule, as :meth:`parse` reads it."""

    text: str
    name: str | None
    """The metric or field that it is about; ``None`` for every number of the training."""
    key: str | None
    """The entry of a field that is a map."""
    test: str
    """``<``, ``>=``, ... or ``nan``, ``inf``, ``finite``."""
    limit: float
    """The number to compare with, where the test takes one."""
    duration: Time | None
    """For how long it has to hold."""

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """Reads ``METRIC OPERATOR NUMBER``, ``METRIC is KIND`` or ``nan``, each with ``for DURATION`` behind it if need
        be.

        Raises :class:`offloop.bus.errors.ConfigurationError` that says at which character it goes wrong, from 1."""
        if (found := _RULE.match(text)) is None:
            raise _unreadable(text, 0, "the name of a metric, or nan")
        name, key, test, kind, number = found.group("name", "key", "test", "kind", "number")
        before = found.end("key") + 1 if key else found.end("name")
        rest, duration = text[found.end() :].strip(), None
        if found["is"] and not kind:
            raise _unreadable(text, found.end("is"), "nan, inf, finite or not finite")
        if test and not number:
            raise _unreadable(text, found.end("test"), "a number")
        if not (test or kind) and (name != "nan" or key or (rest and not found["for"])):
            raise _unreadable(text, before, "one of <, <=, >, >=, ==, != or 'is'")
        if found["for"]:
            duration = _duration(text, found["duration"] or "", found.end("for"))
        if rest:
            raise _unreadable(
                text, found.end(), "the end of the rule" if duration else "'for' and a duration, or the end of the rule"
            )
        if not (test or kind):
            return cls(text, None, None, "not finite", 0.0, duration)
        return cls(text, name, key, test or kind, float(number or 0.0), duration)

    @property
    def field(self) -> str | None:
        """The field of the state that it may be about, ``None`` if it can only be about something that is logged."""
        return self.name if self.name is not None and self.name.isidentifier() else None

    def holds(self, value: float) -> bool:
        return _COMPARE[self.test](value, self.limit) if self.test in _COMPARE else _IS[self.test](value)

    def lasted(self, since: Observation, now: Observation) -> bool:
        if self.duration is None:
            return True
        if self.duration.unit is TimeUnit.SECOND:
            return now.time_ns - since.time_ns >= self.duration.value * 1e9
        unit = self.duration.unit
        passed: Time = now.ended.get(unit) - since.began.get(unit)
        return bool(passed >= self.duration)


@dataclass
class RuleState:
    """State of a rule for one metric."""

    since: Observation | None = None
    """The first of the values for which it has held without a break; ``None`` when it does not hold."""
    firing: bool = False

    def take_in(self, rule: Rule, value: float, now: Observation) -> str | None:
        """Judges a value; ``firing`` or ``resolved`` when that changes something."""
        if not rule.holds(value):
            self.since = None
            was_firing, self.firing = self.firing, False
            return "resolved" if was_firing else None
        self.since = self.since or now
        if self.firing or not rule.lasted(self.since, now):
            return None
        self.firing = True
        return "firing"

    def to_state(self) -> dict[str, object]:
        since = self.since
        kept = None if since is None else [since.time_ns, list(since.began.values), list(since.ended.values)]
        return {"since": kept, "firing": self.firing}

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> "RuleState":
        kept = state["since"]
        since = None
        if isinstance(kept, list | tuple):
            since = Observation(kept[0], Timestamp.from_values(kept[1]), Timestamp.from_values(kept[2]))
        return cls(since, bool(state["firing"]))


def _duration(text: str, duration: str, at: int) -> Time:
    try:
        read = Time.from_timestring(re.sub(r"(?<=\d)min\b", "m", duration))
    except OffloopError:
        read = None
    if read is None or read.unit is TimeUnit.DURATION or read.value < 0:
        raise _unreadable(text, at, "a duration such as 5ba, 2ep or 10min")
    return read


def _unreadable(text: str, at: int, expected: str) -> ConfigurationError:
    rest = text[at:].lstrip()
    return ConfigurationError(
        f"alert rule {text!r}: at character {len(text) - len(rest) + 1} there is {repr(rest) if rest else 'its end'} "
        f"where {expected} belongs; a rule is such as 'loss > 10 for 5ba' or 'nan'"
    )
