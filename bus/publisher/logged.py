"""Values that a loop logs, until an event carries them."""

import operator
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.frames import MAX_FRAME
from offloop.bus.types.deferred import Deferred, LeftOut, is_deferred

Entries: TypeAlias = list[list[Any]]  # the field ``logged``: pairs of a step and its values by name

_SMALLEST, _LARGEST = -(1 << 63), (1 << 64) - 1
_LARGEST_STEP = (1 << 53) - 1
_LONGEST_NAME = 1000
_MOST_BYTES = 4 * _LONGEST_NAME + 16
_MANY = 1000
_KNOWN_NAMES = 20_000
MAX_LOGGED = MAX_FRAME // 4
"""Most bytes of logged values in one call, and about half of the bytes that one event carries."""


class LoggedValues:
    """Values gathered by step."""

    def __init__(self, left_out: LeftOut) -> None:
        self.bound: int = 0  # upper bound of their size in bytes
        self.count: int = 0  # number of added values, including replaced ones
        self.step: int = 0  # the step of the last values
        self._names: set[str] = set()
        self._steps: dict[int, dict[str, Any]] = {}
        self.has_late: bool = False  # at least one value has not arrived yet
        self._left_out = left_out

    def step_for(self, values: Mapping[str, Any]) -> int:
        """Return the step for values logged without one: a repeated name starts the next step."""
        return self.step if self._names.isdisjoint(values) else self.step + 1

    def has_other_than(self, step: int) -> bool:
        return bool(self._steps) and step not in self._steps

    def add(self, values: Mapping[str, Any], step: int) -> None:
        """Add values checked by :func:`check_values`."""
        self.has_late = self.has_late or any(type(one) not in (int, float) for one in values.values())
        self._steps.setdefault(step, {}).update(values)
        self.count += len(values)
        self.bound += len(values) * _MOST_BYTES
        if step != self.step:
            self.step, self._names = step, set()
        self._names.update(values)

    def entries(self) -> "Entries | Deferred":
        entries = [[step, values] for step, values in self._steps.items()]
        return _LateEntries(entries, self._left_out) if self.has_late else entries

    def clear(self) -> None:
        """Start empty at the same step. Values returned by :meth:`entries` stay unchanged."""
        self.count, self.bound, self._steps, self.has_late = 0, 0, {}, False

    def is_full(self) -> bool:
        """They must be sent before more values are added."""
        self.bound = sum(map(_size, self._steps.values()))
        return self.bound > MAX_LOGGED


class _LateEntries:
    """Entries of which some values have not arrived yet."""

    def __init__(self, entries: Entries, left_out: LeftOut) -> None:
        self._entries = entries
        self._left_out = left_out

    def ready(self) -> bool:
        return all(one.ready() for _, values in self._entries for one in values.values() if is_deferred(one))

    def value(self) -> Entries:
        """Return the entries without values that are not numbers or cannot be read."""
        return [[step, dict(self._read(values))] for step, values in self._entries]

    def _read(self, values: dict[str, Any]) -> Iterator[tuple[str, float]]:
        for name, value in values.items():
            try:
                yield name, _number(name, value.value() if is_deferred(value) else value)
            except Exception as error:  # noqa: BLE001  a device that has failed raises whatever it likes
                self._left_out.add(name, error)


def check_values(values: Mapping[str, Any], known: set[str]) -> dict[str, "float | Deferred"]:
    """Return values as they are sent, or raise ConfigurationError. Names in ``known`` are not checked again."""
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
    """Upper bound of their size in an event, in bytes."""
    return sum(len(name.encode()) + 16 for name in values)


def checked_step(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number <= _LARGEST_STEP:
        raise ConfigurationError(f"step is {step!r}: use a whole number from 0 on, such as the number of the batch")
    return number


def check_name(name: Any, known: set[str]) -> str:
    """Return a valid name of a logged value and add it to ``known``, or raise ConfigurationError."""
    if not isinstance(name, str):
        raise ConfigurationError(f"{repr(name)[:100]} cannot name a logged value: use text, such as 'train/accuracy'")
    if len(name) > _LONGEST_NAME:
        raise ConfigurationError(f"name {name[:20]!r}... has {len(name):,} characters: use at most {_LONGEST_NAME:,}")
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ConfigurationError(f"{name[:100]!r} is not text that UTF-8 can represent: use another name") from None
    if len(known) < _KNOWN_NAMES:
        known.add(name)
    return name


def check_value(name: str, value: Any) -> "float | Deferred":
    kind = type(value)
    if kind is float or (kind is int and _SMALLEST <= value <= _LARGEST):
        return value  # type: ignore[no-any-return]  # its type is checked above
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
        return value  # type: ignore[no-any-return]  # its type is checked above
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text is not a number")
        return float(value.detach() if hasattr(value, "detach") else value)
    except Exception as error:  # noqa: BLE001  float() calls what the value brings
        raise ConfigurationError(
            f"{name[:100]!r} cannot be logged, a value of type {kind.__name__} ({error}): log a number or what float() "
            "takes, such as a tensor of one element; anything else can be a field of publish()"
        ) from None
