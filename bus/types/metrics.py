"""Metrics: names, directions (lower or higher is better), and values as plain numbers."""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from offloop.bus.errors import ConfigurationError

Mode: TypeAlias = Literal["min", "max"]
Step = TypeVar("Step", int, float)
Value = TypeVar("Value")

LOSS = "loss/train/total"

GOALS = "metric.goals"  # the hyperparameter, or the entry of a run's config, with min or max for each metric
_GOALS = (f"{GOALS}/", f"config/{GOALS}/")


def _set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_LOWER = _set(
    "loss losses error errors perplexity ppl cross_entropy crossentropy nll mse mae rmse mape msle bpc bpb bpd "
    "bits_per_token bits_per_byte wer cer mer eer ece fid lpips brier"
)
_HIGHER = _set(
    "accuracy accuracies acc f1 fbeta fmeasure f_beta auc auroc precision recall ap map sensitivity specificity kappa "
    "jaccard jaccard_index iou miou dice bleu rouge meteor chrf psnr ssim mrr ndcg r2 matthews_corr_coef "
    "matthews_correlation exact_match em reward rewards rew return returns success"
)
_QUALIFIERS = _set(
    "train training val valid validation eval evaluation test dev dataloader idx mean avg average total macro micro "
    "weighted step epoch rate score per token top at k l lsum"
)  # words at the end of a name that do not change its direction: val_loss_epoch, f1_score
_LONGEST = 3
_COUNTS = re.compile(
    r"^(lr-|time/|throughput/|memory/|system/|stall/|nan/)|(^|[/.])(n|num|number_of|grad)_"
    r"|(time|seconds?|secs?|epochs?|batch(es)?|iters?|iterations?|samples|steps|tokens)_(to|per|of|since|until|at)_"
)
_PARTS_OF_LOSS = "loss/train/"
_GROUPS = frozenset(("loss", "metrics", "throughput", "memory", "system"))
"""Prefixes that offloop puts before names. A prefix of the user's is part of the name."""
_OF_ROWS = frozenset(("step", "time"))
"""Columns of logged rows."""
_LISTED = 8
_FIRST_GROUPS = ("loss", "metrics", "lr", "throughput")


def direction_of(metric: str, goals: Mapping[str, Mode] = MappingProxyType({})) -> Mode | None:
    """Return ``min`` or ``max``: whether the lowest or the highest value of a metric is its best.

    ``goals`` decide, then the name where it is certain (``val_loss``, ``metrics/eval/MulticlassAccuracy``). ``None``
    for all others, such as norms, counts, rates and times."""
    if goals:
        for name in filter(None, (metric, own_name(metric), *ends_of(metric))):
            if name in goals:
                return goals[name]
    return _by_name(metric)


def goals_in(hyperparameters: Iterable[Mapping[str, Any]]) -> dict[str, Mode]:
    """Return the goals in hyperparameters, by full name or its end, without metrics for which runs disagree."""
    found: dict[str, Mode | None] = {}
    for of_run in hyperparameters:
        own = {
            name.removeprefix(prefix): value
            for prefix in _GOALS
            for name, value in of_run.items()
            if name.startswith(prefix) and value in get_args(Mode)
        }
        found |= {name: goal if found.get(name, goal) == goal else None for name, goal in own.items()}
    return {name: goal for name, goal in found.items() if goal is not None}


def check_goals(config: Mapping[str, Any], argument: str) -> None:
    goals = config.get(GOALS, {})
    if not isinstance(goals, Mapping):
        raise ConfigurationError(
            f"{argument}[{GOALS!r}] is {goals!r:.60}: give a dict of metrics, such as {{'my_score': 'max'}}"
        )
    for name, goal in goals.items():
        if goal not in get_args(Mode):
            raise ConfigurationError(
                f"{argument}[{GOALS!r}] is {goal!r:.60} for {name!r:.60}: use 'min' if lower is better, else 'max'"
            )


@functools.lru_cache(maxsize=4096)
def _by_name(metric: str) -> Mode | None:
    if _COUNTS.search(metric):
        return None
    text = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", metric.replace("IoU", "Iou"))
    words = re.findall(r"[a-z0-9]+", re.sub(r"([A-Z])([A-Z][a-z])", r"\1 \2", text).lower())
    while words:
        for length in range(1, _LONGEST + 1):
            tail = "_".join(words[-length:])
            for name in (tail, tail.rstrip("0123456789")):
                if name in _LOWER or name in _HIGHER:
                    return "min" if name in _LOWER else "max"
        last = words.pop()
        if not last.isdigit() and last.rstrip("0123456789") not in _QUALIFIERS:
            break
    return "min" if metric.startswith(_PARTS_OF_LOSS) else None


def own_name(metric: str) -> str | None:
    """Return the name that a metric has besides its full one and the ends of that: ``loss`` or ``lr``."""
    return "loss" if metric == LOSS else "lr" if metric.startswith("lr-") else None


def ends_of(metric: str) -> list[str]:
    parts = metric.split("/")
    return ["/".join(parts[place:]) for place in range(1, len(parts))]


def is_of_evaluation(metric: str) -> bool:
    return metric.startswith("metrics/") and not metric.startswith("metrics/train/")


def shown_step(metric: str, step: Step) -> Step:
    """Return the step at which tables, charts and frames show a value that was logged for a step.

    Steps count batches from 0. Evaluations are logged for the number of batches trained, and shown at the step of the
    last batch before them; an evaluation before the first batch is at step 0. Imported logs keep their own steps, and
    so do values that a training logs under such a name."""
    return step - 1 if step >= 1 and is_of_evaluation(metric) else step


def logged_name(name: str) -> str:
    """Return the name of the metric for a value that a training logs: ``log/step`` for ``step``, ``log/time``."""
    return f"log/{name}" if name in _OF_ROWS else name


def with_logged_names(values: Mapping[str, Value]) -> Mapping[str, Value]:
    if _OF_ROWS.isdisjoint(values):
        return values
    return {logged_name(name): value for name, value in values.items()}


def flatten(values: Mapping[Any, Any]) -> dict[str, float | str]:
    """Return metrics by name; lists and maps in parts, as ``NAME/0`` or ``NAME/KEY``. Other values are left out."""
    flat: dict[str, float | str] = {}
    for name, value in values.items():
        if isinstance(value, float | int | str):
            flat[str(name)] = value
        elif isinstance(value, Mapping | list):
            parts = value if isinstance(value, Mapping) else dict(enumerate(value))
            flat |= {f"{name}/{part}": number for part, number in flatten(parts).items()}
    return flat


def logged_in(fields: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[Any, Any]]]:
    """Yield step and values of what was logged with an event; entries of another form are skipped."""
    logged = fields.get("logged")
    for entry in logged if isinstance(logged, list) else ():
        if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], int) and isinstance(entry[1], Mapping):
            yield entry[0], entry[1]


class MetricNames:
    """Finds metrics by the names that users give.

    A metric is named by its full name (``metrics/eval/accuracy``), its short name, or the part of the full name after
    any ``/``. ``loss`` always is ``loss/train/total``. Of other names that an evaluation and the training share,
    ``accuracy`` is the evaluation's, and ``train/accuracy`` the training's."""

    def __init__(self, metrics: Iterable[str]) -> None:
        self._full = dict.fromkeys(metrics)
        self._by_name: tuple[dict[str, list[str]], ...] = ({}, {})
        """Metrics by name: own names, short names. The first map with the name decides, and then other ends."""
        for metric in self._full:
            own = own_name(metric)
            for known, names in zip(self._by_name, ([own] if own else [], _ends(metric)), strict=True):
                for name in names:
                    known.setdefault(name, []).append(metric)

    def matches(self, name: str) -> list[str]:
        if name in self._full:
            return [name]
        for known in self._by_name:
            if name in known:
                return known[name]
        return [metric for metric in self._full if metric.endswith(f"/{name}")]

    def find(self, name: str, missing: str = "there is no metric") -> str:
        """Return the full name of a metric. Raises ConfigurationError, whose text ``missing`` begins."""
        found = self.matches(name)
        if len(found) == 1:
            return found[0]
        if found:
            raise ConfigurationError(self.ambiguous(name, found), name=name)
        known = _listed(sorted(map(self.short, self._full)))
        raise ConfigurationError(f"{missing} {name!r}: there are {known or 'none'}", name=name)

    def ambiguous(self, name: str, found: Iterable[str]) -> str:
        return f"{name!r} may be {_listed(sorted(map(self.short, found)))}: write one of these"

    def short(self, metric: str) -> str:
        """Return the shortest unique name of a metric: ``loss``, ``lr``, ``accuracy``, ``train/accuracy``.

        It is the full name without offloop's prefix, or without as much of it as stays unique: with the metric in two
        evaluators, ``eval/accuracy`` and ``test/accuracy``."""
        own = own_name(metric)
        return next((one for one in ([own] if own else _ends(metric)) if self.matches(one) == [metric]), metric)


def is_named(metric: str, name: str) -> bool:
    return name in (metric, own_name(metric)) or metric.endswith(f"/{name}")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")


@functools.lru_cache(maxsize=4096)
def _ends(metric: str) -> tuple[str, ...]:
    """Candidates for the short name, the shortest first.

    A metric of the training keeps ``train/``, so that a name keeps its meaning when the first evaluation is logged."""
    group, _, rest = metric.partition("/")
    if group not in _GROUPS:
        return ()
    ends = (rest.partition("/")[2], rest) if is_of_evaluation(metric) else (rest,)
    return tuple(end for end in ends if end and not end.isdigit())


@functools.lru_cache(maxsize=16)
def groups_of(names: tuple[str, ...]) -> Mapping[str, Sequence[str]]:
    """Return metrics by the part before the last ``/`` of their names, in order; learning rates are in ``lr``."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: (not name.endswith("/total"), name)):
        prefix = "lr" if name.startswith("lr-") else name.rpartition("/")[0]
        groups.setdefault(prefix, []).append(name)
    return dict(sorted(groups.items(), key=lambda group: group_order(group[0])))


def group_order(prefix: str) -> tuple[int, str]:
    """Return the place of a group among the others, as a key for sorting: losses first, norms and systems last."""
    first = prefix.partition("/")[0]
    if "norm" in prefix or first == "system":
        return 100 + (first == "system"), prefix
    return _FIRST_GROUPS.index(first) if first in _FIRST_GROUPS else len(_FIRST_GROUPS), prefix
