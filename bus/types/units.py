"""Numbers, sizes and times as text, in the unit that a metric's name implies."""

import math
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypeAlias

from offloop.bus.types.metrics import Mode

Scale: TypeAlias = tuple[tuple[float, str], ...]
"""Units of a metric: the size of each in the metric's own unit, and its suffix; the smallest first."""

_SECONDS_IN = {"seconds": 1, "minutes": 60, "hours": 3_600, "days": 86_400}
_BYTES = (" B", " KiB", " MiB", " GiB", " TiB")
_BYTES_IN_GIGABYTE = 1e9
_LARGE = ((1.0, ""), (1e6, "M"), (1e9, "G"), (1e12, "T"))
_DIGITS = 5
_SMALLEST_PLAIN, _MILLION, _LARGEST_PLAIN = 1e-4, 1e6, 1e9

SECONDS: Scale = ((1e-6, " µs"), (1e-3, " ms"), (1.0, " s"))  # for values that stay in seconds however long they are


def _bytes(suffix: str = "", size: float = 1.0) -> Scale:
    return tuple((1024.0**power / size, unit + suffix) for power, unit in enumerate(_BYTES))


BYTES = _bytes()


def _time(unit: float) -> Scale:
    return tuple(
        (seconds / unit, text) for seconds, text in (*SECONDS, (60.0, " min"), (3_600.0, " h"), (86_400.0, " d"))
    )


_IN_HOURS = ("time/train", "time/val", "time/total")
"""Logged by :class:`~offloop.consumers.callbacks.SpeedMonitor` in hours, unless ``time/unit`` names another unit."""

_ENDINGS: tuple[tuple[str, Scale], ...] = (
    ("_bytes_per_sec", _bytes("/s")),
    ("_bytes", BYTES),
    ("_mem", _bytes(size=_BYTES_IN_GIGABYTE)),
    ("flops_per_sec", tuple((factor, f" {prefix}FLOP/s") for factor, prefix in _LARGE)),
    ("_per_sec", tuple((factor, f"{prefix}/s") for factor, prefix in _LARGE)),
    ("_percent", ((1.0, " %"),)),
    ("_seconds", _time(1.0)),
    ("_watts", ((1.0, " W"),)),
    ("_celsius", ((1.0, " °C"),)),
)


def scale_of(name: str, hyperparameters: Mapping[str, Any]) -> Scale:
    """Return the units of a metric. Times have theirs in the hyperparameters, as ``time/remaining_estimate_unit``."""
    if name.startswith("time/phase/"):
        return SECONDS
    if name.startswith("time/"):
        usual = hyperparameters.get("time/unit", "hours") if name in _IN_HOURS else None
        unit = hyperparameters.get(f"{name}_unit", usual)
        return _time(_SECONDS_IN[unit]) if isinstance(unit, str) and unit in _SECONDS_IN else ()
    metric = name.rpartition("/")[2]
    for of_ranks in ("_avg", "_min", "_max"):
        metric = metric.removesuffix(of_ranks)
    return next((scale for ending, scale in _ENDINGS if metric.endswith(ending)), ())


def number_text(value: float | None, scale: Scale = (), digits: int = _DIGITS) -> str:
    """Format a value with that many significant digits: ``0.1234``, ``1.5 GiB``, ``NaN``, ``-inf``."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    size = abs(value)
    if scale:
        # Zero is shown in the metric's own unit, or the next smaller one.
        fitting = [unit for unit in scale if unit[0] <= (size or 1.0)]
        factor, suffix = fitting[-1] if fitting else scale[0]
    elif size and not _SMALLEST_PLAIN <= size < _LARGEST_PLAIN:
        power = math.floor(math.log10(size))
        return f"{_plain(value / 10.0**power, digits)}e{power}" if abs(power) < _MOST_POWER else f"{value:.{digits}g}"
    else:
        factor, suffix = (_MILLION, "M") if size >= _MILLION else (1.0, "")
    return _plain(value / factor, digits) + suffix


_MOST_POWER = 300


def _plain(value: float, digits: int) -> str:
    if not value:
        return "0"
    decimals = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    text = f"{round(value, decimals):,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def difference(direction: Mode | None, value: float, base: float | None, scale: Scale) -> tuple[str, str]:
    """Return the signed distance from a baseline, and ``better`` or ``worse``; ``""`` each if unknown."""
    if base is None or not abs(value - base) < math.inf:
        return "", ""
    apart = value - base
    # Rounding is not a difference.
    if abs(apart) <= 1e-12 * max(abs(value), abs(base)):
        return "±0", ""
    text = number_text(float(f"{abs(apart):.3g}"), scale)
    judged = "" if direction is None else "better" if (apart < 0) == (direction == "min") else "worse"
    return ("-" if apart < 0 else "+") + text, judged


def when(seconds: float | None) -> str:
    """Format seconds since 1970 in the local zone; empty if unknown, ``?`` for a time of a file that has no date."""
    if seconds is None:
        return ""
    try:
        return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return "?"


def duration(seconds: float) -> str:
    """Format seconds: ``4.3s``, ``2m05s``, ``25h00m``."""
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def lasted(started: float | None, ended: float | None, *, live: bool) -> str:
    end = time.time() if live else ended
    return "?" if end is None or started is None else duration(max(end - started, 0.0))
