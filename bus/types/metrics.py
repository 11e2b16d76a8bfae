"""Metrics: what their names say, and their values as plain numbers."""

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

Mode: TypeAlias = Literal["min", "max"]

_LOWER_IS_BETTER = re.compile(
    r"loss|error|perplexity|entropy|mse|mae|rmse|(^|[/_.])(wer|cer|ppl|nll|bpc|bpb|fid)($|[/_.])|time|memory|lr-",
    re.IGNORECASE,
)
_LOWER = re.compile(
    r"loss|error|perplexity|entropy|mse|mae|rmse|(^|[/_.])(wer|cer|ppl|nll|bpc|bpb|fid)($|[/_.])", re.IGNORECASE
)
_HIGHER = re.compile(
    r"accuracy|f1|auc|auroc|precision|recall|score|bleu|rouge|jaccard|dice|psnr|ssim|correlation"
    r"|(^|[/_.])(acc|iou|miou|map|mrr|ndcg|r2|em)($|[/_.])",
    re.IGNORECASE,
)
_NOT_COMPARED = re.compile(r"^(lr-|time/|throughput/|memory/|system/|stall/|nan/)")


def has_direction(metric: str) -> bool:
    """Whether a metric measures how good a training is, so that one value is better than another: losses, what
    evaluations measure, and what is called like such; not learning rates, times and the like."""
    if _NOT_COMPARED.match(metric):
        return False
    return metric.startswith(("loss/", "metrics/")) or bool(_LOWER.search(metric) or _HIGHER.search(metric))


def mode_of(metric: str) -> Mode:
    """Whether the least or the greatest value of a metric is its best, by its name: of losses, errors, times and the
    like the least, of everything else the greatest."""
    return "min" if _LOWER_IS_BETTER.search(metric) else "max"


_HAS_DIRECTION = re.compile(
    r"^(loss|metrics)/|loss|error|perplexity|entropy|mse|mae|(^|[/_.])(wer|cer|ppl|nll|bpc|bpb|fid)($|[/_.])"
    r"|accuracy|score|precision|recall|(^|[/_.])(acc|f1|auc|auroc|iou|map|bleu|rouge|psnr|ssim|reward|return)($|[/_.])",
    re.IGNORECASE,
)


def direction_of(metric: str) -> Mode | None:
    """As :func:`mode_of`; ``None`` for metrics such as rates, norms, times and memory, of which neither the least nor
    the greatest value is a best one, and for those whose names do not say it."""
    return mode_of(metric) if _HAS_DIRECTION.search(metric) else None


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
