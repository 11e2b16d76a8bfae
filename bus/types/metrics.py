"""Metrics: what their names say, and their values as plain numbers."""

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

Mode: TypeAlias = Literal["min", "max"]

_LOWER = r"loss|error|perplexity|entropy|mse|mae|rmse|(^|[/_.])(wer|cer|ppl|nll|bpc|bpb|fid)($|[/_.])"
_HIGHER = (
    r"accuracy|f1|auc|auroc|precision|recall|score|bleu|rouge|jaccard|dice|psnr|ssim|correlation|reward"
    r"|(^|[/_.])(acc|iou|miou|map|mrr|ndcg|r2|em|return)($|[/_.])"
)
_LOWER_IS_BETTER = re.compile(f"{_LOWER}|time|memory|lr-", re.IGNORECASE)
_SAYS_DIRECTION = re.compile(f"^(loss|metrics)/|{_LOWER}|{_HIGHER}", re.IGNORECASE)
_NOT_COMPARED = re.compile(r"^(lr-|time/|throughput/|memory/|system/|stall/|nan/)")


def mode_of(metric: str) -> Mode:
    """Whether the least or the greatest value of a metric is its best, by its name: of losses, errors, times and the
    like the least, of everything else the greatest."""
    return "min" if _LOWER_IS_BETTER.search(metric) else "max"


def direction_of(metric: str) -> Mode | None:
    """As :func:`mode_of` for a metric that measures how good a training is: losses, what evaluations measure, and what
    is called like such. ``None`` for learning rates, times, norms and the like, of which no value is better."""
    is_compared = _SAYS_DIRECTION.search(metric) and not _NOT_COMPARED.match(metric)
    return mode_of(metric) if is_compared else None


def flatten(values: Mapping[Any, Any]) -> dict[str, float | str]:
    """Metrics by name, with those that are lists or maps in parts, as ``NAME/0`` or ``NAME/KEY``; what is neither a
    number nor a text is left out."""
    flat: dict[str, float | str] = {}
    for name, value in values.items():
        if isinstance(value, float | int | str):
            flat[str(name)] = value
        elif isinstance(value, Mapping | list):
            parts = value if isinstance(value, Mapping) else dict(enumerate(value))
            flat |= {f"{name}/{part}": number for part, number in flatten(parts).items()}
    return flat
