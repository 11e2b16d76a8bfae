"""The names of metrics: the full name that one is recorded by, and the short name that people read and write."""

import functools
from collections.abc import Iterable

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.metrics import ends_of, is_of_evaluation, own_name

_GROUPS = frozenset(("loss", "metrics", "throughput", "memory", "system"))
"""Prefixes that offloop puts before names. What a user's own name begins with says something, and stays."""
_LISTED = 8


class MetricNames:
    """Some metrics, such as those of a run, by the names that they may be given by.

    A metric is named by its full name (``metrics/eval/accuracy``), by its short one, or by the part of the full name
    behind any ``/``. ``loss`` always is ``loss/train/total``; of other names that an evaluation and the training share,
    ``accuracy`` is that of the evaluation and ``train/accuracy`` that of the training.

    Args:
        metrics: full names.
    """

    def __init__(self, metrics: Iterable[str]) -> None:
        self._full = dict.fromkeys(metrics)
        self._by_name: tuple[dict[str, list[str]], ...] = ({}, {}, {})
        """Metrics by name: own names, short names, and other ends; the first that has a name counts."""
        for metric in self._full:
            own = own_name(metric)
            for known, names in zip(self._by_name, ([own] if own else [], _ends(metric), ends_of(metric)), strict=True):
                for name in names:
                    known.setdefault(name, []).append(metric)

    def matches(self, name: str) -> list[str]:
        """The full names of all metrics that a name may stand for."""
        if name in self._full:
            return [name]
        return next((known[name] for known in self._by_name if name in known), [])

    def find(self, name: str, missing: str = "there is no metric") -> str:
        """The full name of the metric that a name stands for.

        Args:
            name: a full or short name.
            missing: how the message begins where there is none.

        Raises:
            ConfigurationError: there is none of that name, or there are several.
        """
        found = self.matches(name)
        if len(found) == 1:
            return found[0]
        if found:
            raise ConfigurationError(self.ambiguous(name, found), name=name)
        known = _listed(sorted(map(self.short, self._full)))
        raise ConfigurationError(f"{missing} {name!r}: there are {known or 'none'}", name=name)

    def ambiguous(self, name: str, found: Iterable[str]) -> str:
        """The message about a name that several metrics have."""
        return f"{name!r} may be {_listed(sorted(map(self.short, found)))}: write one of these"

    def short(self, metric: str) -> str:
        """The short name of a metric, which stands for no other one: ``loss``, ``lr``, ``accuracy``,
        ``train/accuracy``, ``samples_per_sec``. It is the full one without the prefix that offloop puts before names,
        or without as much of that as can be left out: where two evaluators have the metric, ``eval/accuracy`` and
        ``test/accuracy``."""
        own = own_name(metric)
        return next((one for one in ([own] if own else _ends(metric)) if self.matches(one) == [metric]), metric)


def is_named(metric: str, name: str) -> bool:
    """A name may stand for a metric."""
    return name in (metric, own_name(metric)) or metric.endswith(f"/{name}")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


@functools.lru_cache(maxsize=4096)
def _ends(metric: str) -> tuple[str, ...]:
    """Candidates for the short name, the shortest first. A metric of the training keeps ``train/``, so that a name does
    not change its meaning when the first evaluation is logged."""
    group, _, rest = metric.partition("/")
    if group not in _GROUPS:
        return ()
    ends = (rest.partition("/")[2], rest) if is_of_evaluation(metric) else (rest,)
    return tuple(end for end in ends if end and not end.isdigit())
