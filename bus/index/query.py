"""Questions to an index: columns by name, filters such as ``lr > 0.01 and status == finished``, order, the best run."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from offloop.bus.errors import ConfigurationError
from offloop.bus.index.entry import MetricValues, Mode, RunEntry
from offloop.bus.types.metric_names import MetricNames
from offloop.bus.types.metrics import GOALS, direction_of, goals_in

ValueOf: TypeAlias = Callable[[RunEntry], Any]
"""Gives a run's value; ``None`` where it has none."""

OF_RUN = (
    *("run", "id", "status", "error", "reason", "started", "ended", "duration", "attempts", "epoch", "batch", "sample"),
    *("planned", "size", "tags", "note", "pinned", "archived", "checkpoints", "folder"),
)
"""What every run has, beside hyperparameters and metrics."""

_OF_METRIC: dict[str, Callable[[MetricValues], float]] = {
    "last": lambda values: values.last,
    "min": lambda values: values.low,
    "max": lambda values: values.high,
}
OF_METRIC = (*_OF_METRIC, "best")
"""What may follow the name of a metric, behind a dot; without it ``last`` is meant."""

_DEEPEST = 50
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?(?![\w./:-]))
    |(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<quoted>`[^`]+`)
    |(?P<sign>==|!=|<=|>=|<|>|=|~|\(|\))
    |(?P<word>[^\s()=!<>~"'`]+)
    )""",
    re.VERBOSE | re.IGNORECASE,
)
_SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    "==": lambda one, other: bool(one == other),
    "!=": lambda one, other: bool(one != other),
    "<": lambda one, other: bool(one < other),
    "<=": lambda one, other: bool(one <= other),
    ">": lambda one, other: bool(one > other),
    ">=": lambda one, other: bool(one >= other),
}


class Columns:
    """What the names in questions stand for, by what some runs have.

    A name is one of :data:`OF_RUN`, a hyperparameter (``optimizer/lr``) or a metric (``loss``, see
    :class:`offloop.bus.types.metric_names.MetricNames`). Of a metric, the last value is meant, or with a dot and one of
    :data:`OF_METRIC` behind it another one (``loss.min``). The end of a hyperparameter's name is enough (``lr``) where
    it leads to one of them; of several, what the training was started with (``config/lr``) comes before the rest of the
    hyperparameters, and these before metrics. A run that lacks the first of these gives the next, so ``lr`` is known of
    runs of different kinds.
    """

    def __init__(self, entries: Iterable[RunEntry]) -> None:
        hyperparameters: dict[str, None] = {}
        metrics: dict[str, None] = {}
        entries = list(entries)
        for entry in entries:
            hyperparameters.update(dict.fromkeys(entry.hyperparameters))
            metrics.update(dict.fromkeys(entry.metrics))
        self.hyperparameters = tuple(hyperparameters)
        """The names of all of them."""
        self.metrics = tuple(metrics)
        """The full names of all of them."""
        self.metric_names = MetricNames(metrics)
        """The same, by all their names."""
        self.goals = goals_in(entry.hyperparameters for entry in entries)
        """What the runs say of metrics, see :func:`offloop.bus.types.metrics.goals_in`."""
        self._found: dict[str, tuple[str, ValueOf]] = {}

    def find(self, name: str) -> tuple[str, ValueOf]:
        """The whole name of a column, and what gives its values.

        Raises:
            ConfigurationError: there is none of that name, or there are several.
        """
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def _find(self, name: str) -> tuple[str, ValueOf]:
        name = "run" if name == "name" else name
        if name in OF_RUN:
            return name, lambda entry: getattr(entry, name)
        metric, dot, which = name.rpartition(".")
        if not dot or which not in OF_METRIC:
            metric, which = name, "last"
        for hyperparameters, metrics in (
            ({name} & {*self.hyperparameters}, {metric} & {*self.metrics}),
            ({f"config/{name}"} & {*self.hyperparameters}, ()),
            (_ending(self.hyperparameters, name), ()),
            ((), self.metric_names.matches(metric)),
        ):
            found = sorted({*hyperparameters, *metrics})
            if len(found) > 1:
                raise ConfigurationError(self.metric_names.ambiguous(name, found), name=name)
            if hyperparameters:
                rest = _ending(self.hyperparameters, name) - {found[0], f"config/{name}"}
                return found[0], _hyperparameter(found[0], f"config/{name}", *(rest if len(rest) == 1 else ()))
            if metrics:
                suffix = "" if which == "last" else f".{which}"
                return f"{found[0]}{suffix}", _metric(found[0], self._best_of(found[0]) if which == "best" else which)
        raise ConfigurationError(
            f"no run has {name!r}: use one of {', '.join(OF_RUN)}, a hyperparameter{_such_as(self.hyperparameters)}, "
            f"or a metric{_such_as([*map(self.metric_names.short, self.metrics)])}"
        )

    def direction(self, metric: str) -> Mode | None:
        """Which values of a metric are better, as these runs say or by its name."""
        return direction_of(metric, self.goals)

    def _best_of(self, metric: str) -> Mode:
        mode = self.direction(metric)
        metric = self.metric_names.short(metric)
        if mode is None:
            raise ConfigurationError(
                f"{metric!r} has no best value: its name does not say which values are better; use {metric}.min or "
                f"{metric}.max, or start runs with config={{{GOALS!r}: {{{metric!r}: 'max'}}}}"
            )
        return mode

    def find_metric(self, name: str) -> str:
        """The full name of a metric.

        Raises:
            ConfigurationError: there is none of that name, or there are several.
        """
        return self.metric_names.find(name, "no run has the metric")


def where(entries: Sequence[RunEntry], expression: str, columns: Columns | None = None) -> list[RunEntry]:
    """The runs of which an expression is true.

    Comparisons are written as in Python: ``==``, ``!=``, ``<``, ``<=``, ``>``, ``>=``, beside ``~`` for a text that
    contains another; combined by ``and``, ``or``, ``not`` and parentheses. On the left stands a name, see
    :class:`Columns`, on the right a number or a text, which needs quotation marks only if it has blanks or signs in it;
    a name with such is set in backticks. A name alone is true of runs that have a value other than zero, false and
    empty there. ``tags == baseline`` is true of runs that have the tag. A comparison is false of a run that has no such
    value, or one of another kind.

    Raises:
        ConfigurationError: it is not such an expression, or names what no run has.
    """
    test = _Parser(expression, columns or Columns(entries)).parse()
    return [entry for entry in entries if test(entry)]


def sort(
    entries: Sequence[RunEntry], name: str, *, reverse: bool = False, columns: Columns | None = None
) -> list[RunEntry]:
    """The runs in the order of a column, see :class:`Columns`: numbers before texts, and those without a value last.

    Raises:
        ConfigurationError: no run has that column.
    """
    _, value_of = (columns or Columns(entries)).find(name)
    values = [_single(value_of(entry)) for entry in entries]
    known = [(value, entry) for value, entry in zip(values, entries, strict=True) if value is not None]
    if all(isinstance(value, str) for value, _ in known):
        known = [(value.lower(), entry) for value, entry in known]
    elif not all(isinstance(value, int | float) for value, _ in known):
        known = [(_order(value), entry) for value, entry in known]
    known.sort(key=itemgetter(0), reverse=reverse)
    unknown = [entry for value, entry in zip(values, entries, strict=True) if value is None]
    return [*(entry for _, entry in known), *unknown]


def best(
    entries: Sequence[RunEntry], metric: str, mode: Mode | None = None, columns: Columns | None = None
) -> RunEntry | None:
    """The run with the best value of a metric at any step; ``None`` when no run has one. Without a ``mode``, the runs
    or the metric's name say what is better, see :func:`offloop.bus.types.metrics.direction_of`.

    Raises:
        ConfigurationError: no run has that metric, ``mode`` is not ``min`` or ``max``, or there is none and nothing
            says which values are better.
    """
    if mode not in (None, "min", "max"):
        raise ConfigurationError(f"mode {mode!r} is not known: use min or max")
    columns = columns or Columns(entries)
    name = columns.find_metric(metric)
    better = mode or columns.direction(name)
    if better is None:
        name = columns.metric_names.short(name)
        raise ConfigurationError(
            f"{name!r} has no best value: its name does not say which values are better; give mode='min' or "
            f"mode='max', or start runs with config={{{GOALS!r}: {{{name!r}: 'max'}}}}"
        )
    ranked = [entry for entry in entries if name in entry.metrics and entry.metrics[name].best_step(better) >= 0]
    choose = min if better == "min" else max
    return choose(ranked, key=lambda entry: entry.metrics[name].best(better), default=None)


class Difference(NamedTuple):
    """A hyperparameter that is not the same in all of some runs."""

    name: str
    values: list[Any]
    """Of each run; ``None`` where it has none."""


def differences(entries: Sequence[RunEntry]) -> list[Difference]:
    """The hyperparameters in which runs differ, by name."""
    names = sorted({name for entry in entries for name in entry.hyperparameters})
    found = [Difference(name, [entry.hyperparameters.get(name) for entry in entries]) for name in names]
    return [one for one in found if any(value != one.values[0] for value in one.values)]


class _Parser:
    """Recursive descent over the tokens of an expression."""

    def __init__(self, text: str, columns: Columns) -> None:
        self._text, self._columns = text, columns
        self._tokens = list(self._split(text))
        self._at = self._depth = 0

    def parse(self) -> Callable[[RunEntry], bool]:
        if not self._tokens:
            raise self._error("it is empty")
        test = self._either()
        if self._at < len(self._tokens):
            raise self._error(f"{self._tokens[self._at][1]!r} is not expected there")
        return test

    def _split(self, text: str) -> Iterator[tuple[str, str]]:
        at, end = 0, len(text.rstrip())
        while at < end:
            found = _TOKEN.match(text, at)
            if found is None:
                raise self._error(f"{text[at:].strip()[:20]!r} cannot be read")
            assert found.lastgroup is not None
            yield found.lastgroup, found[found.lastgroup]
            at = found.end()

    def _either(self) -> Callable[[RunEntry], bool]:
        tests = [self._both()]
        while self._take("or"):
            tests.append(self._both())
        return tests[0] if len(tests) == 1 else lambda entry: any(test(entry) for test in tests)

    def _both(self) -> Callable[[RunEntry], bool]:
        tests = [self._one()]
        while self._take("and"):
            tests.append(self._one())
        return tests[0] if len(tests) == 1 else lambda entry: all(test(entry) for test in tests)

    def _one(self) -> Callable[[RunEntry], bool]:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._error(f"it has more than {_DEEPEST} parts within one another")
        try:
            if self._take("not"):
                negated = self._one()
                return lambda entry: not negated(entry)
            if self._take("("):
                test = self._either()
                if not self._take(")"):
                    raise self._error("a parenthesis is not closed")
                return test
            return self._comparison()
        finally:
            self._depth -= 1

    def _comparison(self) -> Callable[[RunEntry], bool]:
        kind, name = self._next("a name")
        if kind not in ("word", "quoted"):
            raise self._error(f"{name!r} stands where a name is expected")
        _, value_of = self._columns.find(name.strip("`"))
        if self._at == len(self._tokens) or self._tokens[self._at][0] != "sign" or self._tokens[self._at][1] in "()":
            return lambda entry: bool(_single(value_of(entry)))
        _, sign = self._next("a sign")
        kind, text = self._next("a value")
        if kind == "sign":
            raise self._error(f"{text!r} stands where a value is expected")
        return _Comparison(value_of, "==" if sign == "=" else sign, _constant(kind, text)).holds

    def _take(self, text: str) -> bool:
        if self._at < len(self._tokens):
            kind, found = self._tokens[self._at]
            if found.lower() == text and kind in ("word", "sign"):
                self._at += 1
                return True
        return False

    def _next(self, what: str) -> tuple[str, str]:
        if self._at == len(self._tokens):
            raise self._error(f"it ends where {what} is expected")
        self._at += 1
        return self._tokens[self._at - 1]

    def _error(self, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self._text!r} is not a filter: {why}; write it as in 'lr > 0.01 and status == finished'"
        )


class _Comparison(NamedTuple):
    value_of: ValueOf
    sign: str
    constant: Any

    def holds(self, entry: RunEntry) -> bool:
        value = self.value_of(entry)
        if value is None:
            return False
        if isinstance(value, tuple):
            if self.sign == "!=":
                return str(self.constant) not in value
            return any(self._compare(one) for one in value)
        return self._compare(value)

    def _compare(self, value: Any) -> bool:
        if self.sign == "~":
            return str(self.constant).lower() in str(value).lower()
        one, other = value, self.constant
        if isinstance(one, bool):
            one, other = str(one).lower(), str(other).lower()
        elif isinstance(one, str) != isinstance(other, str):
            # A text that looks like a number was given as one.
            one, other = str(one), str(other)
            if self.sign not in ("==", "!="):
                return False
        return _SIGNS[self.sign](one, other)


def _constant(kind: str, text: str) -> Any:
    if kind == "number":
        try:
            return int(text)
        except ValueError:
            return float(text)
    if kind == "text":
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    return text.strip("`")


def _ending(names: Iterable[str], end: str) -> set[str]:
    return {name for name in names if name.endswith(f"/{end}")}


def _hyperparameter(*names: str) -> ValueOf:
    def value(entry: RunEntry) -> Any:
        known = entry.hyperparameters
        return next((known[name] for name in names if name in known), None)

    return value


def _metric(name: str, which: str) -> ValueOf:
    of = _OF_METRIC[which]

    def value(entry: RunEntry) -> float | None:
        values = entry.metrics.get(name)
        return None if values is None else of(values)

    return value


def _single(value: Any) -> Any:
    """A value by which runs can be sorted; ``None`` where there is none."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or None
    return value


def _order(value: Any) -> tuple[int, Any]:
    return (0, value) if isinstance(value, int | float) else (1, str(value).lower())


def _such_as(names: Sequence[str]) -> str:
    return f" such as {names[0]}" if names else ""
