"""Runs the benchmarks one after the other, in about half an hour, and ends with a table of all goals.

Its JSON file holds all figures. Benchmarks that need other packages or devices have their own commands."""

import functools
import json
import subprocess
import sys
from pathlib import Path

from common import Report, argument_parser, run

OPTIONS: dict[str, list[str]] = {
    "hot_loop": [],
    "stream": [],
    "history": [],
    "checkpoint": [],
    "dashboard": [],
    "home": [],
    "cluster": [],
    "faults": [],
    "soak": ["--events", "1000000"],
}
"""The benchmarks in their order, with their options."""


def measure(report: Report, where: Path, quick: bool, name: str) -> None:
    file = where / "figures.json"
    command = [sys.executable, Path(__file__).with_name(f"{name}.py"), "--json", file]
    try:
        done = subprocess.run([*command, *(["--quick"] if quick else OPTIONS[name])], check=False)
    finally:
        for figure_name, figure in json.loads(file.read_text())["figures"].items() if file.exists() else ():
            report.include(f"{name}: {figure_name}", figure)
    if done.returncode:
        raise SystemExit(f"{name}.py ended with exit code {done.returncode}")


PARTS = {name: functools.partial(measure, name=name) for name in OPTIONS}

if __name__ == "__main__":
    run("all", PARTS, argument_parser(__doc__, PARTS).parse_args())
