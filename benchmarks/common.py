"""What the benchmarks share: where they run, how they time, how they print."""

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path


def arguments(text: str) -> argparse.Namespace:
    """The options of every benchmark."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, only to see that everything works")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    return parser.parse_args()


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A directory for runs with a short path, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="olb-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def microseconds(function: Callable[[], object], calls: int, bursts: int, pause: float = 0.01) -> float:
    """Median over bursts of the time of one call. The pauses let the other processes keep up, as a training does."""
    times = []
    for _ in range(bursts):
        begin = time.perf_counter_ns()
        for _ in range(calls):
            function()
        times.append((time.perf_counter_ns() - begin) / calls / 1000)
        time.sleep(pause)
    return statistics.median(times)


def wait_until(condition: Callable[[], object], what: str, timeout: float = 60.0) -> None:
    """Waits for a condition, and gives up with its name."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {timeout:g} s in vain for {what}")
        time.sleep(0.005)


@contextlib.contextmanager
def consumer_process(*options: str) -> Iterator["subprocess.Popen[str]"]:
    """The command ``consumer`` with these options, ended at the end however far it is. It finds the modules here."""
    command, here = [sys.executable, "-m", "consumers", *options], Path(__file__).parent
    process = subprocess.Popen(command, cwd=here, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


class Report:
    """Collects figures with their goals and prints them as a table."""

    def __init__(self, title: str, quick: bool) -> None:
        self._judge = not quick  # tiny sizes say nothing
        self._rows: list[tuple[str, str, str, str]] = []
        self._figures: dict[str, float] = {}
        print(f"{title}\n{_machine()}\n")

    def add(self, name: str, value: float, unit: str, goal: float | None = None, *, at_least: bool = False) -> None:
        """Notes one figure; ``goal`` is what it has to keep below, or with ``at_least`` above."""
        self._figures[name] = value
        verdict = ""
        if goal is not None and self._judge:
            met = value >= goal if at_least else value <= goal
            verdict = f"{'at least' if at_least else 'at most'} {goal:g}: {'met' if met else 'MISSED'}"
        digits = 0 if abs(value) >= 1000 else 3
        self._rows.append((name, f"{value:,.{digits}f}", unit, verdict))

    def show(self, json_file: str | None) -> None:
        """Prints the table, and writes the figures to a file if one is named."""
        widths = [max(len(row[column]) for row in self._rows) for column in range(3)]
        for name, value, unit, verdict in self._rows:
            print(f"{name:<{widths[0]}}  {value:>{widths[1]}}  {unit:<{widths[2]}}  {verdict}".rstrip())
        if json_file:
            Path(json_file).write_text(json.dumps({"machine": _machine(), "figures": self._figures}, indent=2) + "\n")


def _machine() -> str:
    names = ("offloop", "torch", "pyzmq", "msgpack", "mcap")
    packages = " ".join(f"{name} {metadata.version(name)}" for name in names)
    return (
        f"{os.cpu_count()} cores ({_processor()}), {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, {packages}, {time.strftime('%Y-%m-%d')}"
    )


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
