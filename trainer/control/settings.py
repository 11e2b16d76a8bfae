"""Values that can be set from outside during a training."""

from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from offloop.bus.errors import ConfigurationError, close_matches
from offloop.trainer.arguments.checks import check_function, check_number
from offloop.trainer.arguments.values import set_rate
from offloop.trainer.engine.state import State

SettingFunction: TypeAlias = Callable[[State, Any], object]
"""Applies a value between two batches. If it raises for an invalid value, the sender receives the error."""


class Settings(UserDict[str, SettingFunction]):
    """The values that ``offloop send RUN set NAME VALUE`` and ``state.send_command("set", NAME, VALUE)`` can set.

    These are ``lr``, ``log_interval``, ``eval``, and registered ones."""

    def register(self, name: str, function: SettingFunction) -> None:
        """Add a value; ``function(state, value)`` applies it.

        It runs in the training loop, between two batches, on every rank.

        Raises :class:`offloop.bus.errors.ConfigurationError` for a name that is taken or not an identifier."""
        if name in self:
            raise ConfigurationError(f"there is a setting {name!r} already: choose another name")
        self[name] = _checked(name, function)

    def apply(self, state: State, name: Any, value: Any) -> None:
        """Apply a value.

        Raises :class:`offloop.bus.errors.ConfigurationError` for an unknown name and an invalid value."""
        if name not in self:
            raise ConfigurationError(
                f"unknown setting {name!r}: {close_matches(str(name), list(self))}use {', '.join(self)}"
            )
        self[name](state, value)


def make_settings(progress: Any, own: Mapping[str, SettingFunction]) -> Settings:
    # Without a reference to the trainer: a dropped one is freed at once.
    settings = Settings(
        {
            "lr": set_learning_rate,
            "log_interval": lambda _, value: progress.set_interval(check_number(value, "log_interval", above=0)),
            "eval": evaluate,
        }
    )
    for name, function in own.items():
        settings.register(name, function)
    return settings


def check_settings(given: Any) -> dict[str, SettingFunction]:
    if not isinstance(given, Mapping | None):
        raise ConfigurationError(
            f"settings is a {type(given).__name__}: give a dict of names to functions of the state and the value"
        )
    return {name: _checked(name, function) for name, function in (given or {}).items()}


def _checked(name: Any, function: Any) -> SettingFunction:
    if not isinstance(name, str) or not name.isidentifier() or len(name) > 100:
        raise ConfigurationError(f"invalid name of a setting {name!r}: use an identifier, such as 'temperature'")
    check_function(function, f"the setting {name!r}", "(state, value)")
    return function  # type: ignore[no-any-return]


def set_learning_rate(state: State, value: Any) -> None:
    """Set the rate of every parameter group, from which its schedule continues."""
    rate = check_number(value, "lr")
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            now = float(group["lr"])
            base = float(group.get("initial_lr", now))
            group["initial_lr"] = base * rate / now if now else rate
            set_rate(group, rate)
    for scheduler in state.schedulers:
        if hasattr(scheduler, "base_lrs"):
            # Torch's own schedulers multiply these.
            scheduler.base_lrs = [float(group["initial_lr"]) for group in scheduler.optimizer.param_groups]


def evaluate(state: State, value: Any) -> None:
    if value != "now":
        raise ConfigurationError(f"eval {value!r} is not allowed: use 'now'")
    state.evaluate_now()
