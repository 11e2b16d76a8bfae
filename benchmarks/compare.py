"""Measures another revision and the working tree in turn, and says which figures are slower or faster beyond noise.

Both versions are copied and get a virtual environment each, which shares the packages of this one. The benchmarks are
those of the working tree for both: a figure means the same on both sides. What the other revision cannot run has no
ratio.

A round measures every chosen benchmark once with each version, in changing order. A figure is slower or faster if the
quartiles of its rounds' ratios are both beyond 1 by more than the margin, and all ratios but one of seven are on that
side of 1, and again in as many further rounds, which only such benchmarks get.

The exit status is 1 if a figure is slower, or a benchmark of the working tree fails."""

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copy2
from typing import Any

from common import number, quartiles, scratch

ROOT = Path(__file__).resolve().parents[1]
UNITS = (
    *("hot_loop:events", "hot_loop:flight", "hot_loop:watch", "hot_loop:tiny-mlp", "hot_loop:medium-mlp"),
    *("stream:throughput", "stream:replay", "checkpoint:100MB"),
)
"""Benchmarks, and parts of benchmarks, that are compared by default: about half an hour."""
FEWEST = 4  # rounds with fewer have no quartiles to speak of


def error(text: str) -> SystemExit:
    print(f"error: {text}", file=sys.stderr)
    return SystemExit(2)


class Version:
    """A copy of a revision, or of the working tree, and a virtual environment that imports it."""

    def __init__(self, folder: Path, revision: str | None) -> None:
        self.name = f"{folder.name} ({revision or 'working tree'})"
        self.source = folder / "source"
        self.source.mkdir(parents=True)
        if revision is None:
            copy_working_tree(self.source)
        else:
            packed = git("archive", "--format=tar", revision)
            with tarfile.open(fileobj=io.BytesIO(packed)) as files:
                files.extractall(self.source, filter="tar")
        venv.create(folder / "venv", symlinks=True)
        self.python = folder / "venv" / "bin" / "python"
        (site,) = folder.glob("venv/lib/*/site-packages")
        shared = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        added = (f"import site; site.addsitedir({path!r})\n" for path in shared)
        (site / "compared.pth").write_text(f"{self.source}\n{''.join(added)}")
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            (self.python.parent / "nats-server").symlink_to(Path(sys.executable).with_name("nats-server").resolve(True))
        self._check()

    def _check(self) -> None:
        code = "import offloop; print(offloop.__file__)"
        done = subprocess.run([self.python, "-c", code], cwd=self.source.parent, capture_output=True, text=True)
        if done.returncode or not Path(done.stdout.strip()).is_relative_to(self.source):
            raise error(
                f"{self.name} cannot be imported: {(done.stderr or done.stdout).strip().rpartition(chr(10))[2]}"
            )

    def measure(self, scripts: Path, unit: str, options: Sequence[str]) -> tuple[dict[str, Any], str | None]:
        """Return the figures of a benchmark or a part of it, and why it failed."""
        benchmark, _, part = unit.partition(":")
        file = self.source.parent / "figures.json"
        file.unlink(missing_ok=True)
        command = [self.python, scripts / f"{benchmark}.py", "--json", file, *options, *(["--only", part] * bool(part))]
        done = subprocess.run(command, cwd=scripts, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        figures = json.loads(file.read_text())["figures"] if file.exists() else {}
        return figures, (
            done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
        ) if done.returncode else None


def copy_working_tree(folder: Path) -> None:
    for name in git("ls-files", "--cached", "--others", "--exclude-standard", "-z").decode().split("\0"):
        source, target = ROOT / name, folder / name
        if name and os.path.lexists(source) and not (source.is_dir() and not source.is_symlink()):
            target.parent.mkdir(parents=True, exist_ok=True)
            copy2(source, target, follow_symlinks=False)


def git(*arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True)
    if done.returncode:
        raise error(f"git {arguments[0]} failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


@dataclass
class Compared:
    """One figure in all rounds."""

    unit: str
    better: str  # "higher" or "lower"
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    def ratios(self, rounds: slice = slice(None)) -> list[float]:
        pairs = zip(self.before[rounds], self.after[rounds], strict=False)
        # A small difference of two times may be negative.
        return [after / before for before, after in pairs if before > 0 and after > 0]

    def verdict(self, rounds: int, margin: float) -> str:
        """Judge the first rounds, and the further ones if there are any: they have to agree."""
        series = [self.ratios(slice(rounds)), self.ratios(slice(rounds, None))]
        verdicts = {verdict(ratios, self.better, margin) for ratios in series if ratios}
        return verdicts.pop() if len(verdicts) == 1 else "noise"


def verdict(ratios: Sequence[float], better: str, margin: float) -> str:
    """Judge the ratios of the figure after to the figure before, one for each round.

    Args:
        ratios: At least one.
        better: Which figures are better: ``"higher"`` or ``"lower"``.
        margin: How far both quartiles have to be beyond 1; all ratios but one of seven have to be on their side of 1.

    Returns:
        ``"slower"``, ``"faster"`` or ``"noise"``."""
    low, high = quartiles(ratios)
    if len(ratios) < FEWEST or (low <= 1 + margin and high >= 1 / (1 + margin)):
        return "noise"
    against = sum((ratio > 1) != (low > 1) for ratio in ratios)
    if against > len(ratios) // 7:
        return "noise"
    return "faster" if (low > 1) == (better == "higher") else "slower"


class Comparison:
    def __init__(self, before: Version, after: Version, scripts: Path, options: argparse.Namespace) -> None:
        self.figures: dict[str, Compared] = {}  # by unit and name
        self.failures: dict[tuple[str, str], str] = {}  # why, by version and unit
        self._versions = before, after
        self._options = options
        self._scripts = scripts
        self._given = ["--quick"] if options.quick else ["--fraction", str(options.fraction)]
        self._begin = time.monotonic()

    def run(self) -> None:
        units, rounds = self._options.only, self._options.rounds
        self._measure(units, "round")
        judged = (
            (name.partition("/")[0], one.verdict(rounds, self._options.margin)) for name, one in self.figures.items()
        )
        again = {unit for unit, verdict in judged if verdict != "noise"}
        self._measure([unit for unit in units if unit in again], "further round")

    def _measure(self, units: Sequence[str], what: str) -> None:
        for turn in range(self._options.rounds if units else 0):
            for unit in units:
                found = {}
                for version in self._versions[:: -1 if turn % 2 else 1]:
                    passed = time.monotonic() - self._begin
                    text = f"[{passed:4.0f} s] {what} {turn + 1} of {self._options.rounds}: {unit}, {version.name}"
                    print(text, file=sys.stderr, flush=True)
                    found[version], failure = version.measure(self._scripts, unit, self._given)
                    if failure:
                        self.failures[version.name, unit] = failure
                self._add(unit, *(found[version] for version in self._versions))

    def _add(self, unit: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        for name in [*before, *(name for name in after if name not in before)]:
            figure = after.get(name) or before[name]
            its = self.figures.setdefault(f"{unit}/{name}", Compared(figure["unit"], figure["better"]))
            if name in before and name in after:
                its.before.append(before[name]["value"])
                its.after.append(after[name]["value"])

    def rows(self) -> Iterator[str]:
        margin, rounds = self._options.margin, self._options.rounds
        names = ", ".join(version.name for version in self._versions)
        yield f"\n{names}: medians, and quartiles of the ratios of {rounds} rounds\n"
        width = max([len(name.partition("/")[2]) for name in self.figures], default=0)
        counts = {"slower": 0, "faster": 0, "noise": 0}
        unit = ""
        for key, one in self.figures.items():
            its_unit, _, name = key.partition("/")
            if its_unit != unit:
                unit = its_unit
                yield f"{unit:<{width}} {'before':>10} {'after':>10} {'':<12} {'ratio':>7}"
            ratios = one.ratios()
            if not ratios:
                yield f"{name:<{width}} {'-':>10} {'-':>10} {one.unit}"
                continue
            found = one.verdict(rounds, margin)
            counts[found] += 1
            shown = [number(statistics.median(values)) for values in (one.before, one.after)]
            spread = "({:.3f} to {:.3f})".format(*quartiles(ratios))
            row = f"{name:<{width}} {shown[0]:>10} {shown[1]:>10} {one.unit:<12} {statistics.median(ratios):7.3f}"
            yield f"{row} {spread:<18} {found}"
        yield "\n" + ", ".join(f"{count} {found}" for found, count in counts.items())
        for (version, unit), failure in self.failures.items():
            yield f"{unit} failed with {version}: {failure}"

    @property
    def is_worse(self) -> bool:
        verdicts = [
            one.verdict(self._options.rounds, self._options.margin) for one in self.figures.values() if one.before
        ]
        return "slower" in verdicts or any(version == self._versions[1].name for version, _ in self.failures)


def parse_arguments() -> argparse.Namespace:
    def rounds(text: str) -> int:
        if (count := int(text)) < FEWEST:
            raise argparse.ArgumentTypeError(f"{count} rounds are too few: use at least {FEWEST}")
        return count

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", metavar="REVISION", help="default: the newest tag before HEAD")
    parser.add_argument("--after", metavar="REVISION", help="default: the working tree")
    parser.add_argument("--rounds", type=rounds, default=7, metavar="N", help="default: 7")
    parser.add_argument(
        "--only", default=",".join(UNITS), metavar="BENCHMARK[:PART],...", help=f"default: {' '.join(UNITS)}"
    )
    parser.add_argument("--margin", type=float, default=0.02, help="default: 0.02")
    parser.add_argument("--fraction", type=float, default=0.2, help="of each benchmark's own rounds; default: 0.2")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, only to see that everything works")
    options = parser.parse_args()
    options.only = options.only.split(",")
    for unit in options.only:
        if not (Path(__file__).with_name(unit.partition(":")[0] + ".py")).is_file():
            parser.error(
                f"no benchmark {unit.partition(':')[0]!r} in benchmarks/: allowed are such as {' '.join(UNITS)}"
            )
    return options


def main() -> None:
    options = parse_arguments()
    revision = options.before or git("describe", "--tags", "--abbrev=0").decode().strip()
    with scratch() as folder:
        before, after = Version(folder / "before", revision), Version(folder / "after", options.after)
        # A benchmark imports from the tests' support, which is beside it.
        copy_working_tree(folder / "scripts")
        comparison = Comparison(before, after, folder / "scripts" / "benchmarks", options)
        try:
            comparison.run()
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        finally:
            for row in comparison.rows():
                print(row)
    raise SystemExit(1 if comparison.is_worse else 0)


if __name__ == "__main__":
    main()
