"""offloop beside other tools: the same trainings with each of them.

Speeds are ratios to the same loop without the tool: trainings in turn in one process, in several processes; TraceML
starts its training itself, so there each has processes of its own, in turn. A figure is the median of the ratios, with
their quartiles. On a CPU, with one torch thread. A tool that fails or hangs loses its cell, which says why."""

import contextlib
import functools
import json
import mmap
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Callable, Collection, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import comparison
from common import Report, argument_parser, machine, quartiles, run
from comparison import CELLS
from cores import MARK, marked
from peer_trainings import PROGRESS, SAVE_EVERY

HERE = Path(__file__).resolve().parent
TRAININGS = HERE / "peer_trainings.py"
PROCESSES = 2
JOBS = {"tiny": (1200, 3, 12, 8.0), "medium": (40, 3, 8, 4.0)}
"""Steps of a training, the fewest and most pairs of them in a process, and seconds after which no further one starts.

The first pair of a process warms up."""
SPEEDS = {"tiny": ("apart", "tiny"), "medium": ("medium",)}  # the cells of each job
GOALS = {"apart": 0.95, "medium": 0.98, "slow": 0.98, "thread": 150}  # goals of offloop
KILLED_AT = (80, 100, 120)
DISKS = 3  # disks that are filled
HUNG_STEPS = 120
PATIENCE, LIMIT = 30.0, 240.0  # seconds for a step, or for the end after the last one; and for a whole process
PLAIN = ("plain", "alone")


class Tool(NamedTuple):
    name: str
    host: str
    tool: str
    packages: tuple[str, ...]
    bare: tuple[str, str] = PLAIN
    reader: str | None = None  # reader that counts the steps after a crash; None for a tool that writes nothing
    environment: str | None = None  # distribution with a separate environment, or composer
    server: bool = False
    slow: bool = False  # whether it runs callbacks
    saves: bool = False


TOOLS = [
    Tool("PyTorch loop", "plain", "alone", ("torch",), slow=True, saves=True),
    Tool("offloop, own loop", "watch", "", ("offloop",), reader="recording", server=True, slow=True, saves=True),
    Tool("offloop, `Trainer`", "trainer", "", ("offloop",), reader="recording", server=True, slow=True, saves=True),
    Tool("TensorBoard", "plain", "tensorboard", ("tensorboard",), reader="events"),
    Tool("W&B, offline", "plain", "wandb", ("wandb",), reader="wandb", server=True),
    Tool("MLflow, SQLite", "plain", "mlflow", ("mlflow-skinny",), reader="mlflow", server=True),
    Tool("Trackio", "plain", "trackio", ("trackio",), reader="trackio", environment="trackio", server=True),
    Tool("Aim", "plain", "aim", ("aim",), reader="aim", environment="aim", server=True),
    Tool("TraceML", "traceml", "", ("traceml-ai",), reader="traceml", environment="traceml-ai"),
    Tool("PyTorch `async_save`", "async_save", "", ("torch",), saves=True),
]
for _name, _host, _package, _loggers in (
    ("Lightning", "lightning", "lightning", {"`CSVLogger`": "csv", "`TensorBoardLogger`": "tensorboard"}),
    ("Transformers", "transformers", "transformers", {"TensorBoard": "tensorboard"}),
    ("Accelerate", "accelerate", "accelerate", {"TensorBoard tracker": "tensorboard"}),
    ("Composer", "composer", "mosaicml", {"`TensorboardLogger`": "tensorboard"}),
):
    _own, _alone = ("composer" if _host == "composer" else None), (_host, "alone")
    TOOLS += [
        Tool(_name, _host, "alone", (_package,), environment=_own, slow=_host != "accelerate", saves=True),
        *(
            Tool(
                f"{_name}, {logger}",
                _host,
                tool,
                (_package, *(["tensorboard"] if tool == "tensorboard" else [])),
                _alone,
                "csv" if tool == "csv" else "events",
                _own,
            )
            for logger, tool in _loggers.items()
        ),
        Tool(f"{_name}, offloop", _host, "offloop", (_package, "offloop"), _alone, "recording", _own, slow=True),
    ]


class Unmeasured(Exception):
    """A cell has no figure."""


class Outcome(NamedTuple):
    results: list[dict[str, Any]]
    code: int | None  # None if it was ended at its limit
    error: str
    steps: int
    end: float  # seconds from the start of the last step until the process exited


Cells = dict[str, list[float] | str | Unmeasured]
Pair = tuple[dict[str, Any], dict[str, Any]]  # the results of a training without and with the tool


class Environment:
    def __init__(self, distribution: str | None) -> None:
        self.bin, self.variables = Path(sys.prefix) / "bin", dict[str, str]()
        self.packages = [path for path in sys.path if path.endswith("site-packages")]
        if distribution == "composer":
            folder = Path(sys.prefix) / "composer"
            if not folder.is_dir():
                raise Unmeasured("not installed: make composer")
            self.variables, self.packages = {"PYTHONPATH": str(folder)}, [str(folder), *self.packages]
        elif distribution:
            folder = Path(sys.prefix) / "peers" / distribution
            self.bin = folder / "bin"
            if not (folder / "ready").exists():
                print(f"installing {distribution}", flush=True)
                self._install(distribution, folder)
            self.packages = [*map(str, folder.glob("lib/*/site-packages")), *self.packages]

    def _install(self, distribution: str, folder: Path) -> None:
        venv.create(folder, clear=True)
        (site,) = folder.glob("lib/*/site-packages")
        lines = (f"import site; site.addsitedir({path!r})\n" for path in self.packages)
        (site / "project.pth").write_text("".join(lines))
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", "--quiet"]
        pip += ["--constraint", str(HERE / "peers-requirements.txt"), distribution]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise Unmeasured(f"did not install: {last_line(done.stderr)}")
        (folder / "ready").touch()

    def versions(self, packages: tuple[str, ...]) -> str:
        found = []
        for name in packages:
            (one, *_) = metadata.distributions(name=name, path=self.packages)
            found.append(f"{name.removesuffix('-skinny')} {one.version.partition('+')[0]}")
        return ", ".join(found)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lines = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)] or lines
    # Without paths and ports of this machine.
    line = re.sub(r"(/[\w.+-]+){2,}", lambda path: path[0].rpartition("/")[2], lines[-1] if lines else "no message")
    return re.sub(r"127\.0\.0\.1:\d+", "server", line)[:160]


class Measurement:
    def __init__(self, tool: Tool, where: Path, quick: bool) -> None:
        self.tool, self.where, self.quick = tool, where, quick
        self.environment = Environment(tool.environment)
        self._orders = 0

    def run(self, jobs: list[Any], kill_at: int | None = None, **more: Any) -> Outcome:
        self._orders += 1
        where = self.where / str(self._orders)
        where.mkdir(parents=True)
        progress, results = where / "progress", where / "results"
        progress.write_bytes(bytes(PROGRESS.size))
        results.touch()
        order: dict[str, Any] = {"host": self.tool.host, "tool": self.tool.tool, "bare": self.tool.bare}
        order |= {"jobs": jobs, "sides": ["tool"], "server": None, "slow": False}
        order |= {"where": str(where / "w"), "progress": str(progress), "results": str(results), "save": False}
        order |= {"disk": None, **more}
        command = [str(self.environment.bin / "python"), str(TRAININGS), json.dumps(order)]
        if self.tool.host == "traceml" and order["sides"] == ["tool"]:
            command = [str(self.environment.bin / "traceml"), "run", "--logs-dir", str(Path(order["where"]) / "logs")]
            command += [str(TRAININGS), "--args", json.dumps(order)]
        if order["disk"]:
            mount = 'mount -t tmpfs -o size=64m tmpfs "$0" && exec "$@"'
            command = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, str(order["disk"]), *command]
        mark = f"{os.getpid()}-{id(self)}-{self._orders}"
        environment = {
            **os.environ,
            **self.environment.variables,
            MARK: mark,
            "HOME": str(where),
            "OMP_NUM_THREADS": "1",
        }
        environment |= {"WANDB_SILENT": "true", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        environment |= {"WANDB_BASE_URL": order["server"] or "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
        with (where / "out").open("wb") as out, progress.open("r+b") as file:
            view = mmap.mmap(file.fileno(), 0)
            process = subprocess.Popen(command, cwd=where, env=environment, stdout=out, stderr=out)
            latest = began = time.monotonic()
            try:
                while process.poll() is None and latest + PATIENCE > time.monotonic() < began + LIMIT:
                    pid, done, last = PROGRESS.unpack_from(view)
                    latest = max(latest, last)
                    if kill_at is not None and done >= kill_at:
                        os.kill(pid, signal.SIGKILL)
                        process.wait(timeout=PATIENCE)
                        # Other processes of the tool may still write.
                        settled = time.monotonic() + 5
                        while marked(mark) and time.monotonic() < settled:
                            time.sleep(0.1)
                        break
                    time.sleep(0.005)
                gone = time.monotonic()
                code = process.poll()
                _, done, last = PROGRESS.unpack_from(view)
            finally:
                for one in marked(mark):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(one, signal.SIGKILL)
                process.wait()
        lines = [json.loads(line) for line in results.read_text().splitlines()]
        return Outcome(lines, code, last_line((where / "out").read_text(errors="replace")), done, gone - last)

    def finished(self, outcome: Outcome) -> Outcome:
        if outcome.code is None:
            raise Unmeasured(f"no end within its time limit, at step {outcome.steps}")
        if outcome.code:
            raise Unmeasured(f"ended with {outcome.code}: {outcome.error}")
        return outcome

    def place(self, step: int, steps: int) -> str:
        return "before the first step" if step == 0 else "at the end" if step == steps else f"at step {step} of {steps}"

    def speeds(self, requested: Collection[str]) -> Cells:
        jobs = [[name, *length] for name, length in JOBS.items() if name == "tiny" or name in requested]
        if self.quick:
            jobs = [["tiny", 100, 1, 1, 0]]
        pairs: list[Pair] = []
        ends, added = [], []
        for _ in range(1 if self.quick else PROCESSES):
            results, end = self.in_turn(jobs)
            pairs += pairs_of(results)
            ends.append(end)
            # Of the process as it starts with the tool.
            first = [next(one for one in results if one["side"] == side) for side in ("bare", "tool")]
            added.append([first[1][name] - first[0][name] for name in ("threads", "memory", "others")])
        cells: Cells = {
            cell: [tool["speeds"][cell] / bare["speeds"][cell] for bare, tool in pairs if cell in tool["speeds"]]
            for names in SPEEDS.values()
            for cell in names
        }
        # The model's own time varies by more than a tool adds, in every other job.
        own = [tool["own"]["apart"] - bare["own"]["apart"] for bare, tool in pairs if "apart" in tool["own"]]
        by_name = dict(zip(("threads", "memory", "others"), map(list, zip(*added, strict=True)), strict=True))
        return {**cells, "thread": own, "end": ends, **by_name}

    def in_turn(self, jobs: list[Any]) -> tuple[list[dict[str, Any]], float]:
        """Return the results of trainings in turn, and the seconds of the end with the tool."""
        if self.tool.host != "traceml":
            outcome = self.finished(self.run(jobs, sides=["bare", "tool"]))
            return outcome.results, outcome.end
        results = []
        for turn in range(1 if self.quick else 3):
            for side in ("bare", "tool"):
                outcome = self.finished(self.run([[name, steps, 2, 2, 0] for name, steps, *_ in jobs], sides=[side]))
                results += [{**one, "turn": one["turn"] + 2 * turn} for one in outcome.results]
        return results, outcome.end

    def measure(self, cells: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        groups: tuple[tuple[tuple[str, ...], Callable[[], Cells]], ...] = (
            (("apart", "tiny", "medium", "thread", "end", "threads", "memory", "others"), lambda: self.speeds(cells)),
            (("slow",), lambda: {"slow": self.slow()}),
            (("hang",), lambda: {"hang": self.hang()}),
            (("disk",), lambda: {"disk": self.disk()}),
            (("killed",), lambda: {"killed": self.killed()}),
            (("100 MB",), lambda: {"100 MB": self.saved("100 MB")}),
            (("1 GB",), lambda: {"1 GB": self.saved("1 GB")}),
        )
        for names, function in groups:
            if not set(names) & set(cells):
                continue
            try:
                values = function()
            except Unmeasured as error:
                values = dict.fromkeys(names, error)
            except Exception as error:  # noqa: BLE001 - whatever a tool does costs its own cells
                values = dict.fromkeys(names, Unmeasured(f"{type(error).__name__}: {last_line(str(error))}"))
            for name in names:
                yield name, cell_of(values.get(name) or Unmeasured("not measured"))

    def slow(self) -> list[float]:
        if not self.tool.slow:
            raise Unmeasured("it does not run callbacks")
        outcome = self.finished(self.run([["medium", 40, 4, 6, 12]], slow=True, sides=["bare", "tool"]))
        return medium_speeds(outcome)

    def hang(self) -> list[float] | str:
        if not self.tool.server:
            raise Unmeasured("it logs to no server")
        with silent_server() as address:
            outcome = self.run([["medium", HUNG_STEPS, 4, 4, 0]], server=address, sides=["bare", "tool"])
        if outcome.code is None and not any(one["side"] == "tool" for one in outcome.results):
            return f"waits {self.place(outcome.steps, HUNG_STEPS)}: more than {PATIENCE:g} s"
        if outcome.code:
            return f"fails {self.place(outcome.steps, HUNG_STEPS)}: {outcome.error}"
        speeds = medium_speeds(outcome)
        end = f"{outcome.end:.0f} s" if outcome.code is not None else f"more than {outcome.end:.0f} s"
        return speeds if outcome.end < 3 else f"{statistics.median(speeds):.2f}, then {end} at the end"

    def disk(self) -> list[float] | str:
        if self.tool.reader is None:
            raise Unmeasured("it writes nothing")
        found = []
        for number in range(DISKS):
            disk = self.where / f"disk-{number}"
            disk.mkdir()
            outcome = self.run([["medium", 160, 1, 1, 0]], disk=str(disk), where=str(disk / "w"))
            if outcome.results and not outcome.code:
                before, after = outcome.results[0]["halves"]
                found.append(before / after)
            elif outcome.steps == 0:
                raise Unmeasured(f"did not start: {outcome.error}")
            elif outcome.code is None:
                return f"waits {self.place(outcome.steps, 160)}: more than {PATIENCE:g} s"
            else:
                return f"fails {self.place(outcome.steps, 160)}: {outcome.error}"
        return found

    def killed(self) -> list[float]:
        """Return for each kill the logged steps that the tool's reader does not find."""
        if self.tool.reader is None:
            raise Unmeasured("it writes nothing")
        started, folders = [], []
        for step in KILLED_AT:
            outcome = self.run([["medium", 4 * step, 1, 1, 0]], kill_at=step)
            if outcome.steps < step:
                raise Unmeasured(f"ended with {outcome.code} before it was killed: {outcome.error}")
            started.append(outcome.steps)
            folders.append(str(self.where / str(self._orders) / "w"))
        command = [str(self.environment.bin / "python"), str(TRAININGS), "--found", self.tool.reader, *folders]
        environment = {**os.environ, **self.environment.variables, "HOME": str(self.where)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        if done.returncode:
            raise Unmeasured(f"nothing could be read: {last_line(done.stderr)}")
        found = map(int, done.stdout.splitlines()[-1].split())
        # A step may be logged before the next one starts.
        return [float(max(0, steps - 1 - count)) for steps, count in zip(started, found, strict=True)]

    def saved(self, job: str) -> list[float]:
        """Return the seconds that each checkpoint adds."""
        if not self.tool.saves:
            raise Unmeasured("it saves no checkpoints of trainings")
        saves = 4 if job == "1 GB" else 8
        jobs = [[job, (saves + 1) * SAVE_EVERY - 1, 1, 1, 0]]
        bare, tool = self.finished(self.run(jobs, save=True, sides=["bare", "tool"])).results
        gaps, step = tool["gaps"], statistics.median(bare["gaps"])
        # From just before a save to just before the next.
        firsts = [number * SAVE_EVERY - 2 for number in range(2, saves + 1)]
        windows = [gaps[first : first + SAVE_EVERY] for first in firsts]
        return [sum(window) - len(window) * step for window in windows]


def cell_of(value: list[float] | str | Unmeasured) -> dict[str, Any]:
    if isinstance(value, Unmeasured):
        return {"none": str(value)}
    if isinstance(value, str):
        return {"text": value}
    low, high = quartiles(value)
    return {"value": statistics.median(value), "low": low, "high": high, "rounds": value}


def pairs_of(results: list[dict[str, Any]]) -> list[Pair]:
    by_key: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for one in results:
        if not one["warms_up"]:
            by_key.setdefault((one["job"], one["turn"]), {})[one["side"]] = one
    return [(sides["bare"], sides["tool"]) for sides in by_key.values() if len(sides) == 2]


def medium_speeds(outcome: Outcome) -> list[float]:
    return [tool["speeds"]["medium"] / bare["speeds"]["medium"] for bare, tool in pairs_of(outcome.results)]


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    connections = []
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connections.append(server.accept())

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def measure_tool(
    report: Report, where: Path, measured: dict[str, Any], quick: bool, cells: list[str], tool: Tool
) -> None:
    row: dict[str, Any] = {"cells": {}}
    report.details = measured
    measured["tools"][tool.name] = row
    try:
        measurement = Measurement(tool, where, quick)
        row["versions"] = measurement.environment.versions(tool.packages)
    except Exception as error:  # noqa: BLE001 - a tool that does not install costs its own row
        row["failed"] = last_line(str(error))
        print(f"{tool.name}: {row['failed']}", flush=True)
        return
    print(f"{tool.name}: {row['versions']}", flush=True)
    for name, cell in measurement.measure(cells):
        row["cells"][name] = cell
        if "value" in cell:
            goal = GOALS.get(name) if "offloop" in tool.name else None
            at_least = CELLS[name].unit == "x"
            report.add(f"{tool.name}: {name}", cell["rounds"], CELLS[name].unit, goal, at_least=at_least)
        else:
            print(f"{tool.name}: {name}: {cell.get('text') or cell['none']}", flush=True)


def main() -> None:
    parts = {
        re.sub("[^a-z0-9]+", "-", tool.name.lower()).strip("-"): functools.partial(measure_tool, tool=tool)
        for tool in TOOLS
    }
    parser = argument_parser(__doc__, parts)
    parser.add_argument("--jobs", metavar="NAME[,NAME]", help=f"columns to measure: {', '.join(CELLS)}")
    parser.add_argument("--docs", type=Path, metavar="FOLDER", help="write the page and the README in FOLDER")
    options = parser.parse_args()
    cells = options.jobs.split(",") if options.jobs else ["apart", "tiny"] if options.quick else list(CELLS)
    if unknown := set(cells) - set(CELLS):
        parser.error(f"invalid --jobs {', '.join(sorted(unknown))}: allowed are {', '.join(CELLS)}")
    measured: dict[str, Any] = {
        "machine": machine().rpartition(", ")[0],
        "date": time.strftime("%Y-%m-%d"),
        "tools": {},
    }
    try:
        run("peers", parts, options, measured, options.quick, cells)
    finally:
        if options.docs and len(measured["tools"]) == len(parts):
            (options.docs / "docs" / comparison.PICTURE).write_text(comparison.picture(measured))
            comparison.write(options.docs / "docs" / "performance.md", comparison.generated(measured))
            comparison.write(options.docs / "README.md", comparison.summary(measured))


if __name__ == "__main__":
    main()
