"""Time as a number with a unit."""

import datetime
import math
import operator
import re
from collections.abc import Callable
from enum import Enum
from numbers import Real
from typing import TypeAlias

from offloop.bus.errors import InvalidTimeError, TimeUnitError


class TimeUnit(str, Enum):  # noqa: UP042 - str() of a member is its name, as people know it
    """The unit of a :class:`Time`, by value or name in any case: ``TimeUnit("ep")``, ``TimeUnit("Epoch")``."""

    ITERATION = "iter"
    EPOCH = "ep"
    BATCH = "ba"
    SAMPLE = "sp"
    TOKEN = "tok"
    DURATION = "dur"
    """A share of the whole training: ``0.5dur`` is half of it. The only unit with fractions."""
    SECOND = "sec"

    @classmethod
    def _missing_(cls, value: object) -> "TimeUnit":
        text = str(value).lower()
        for unit in cls:
            if text in (unit.value, unit.name.lower()):
                return unit
        raise TimeUnitError(f"{value!r} is not a unit of time: use {_UNITS}, as in '10ep'", value=value)


_UNITS = ", ".join(unit.value for unit in TimeUnit)
_HOW_TO_WRITE = f"use a number and a unit, such as 2ep, 100ba, 90sec, 1h30m (units: {_UNITS})"
_LONGEST_TEXT = 64  # texts come from other processes too, and matching takes the square of their length
_LARGEST = 10**50
_CLOCK_TIME = re.compile(r"(?:([0-9]+)\s*h)?\s*(?:([0-9]+)\s*m)?\s*(?:([0-9]+)\s*s)?", re.IGNORECASE)
_INTEGER = re.compile(r"[+-]?[0-9]+")  # float() would round the long ones
_NUMBER_AND_UNIT = re.compile(rf"(.+?)\s*({'|'.join(unit.value for unit in TimeUnit)})", re.IGNORECASE)


class Time:
    """A whole number of a unit, or a share of the training: ``Time(10, "ep")``, ``Time(0.5, "dur")``. Immutable.

    Adds to, compares with and divides by times of the same unit, time strings (``"2ep"``) and plain numbers. Times of
    two units are never equal; ordering or adding them raises TimeUnitError. ``*`` takes a number or a share. ``/`` by a
    time gives a share; ``/`` by a number gives a time, rounded towards zero.

    Raises InvalidTimeError for a value that the unit cannot have. Reference: ``composer/core/time.py``."""

    __slots__ = ("_unit", "_value")

    def __init__(self, value: float, unit: TimeUnit | str) -> None:
        self._unit = TimeUnit(unit)
        self._value = _checked_value(value, self._unit)

    @property
    def value(self) -> float:
        """The number: an int, except for the unit ``dur``."""
        return self._value

    @property
    def unit(self) -> TimeUnit:
        """The unit of the number."""
        return self._unit

    @classmethod
    def from_input(cls, value: "TimeInput", unit: TimeUnit | str | None = None) -> "Time":
        """Read a time, a time string, a timedelta, or a number of ``unit``.

        Raises InvalidTimeError for a number without a unit and for anything else."""
        if isinstance(value, Time):
            return value
        if isinstance(value, str):
            return cls.from_timestring(value)
        if isinstance(value, datetime.timedelta):
            return cls.from_timedelta(value)
        if unit is None or not isinstance(value, _NUMBERS):
            raise InvalidTimeError(f"invalid duration {value!r}: {_HOW_TO_WRITE}", value=value)
        return cls(value, unit)

    @classmethod
    def from_timestring(cls, text: str) -> "Time":
        """Read a number and a unit (``10ep``, ``1e3ba``, ``0.25dur``, ``90sec``), or a clock time (``1h30m``).

        A clock time has hours, minutes and seconds, each at most once and in this order. Case and spaces around the
        parts do not matter. Raises InvalidTimeError for anything else, such as a number without a unit."""
        if len(text) > _LONGEST_TEXT:
            raise InvalidTimeError(
                f"invalid duration {text[:20]!r}... ({len(text)} characters): {_HOW_TO_WRITE}", value=text
            )
        stripped = text.strip()
        clock_time = _CLOCK_TIME.fullmatch(stripped)
        if clock_time and stripped:
            hours, minutes, seconds = (int(number or 0) for number in clock_time.groups())
            return cls(_within(hours * 3600 + minutes * 60 + seconds, text), TimeUnit.SECOND)
        parts = _NUMBER_AND_UNIT.fullmatch(stripped)
        if not parts:
            raise InvalidTimeError(f"invalid duration {text!r}: {_HOW_TO_WRITE}", value=text)
        unit = TimeUnit(parts[2])
        return cls(_within(_parse_number(parts[1], unit, text), text), unit)

    @classmethod
    def from_timedelta(cls, duration: datetime.timedelta | str) -> "Time":
        """Return a duration in whole seconds, rounded towards zero, from a timedelta or a string such as ``1h30m``."""
        if isinstance(duration, datetime.timedelta):
            return cls(int(duration.total_seconds()), TimeUnit.SECOND)
        time = cls.from_timestring(duration)
        if time.unit is not TimeUnit.SECOND:
            raise TimeUnitError(
                f"{duration!r} is not a duration: write hours, minutes, seconds such as '1h30m', or '90sec'",
                value=duration,
            )
        return time

    def to_timestring(self) -> str:
        """Return the string that :meth:`from_timestring` reads as an equal time."""
        return f"{self._value}{self._unit.value}"

    def __str__(self) -> str:
        return self.to_timestring()

    def __repr__(self) -> str:
        return f"Time({self._value!r}, {self._unit})"

    def __hash__(self) -> int:
        return hash((self._value, self._unit))

    def __int__(self) -> int:
        return int(self._value)

    def __float__(self) -> float:
        return float(self._value)

    def __eq__(self, other: object) -> bool:
        """Compare value and unit. A number is compared with the value alone.

        A string that is not a duration raises, so that a misspelt condition does not stay false unnoticed."""
        if isinstance(other, str):
            other = Time.from_timestring(other)
        if isinstance(other, Time):
            return self._unit is other._unit and self._value == other._value
        return self._value == other if isinstance(other, _NUMBERS) else NotImplemented

    def __lt__(self, other: "_Operand") -> bool:
        return self._compare(other, operator.lt)

    def __le__(self, other: "_Operand") -> bool:
        return self._compare(other, operator.le)

    def __gt__(self, other: "_Operand") -> bool:
        return self._compare(other, operator.gt)

    def __ge__(self, other: "_Operand") -> bool:
        return self._compare(other, operator.ge)

    def __add__(self, other: "_Operand") -> "Time":
        return self._combine(other, "add", operator.add)

    __radd__ = __add__

    def __sub__(self, other: "_Operand") -> "Time":
        return self._combine(other, "subtract", operator.sub)

    def __rsub__(self, other: "_Operand") -> "Time":
        return (-self).__add__(other)

    def __neg__(self) -> "Time":
        return Time(-self._value, self._unit)

    def __pos__(self) -> "Time":
        return self

    def __mul__(self, other: "_Operand") -> "Time":
        if isinstance(other, _NUMBERS):
            return self._rounded(self._value * other)
        if not isinstance(other, Time | str):
            return NotImplemented
        factor = Time.from_input(other)
        if factor._unit is TimeUnit.DURATION:
            return self._rounded(self._value * factor._value)
        if self._unit is TimeUnit.DURATION:
            return factor._rounded(self._value * factor._value)
        raise TimeUnitError(
            f"cannot multiply {self} by {factor}: one of them has to be a number or a share such as '0.5dur'",
            value=factor,
        )

    __rmul__ = __mul__

    def __truediv__(self, other: "_Operand") -> "Time":
        if isinstance(other, _NUMBERS):
            return self._rounded(self._value / other)
        return self._combine(other, "divide", operator.truediv, TimeUnit.DURATION)

    def __mod__(self, other: "_Operand") -> "Time":
        return self._combine(other, "divide", operator.mod)

    def _rounded(self, value: float) -> "Time":
        if self._unit is TimeUnit.DURATION:
            return Time(value, self._unit)
        if not math.isfinite(value):
            raise InvalidTimeError(
                f"invalid duration {value} in {self._unit.value}: it takes whole numbers, such as {self!r}", value=value
            )
        return Time(int(value), self._unit)

    def _compare(self, other: "_Operand", compare: Callable[[float, float], bool]) -> bool:
        number = self._number_of(other, "order")
        return NotImplemented if number is None else compare(self._value, number)

    def _combine(
        self, other: "_Operand", verb: str, combine: Callable[[float, float], float], unit: TimeUnit | None = None
    ) -> "Time":
        number = self._number_of(other, verb)
        return NotImplemented if number is None else Time(combine(self._value, number), unit or self._unit)

    def _number_of(self, other: "_Operand", verb: str) -> float | None:
        if not isinstance(other, _OPERANDS):
            return None
        time = Time.from_input(other, self._unit)
        if time._unit is not self._unit:
            raise TimeUnitError(
                f"cannot {verb} {self} and {time}: {self._unit.value} and {time._unit.value} are different units; "
                f"use one of {_UNITS} on both sides, such as '10{self._unit.value}'",
                value=time,
            )
        return time._value


TimeInput: TypeAlias = Time | datetime.timedelta | str | float
_Operand: TypeAlias = Time | str | float
_NUMBERS = (int, float, Real)  # Real takes in numpy's scalars, but asking for it is slow
_OPERANDS = (Time, str, *_NUMBERS)


def _checked_value(value: float, unit: TimeUnit) -> float:
    try:
        # Strings and bytes are refused although float() would read them: text has its own grammar.
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value) if unit is TimeUnit.DURATION else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        allowed = "a number" if unit is TimeUnit.DURATION else "a whole number"
        raise InvalidTimeError(
            f"{value!r} cannot be a time in {unit.value}: it takes {allowed}, as in Time(10, 'ep') or Time(0.5, 'dur') "
            f"(units: {_UNITS})",
            value=value,
        ) from None


def _within(value: float, text: str) -> float:
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise InvalidTimeError(f"invalid duration {text!r}: use a number up to {_LARGEST:.0e}", value=text)
    return value


def _parse_number(number: str, unit: TimeUnit, text: str) -> float:
    if _INTEGER.fullmatch(number):
        return int(number)
    try:
        value = float(number)
    except ValueError:
        raise InvalidTimeError(
            f"invalid duration {text!r}: {number!r} is not a number; {_HOW_TO_WRITE}", value=text
        ) from None
    if unit is TimeUnit.DURATION:
        return value
    if not value.is_integer():
        raise InvalidTimeError(
            f"invalid duration {text!r}: {unit.value} takes whole numbers; {_HOW_TO_WRITE}", value=text
        )
    return int(value)
