"""What a loop of one's own logs, until it travels with an event."""

import operator
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.frames import MAX_FRAME
from offloop.bus.types.deferred import Deferred, LeftOut, is_deferred

Entries: TypeAlias = list[list[Any]]
"""The field ``logged``: pairs of step and values by name."""

_SMALLEST, _LARGEST = -(1 << 63), (1 << 64) - 1
_LARGEST_STEP = (1 << 53) - 1
_LONGEST_NAME = 1000
_MOST_BYTES = 4 * _LONGEST_NAME + 16
_MANY = 1000
_KNOWN_NAMES = 10_000
MAX_LOGGED = MAX_FRAME // 4
"""Bytes of logged values in a call at most, and about half of what travels with an event."""


class LoggedValues:
    """Gathers values by step."""

    def __init__(self, left_out: LeftOut) -> None:
        self.bound = 0
        """Bytes that they take at most."""
        self.count = 0
        """Number of added values, replaced ones included."""
        self.step = 0
        """The step that was added last."""
        self._names: set[str] = set()
        self._steps: dict[int, dict[str, Any]] = {}
        self.has_late = False
        """One of the values has not arrived yet."""
        self._left_out = left_out

    def step_for(self, values: Mapping[str, Any]) -> int:
        """The step that values belong to which come without one: a name that comes again begins the next."""
        return self.step if self._names.isdisjoint(values) else self.step + 1

    def has_other_than(self, step: int) -> bool:
        """There are values of another step."""
        return bool(self._steps) and step not in self._steps

    def add(self, values: Mapping[str, Any], step: int) -> None:
        """Adds values that :func:`check_values` has returned."""
        self.has_late = self.has_late or any(type(one) not in (int, float) for one in values.values())
        self._steps.setdefault(step, {}).update(values)
        self.count += len(values)
        self.bound += len(values) * _MOST_BYTES
        if step != self.step:
            self.step, self._names = step, set()
        self._names.update(values)

    def entries(self) -> "Entries | Deferred":
        """All of it, as a field of an event."""
        entries = [[step, values] for step, values in self._steps.items()]
        return _LateEntries(entries, self._left_out) if self.has_late else entries

    def clear(self) -> None:
        """Begins anew, at the same step; what :meth:`entries` gave stays as it is."""
        self.count, self.bound, self._steps, self.has_late = 0, 0, {}, False

    def is_full(self) -> bool:
        """They have to be sent before more is added."""
        self.bound = sum(map(_size, self._steps.values()))
        return self.bound > MAX_LOGGED


class _LateEntries:
    """Entries with values that are on their way."""

    def __init__(self, entries: Entries, left_out: LeftOut) -> None:
        self._entries = entries
        self._left_out = left_out

    def ready(self) -> bool:
        """All values have arrived."""
        return all(one.ready() for _, values in self._entries for one in values.values() if is_deferred(one))

    def value(self) -> Entries:
        """The entries with their values, without those that are not numbers or cannot be read."""
        return [[step, dict(self._read(values))] for step, values in self._entries]

    def _read(self, values: dict[str, Any]) -> Iterator[tuple[str, float]]:
        for name, value in values.items():
            try:
                yield name, _number(name, value.value() if is_deferred(value) else value)
            except Exception as error:  # noqa: BLE001  a device that has failed raises whatever it likes
                self._left_out.add(name, error)


def check_values(values: Mapping[str, Any], known: set[str]) -> dict[str, "float | Deferred"]:
    """Values that can be logged, as they are sent. ``known`` are names that need not be looked at again. Raises
    ConfigurationError: one of them cannot be."""
    if type(values) is not dict and not isinstance(values, Mapping):
        raise ConfigurationError(f"values are of type {type(values).__name__}: log a map of names to numbers")
    checked = {
        name if name in known else check_name(name, known): check_value(name, value) for name, value in values.items()
    }
    if len(checked) > _MANY and (size := _size(checked)) > MAX_LOGGED:
        raise ConfigurationError(
            f"{len(checked):,} values at once cannot be logged, {size:,} bytes with their names: log at most "
            f"{MAX_LOGGED:,} bytes in a call"
        )
    return checked


def _size(values: Mapping[str, Any]) -> int:
    """The most bytes that values take in an event."""
    return sum(len(name.encode()) + 16 for name in values)


def checked_step(step: Any) -> int:
    """A step as a whole number. Raises ConfigurationError: it is none from 0 on."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number <= _LARGEST_STEP:
        raise ConfigurationError(f"step is {step!r}: use a whole number from 0 on, such as the number of the batch")
    return number


def check_name(name: Any, known: set[str]) -> str:
    """A name that values can be logged under, which is ``known`` from here on. Raises ConfigurationError: it is
    none."""
    if not isinstance(name, str):
        raise ConfigurationError(
            f"{repr(name)[:100]} cannot be the name of a logged value: use text, such as 'train/accuracy'"
        )
    if len(name) > _LONGEST_NAME:
        raise ConfigurationError(
            f"a name of {len(name):,} characters cannot be logged, {name[:20]!r}...: use at most {_LONGEST_NAME:,}"
        )
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ConfigurationError(f"{name[:100]!r} is not text that UTF-8 can represent: use another name") from None
    if len(known) < _KNOWN_NAMES:
        known.add(name)
    return name


def check_value(name: str, value: Any) -> "float | Deferred":
    """A value as it is sent. Raises ConfigurationError: it is not a number."""
    kind = type(value)
    if kind is float or (kind is int and _SMALLEST <= value <= _LARGEST):
        return value  # type: ignore[no-any-return]  # its type was looked at
    if is_deferred(value):
        return value
    if getattr(value, "is_cuda", False):
        raise ConfigurationError(
            f"{name[:100]!r} is on a GPU: make gpu = offloop.trainer.device.GpuDevice() once and log "
            "gpu.read_later(value), or float(value) if the loop may wait for it"
        )
    return _number(name, value)


def _number(name: str, value: Any) -> float:
    kind = type(value)
    if kind is float or (kind is int and _SMALLEST <= value <= _LARGEST):
        return value  # type: ignore[no-any-return]  # its type was looked at
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text is not a number")
        return float(value.detach() if hasattr(value, "detach") else value)
    except Exception as error:  # noqa: BLE001  float() calls what the value brings
        raise ConfigurationError(
            f"{name[:100]!r} cannot be logged, a value of type {kind.__name__} ({error}): log a number or what float() "
            "takes, such as a tensor of one element; anything else can be a field of publish()"
        ) from None
