"""What a loop of one's own logs, until it travels with an event."""

import operator
from collections.abc import Mapping
from typing import Any, TypeAlias

from bus.errors import ConfigurationError
from bus.types.deferred import Deferred

Entries: TypeAlias = list[list[Any]]
"""The field ``logged``: pairs of step and values by name."""

_SMALLEST, _LARGEST = -(1 << 63), (1 << 64) - 1
_LARGEST_STEP = (1 << 53) - 1


class LoggedValues:
    """Gathers values by step."""

    def __init__(self) -> None:
        self.count = 0
        """How many values were added, also where one took the place of another."""
        self.step = 0
        """The step that was added last."""
        self._names: set[str] = set()
        self._steps: dict[int, dict[str, Any]] = {}
        self._has_late = False

    def step_for(self, values: Mapping[str, Any]) -> int:
        """The step that values belong to which come without one: a name that comes again begins the next."""
        return self.step if self._names.isdisjoint(values) else self.step + 1

    def has_other_than(self, step: int) -> bool:
        """Whether there are values of another step."""
        return bool(self._steps) and step not in self._steps

    def add(self, values: Mapping[str, Any], step: int) -> None:
        """Takes values in.

        Raises:
            ConfigurationError: one of them is not a number, or the step is none; nothing is taken then.
        """
        checked = {_name(name): _value(name, value) for name, value in values.items()}
        if not checked:
            return
        self._has_late = self._has_late or any(type(one) not in (int, float) for one in checked.values())
        self._steps.setdefault(step, {}).update(checked)
        self.count += len(checked)
        if step != self.step:
            self.step, self._names = step, set()
        self._names.update(checked)

    @property
    def has_late(self) -> bool:
        """Whether a value among them is on its way."""
        return self._has_late

    def entries(self) -> "Entries | Deferred":
        """All of it, as a field of an event."""
        entries = [[step, values] for step, values in self._steps.items()]
        return _LateEntries(entries) if self._has_late else entries

    def clear(self) -> None:
        """Begins anew, at the same step; what :meth:`entries` gave stays as it is."""
        self.count, self._steps, self._has_late = 0, {}, False


class _LateEntries:
    """Entries with values that are on their way."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries

    def ready(self) -> bool:
        """Whether all values are there."""
        return all(one.ready() for _, values in self._entries for one in values.values() if isinstance(one, Deferred))

    def value(self) -> Entries:
        """The entries with their values."""
        return [
            [step, {name: one.value() if isinstance(one, Deferred) else one for name, one in values.items()}]
            for step, values in self._entries
        ]


def checked_step(step: Any) -> int:
    """A step as a whole number.

    Raises:
        ConfigurationError: it is none from 0 on.
    """
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number <= _LARGEST_STEP:
        raise ConfigurationError(f"step is {step!r}: use a whole number from 0 on, such as the number of the batch")
    return number


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise ConfigurationError(f"{name!r} cannot be the name of a logged value: use text, such as 'train/accuracy'")
    return name


def _value(name: str, value: Any) -> "float | Deferred":
    kind = type(value)
    if kind is float or (kind is int and _SMALLEST <= value <= _LARGEST):
        return value  # type: ignore[no-any-return]  # its type was looked at
    if isinstance(value, Deferred):
        return value
    if getattr(value, "is_cuda", False):
        raise ConfigurationError(
            f"{name!r} is on a GPU: make gpu = trainer.device.GpuDevice() once and log gpu.read_later(value), or "
            "float(value) if the loop may wait for it"
        )
    try:
        if isinstance(value, str | bytes):
            raise TypeError("text is not a number")
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ConfigurationError(
            f"{name!r} cannot be logged, a value of type {kind.__name__} ({error}): log a number or what float() "
            "takes, such as a tensor of one element; anything else can be a field of publish()"
        ) from None
