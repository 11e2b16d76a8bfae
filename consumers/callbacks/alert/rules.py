"""The rules of alerts: what is written, and whether it holds."""

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from bus.errors import ConfigurationError, OffloopError
from bus.types.time import Time, TimeUnit
from bus.types.timestamp import Timestamp

_NAME = re.compile(r"[^\s<>=!\[\]]+")
_KEY = re.compile(r"\[([^\[\]]+)\]")
_OPERATOR = re.compile(r"<=|>=|==|!=|<|>")
_KIND = re.compile(r"(?:nan|inf|finite|not finite)\b")
_WORD = re.compile(r"[a-z]+\b")
_NUMBER = re.compile(r"[-+]?(?:inf\b|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")
_REST = re.compile(r"\S+")
_SPACE = re.compile(r"\s*")

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
    """When a value was there: its event's time in nanoseconds, and training time before and after what it is of."""

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
    """Which entry of a field that is a map."""
    test: str
    """``<``, ``>=``, ... or ``nan``, ``inf``, ``finite``."""
    limit: float
    """What a value is compared with, where the test takes a number."""
    duration: Time | None
    """For how long it has to hold."""

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """Reads ``METRIC OPERATOR NUMBER``, ``METRIC is KIND`` or ``nan``, each with ``for DURATION`` behind it if need
        be.

        Raises :class:`bus.errors.ConfigurationError` that says at which character it goes wrong, from 1."""
        return _Parser(text).rule()

    @property
    def field(self) -> str | None:
        """The field of the state that it may be about, ``None`` if it can only be about something that is logged."""
        return self.name if self.name is not None and self.name.isidentifier() else None

    def holds(self, value: float) -> bool:
        """Whether it holds for a value."""
        return _COMPARE[self.test](value, self.limit) if self.test in _COMPARE else _IS[self.test](value)

    def lasted(self, since: Observation, now: Observation) -> bool:
        """Whether it has held for long enough."""
        if self.duration is None:
            return True
        if self.duration.unit is TimeUnit.SECOND:
            return now.time_ns - since.time_ns >= self.duration.value * 1e9
        unit = self.duration.unit
        passed: Time = now.ended.get(unit) - since.began.get(unit)
        return bool(passed >= self.duration)


@dataclass
class RuleState:
    """How a rule stands for a metric."""

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
        """As it is kept."""
        since = self.since
        kept = None if since is None else [since.time_ns, list(since.began.values), list(since.ended.values)]
        return {"since": kept, "firing": self.firing}

    @classmethod
    def from_state(cls, state: Mapping[str, object]) -> "RuleState":
        """Reads :meth:`to_state`."""
        kept = state["since"]
        since = None
        if isinstance(kept, list | tuple):
            since = Observation(kept[0], Timestamp.from_values(kept[1]), Timestamp.from_values(kept[2]))
        return cls(since, bool(state["firing"]))


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rule(self) -> Rule:
        name = self._expect(_NAME, "the name of a metric, or nan")
        key = self._take(_KEY)
        if name == "nan" and key is None and (self._at_end() or self._peek() == "for"):
            return Rule(self._text, None, None, "not finite", 0.0, self._duration())
        test, limit = self._condition()
        return Rule(self._text, name, None if key is None else key[1:-1], test, limit, self._duration())

    def _condition(self) -> tuple[str, float]:
        if self._take_word("is"):
            return self._expect(_KIND, "nan, inf, finite or not finite"), 0.0
        test = self._expect(_OPERATOR, "one of <, <=, >, >=, ==, != or 'is'")
        return test, float(self._expect(_NUMBER, "a number"))

    def _duration(self) -> Time | None:
        if self._at_end():
            return None
        if not self._take_word("for"):
            raise self._error("'for' and a duration, or the end of the rule")
        self._skip()
        began = self._at
        text = self._expect(_REST, "a duration such as 5ba, 2ep or 10min")
        try:
            duration = Time.from_timestring(re.sub(r"(?<=\d)min\b", "m", text))
        except OffloopError:
            duration = None
        if duration is None or duration.unit is TimeUnit.DURATION or duration.value < 0:
            self._at = began
            raise self._error("a duration such as 5ba, 2ep or 10min")
        if not self._at_end():
            raise self._error("the end of the rule")
        return duration

    def _expect(self, pattern: re.Pattern[str], what: str) -> str:
        if (found := self._take(pattern)) is None:
            raise self._error(what)
        return found

    def _take_word(self, word: str) -> bool:
        if self._peek() != word:
            return False
        self._take(_WORD)
        return True

    def _peek(self) -> str | None:
        self._skip()
        found = _WORD.match(self._text, self._at)
        return None if found is None else found[0]

    def _take(self, pattern: re.Pattern[str]) -> str | None:
        self._skip()
        found = pattern.match(self._text, self._at)
        if found is None:
            return None
        self._at = found.end()
        return found[0]

    def _at_end(self) -> bool:
        self._skip()
        return self._at == len(self._text)

    def _skip(self) -> None:
        space = _SPACE.match(self._text, self._at)
        self._at = space.end() if space else self._at

    def _error(self, expected: str) -> ConfigurationError:
        self._skip()
        found = repr(self._text[self._at :]) if self._at < len(self._text) else "its end"
        return ConfigurationError(
            f"alert rule {self._text!r}: at character {self._at + 1} there is {found} where {expected} belongs; "
            "a rule is such as 'loss/train/total > 10 for 5ba' or 'nan'"
        )
