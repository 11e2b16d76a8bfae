"""Compares two files that a benchmark wrote with --json: each figure before and after, their ratio, and its goal.

To compare two versions, run the benchmark on the same idle machine, one after the other."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import number


def read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        return {name: content[name] for name in ("benchmark", "quick", "machine", "figures")}
    except (OSError, ValueError, TypeError, KeyError) as error:
        sys.exit(
            f"error: cannot read figures from {path} ({error!r}): give two files that a benchmark wrote with --json"
        )


def compare(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    kinds = [f"{content['benchmark']}{' --quick' * content['quick']}" for content in (before, after)]
    if kinds[0] != kinds[1]:
        sys.exit(f"error: cannot compare {kinds[0]} with {kinds[1]}: give two files of the same benchmark")
    if before["machine"] != after["machine"]:
        yield f"before: {before['machine']}"
        yield f"after:  {after['machine']}"
    yield f"{kinds[0]:<72} {'before':>10} {'after':>10} {'ratio':>7}"
    for name in before["figures"] | after["figures"]:
        old, new = before["figures"].get(name), after["figures"].get(name)
        shown = [number(figure["value"]) if figure else "-" for figure in (old, new)]
        ratio = f"{new['value'] / old['value']:.3f}" if old and new and old["value"] else "-"
        row = f"{name:<72} {shown[0]:>10} {shown[1]:>10} {ratio:>7}"
        yield f"{row} {(new or old)['unit']:<12} {goal(old, new)}".rstrip()


def goal(old: dict[str, Any] | None, new: dict[str, Any] | None) -> str:
    """Describe the goal: ``at most 3: met -> MISSED``."""
    verdicts = ["met" if figure["met"] else "MISSED" for figure in (old, new) if figure and "met" in figure]
    if not verdicts:
        return ""
    text = next(figure["goal"] for figure in (new, old) if figure and "met" in figure)
    return f"{text}: {' -> '.join(dict.fromkeys(verdicts))}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, metavar="before.json")
    parser.add_argument("after", type=Path, metavar="after.json")
    options = parser.parse_args()
    for row in compare(read(options.before), read(options.after)):
        print(row)
