"""Options, parts, timing and reports of the benchmarks.

A benchmark is a program of parts. A part is a function of a :class:`Report`, a directory for its runs, and whether tiny
sizes suffice::

    def measure_events(report: Report, runs_dir: Path, quick: bool) -> None:
        times = [one_round() for _ in report.rounds("events", 1 if quick else 5)]
        report.add("published event", times, "us", 3)

    if __name__ == "__main__":
        parts = {"events": measure_events}
        run("hot loop", parts, argument_parser(__doc__, parts).parse_args())"""

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
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from offloop.bus.errors import close_matches

PLAIN_PROGRESS_SECONDS = 5.0  # between two lines of progress without a terminal


def argument_parser(text: str | None, parts: Iterable[str]) -> argparse.ArgumentParser:
    allowed = list(parts)

    def chosen(names: str) -> list[str]:
        requested = names.split(",")
        for name in requested:
            if name not in allowed:
                hint = close_matches(name, allowed)
                raise argparse.ArgumentTypeError(f"unknown part {name!r}: {hint}allowed: {', '.join(allowed)}")
        return [name for name in allowed if name in requested]

    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, only to see that everything works")
    parser.add_argument(
        "--fraction", type=float, default=1.0, help="run this fraction of the rounds, at least one: for compare.py"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the figures to FILE, each when it is there"
    )
    parser.add_argument(
        "--only", type=chosen, default=allowed, metavar="PART[,PART]", help=f"parts to run: {', '.join(allowed)}"
    )
    return parser


def run(title: str, parts: Mapping[str, Callable[..., object]], options: argparse.Namespace, *given: Any) -> None:
    try:
        report = Report(title, options.quick, options.json, options.fraction)
    except OSError as error:
        raise SystemExit(f"error: cannot write {options.json}: {error.strerror}: choose another --json") from None
    failed = []
    for name in options.only:
        report.progress(name)
        try:
            with scratch() as where:
                parts[name](report, where, *(given or (options.quick,)))
        except KeyboardInterrupt:
            report.close(name)
            raise SystemExit(130) from None
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the other parts are measured in any case
            report.clear_progress()
            if not isinstance(error, SystemExit):
                traceback.print_exc()
            print(f"part {name} failed: {error}", file=sys.stderr)
            failed.append(name)
    report.close(*failed)
    if failed:
        raise SystemExit(1)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="olb-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def microseconds(
    function: Callable[[], object], calls: int, bursts: Iterable[object], pause: float = 0.01
) -> list[float]:
    times = []
    for _ in bursts:
        begin = time.perf_counter_ns()
        for _ in range(calls):
            function()
        times.append((time.perf_counter_ns() - begin) / calls / 1000)
        time.sleep(pause)
    return times


def ratios(values: Iterable[float], bases: Iterable[float]) -> list[float]:
    return [value / base for value, base in zip(values, bases, strict=True)]


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return low, high


def wait_until(condition: Callable[[], object], what: str, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {timeout:g} s in vain for {what}")
        time.sleep(0.005)


def wait_until_attached(consumer: "subprocess.Popen[str]") -> None:
    assert consumer.stderr is not None
    lines = []
    while "attached" not in (line := consumer.stderr.readline()):
        lines.append(line)
        if not line:
            raise SystemExit(f"the consumer ended: {''.join(lines)}")


@contextlib.contextmanager
def consumer_process(*options: str) -> Iterator["subprocess.Popen[str]"]:
    command, here = [sys.executable, "-m", "offloop.consumers", *options], Path(__file__).parent
    process = subprocess.Popen(command, cwd=here, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


class Report:
    def __init__(self, title: str, quick: bool, json_file: Path | None = None, fraction: float = 1.0) -> None:
        self.figures: dict[str, dict[str, Any]] = {}
        self.details: dict[str, Any] = {}  # further content of the JSON file
        self._header = {"benchmark": title, "quick": quick, "machine": machine()}
        self._json_file = json_file
        self._fraction = fraction
        self._begin = time.monotonic()
        self._next_progress = 0.0
        print(f"{title}\n{machine()}\n", flush=True)
        self._write(complete=False)

    def add(
        self,
        name: str,
        value: float | Sequence[float],
        unit: str,
        goal: float | None = None,
        *,
        at_least: bool = False,
    ) -> None:
        better = "higher" if at_least or unit.endswith("/s") else "lower"
        figure: dict[str, Any] = {"value": value, "unit": unit, "better": better}
        if isinstance(value, Sequence):
            figure["value"] = statistics.median(value)
            if len(value) > 1:
                figure["spread"] = [min(value), max(value)]
        if goal is not None and not self._header["quick"]:
            met = figure["value"] >= goal if at_least else figure["value"] <= goal
            figure |= {"goal": f"at {'least' if at_least else 'most'} {goal:,g}", "met": met}
        self.include(name, figure)
        self.clear_progress()
        print(line(name, figure), flush=True)

    def include(self, name: str, figure: dict[str, Any]) -> None:
        self.figures[name] = figure
        self._write(complete=False)

    def rounds(self, what: str, count: int) -> Iterator[int]:
        count = max(1, round(count * self._fraction))
        for number in range(count):
            self.progress(f"{what}: round {number + 1} of {count}")
            yield number

    def progress(self, what: str) -> None:
        now = time.monotonic()
        text = f"[{now - self._begin:4.0f} s] {what}"
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif now >= self._next_progress:
            self._next_progress = now + PLAIN_PROGRESS_SECONDS
            print(text, file=sys.stderr, flush=True)

    def clear_progress(self) -> None:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def close(self, *failed: str) -> None:
        self.clear_progress()
        self._write(complete=not failed)
        judged = {name: figure for name, figure in self.figures.items() if "met" in figure}
        if judged:
            width = max(map(len, judged))
            print("\n" + "\n".join(line(name, figure, width) for name, figure in judged.items()))
            print(f"{sum(figure['met'] for figure in judged.values())} of {len(judged)} goals met", flush=True)
        if failed:
            print(f"not complete: {', '.join(failed)}", file=sys.stderr)

    def _write(self, complete: bool) -> None:
        if self._json_file:
            content = {**self._header, "complete": complete, "figures": self.figures, **self.details}
            self._json_file.write_text(json.dumps(content, indent=2) + "\n")


def number(value: float) -> str:
    return f"{value:,.{0 if abs(value) >= 1000 else 3}f}"


def line(name: str, figure: Mapping[str, Any], width: int = 72) -> str:
    spread = "({} to {})".format(*map(number, figure["spread"])) if "spread" in figure else ""
    verdict = f"{figure['goal']}: {'met' if figure['met'] else 'MISSED'}" if "goal" in figure else ""
    return f"{name:<{width}} {number(figure['value']):>10} {figure['unit']:<12} {spread:<24} {verdict}".rstrip()


def machine() -> str:
    names = ("offloop", "torch", "pyzmq", "msgpack", "mcap")
    installed = {name: _version(name) for name in names}
    packages = " ".join(f"{name} {version}" for name, version in installed.items() if version)
    return (
        f"{os.cpu_count()} cores ({_processor()}), {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, {packages}, {time.strftime('%Y-%m-%d')}"
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
