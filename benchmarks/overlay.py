"""What the page of many runs over one another takes: seconds until it shows them, frames a second while one of its
charts is zoomed, and the memory of the server and of the page, at first and after many frames of live runs.

The browser is a headless Chromium on the same machine, which draws without a GPU. Each frame has one more step of the
wheel."""

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import psutil
from common import Report, argument_parser, run, wait_until
from dashboard import CHROMIUM, LOSS, pages
from home import home

from offloop.bus import Event

SUPPORT = Path(__file__).parent.parent / "tests" / "support"
RUNS = 50
CHARTS = 6
VIEW = {"width": 1400, "height": 1000}
FRAME_MILLISECONDS = 1000 / 60
LATE = 1.05
"""A frame is in time that comes not later than this part of its interval after the one before: clocks are not exact."""
ARE_DRAWN = """([chart, runs, last]) => {
    const board = document.querySelector(".board");
    if (!board) return false;
    const lines = getElement(Number(board.id.slice(1))).pointsOf(chart);
    return lines.length === runs && lines.every((one) => one.x.at(-1) >= last);
}"""
# One step of the wheel in each frame: a second in, a second out. The times between frames, and those of the scripts.
WHEEL = """async ([id, frames]) => {
    const plot = document.querySelector(`[data-plot="${id}"]`);
    const target = plot.querySelector("canvas"), box = plot.getBoundingClientRect();
    const picture = () => new Promise((resolve) => requestAnimationFrame(resolve));
    const between = [], scripts = [];
    let before = await picture();
    for (let number = 0; number < frames; number++) {
        const given = {
            deltaY: number % 120 < 60 ? -12 : 12, ctrlKey: true, bubbles: true, cancelable: true,
            clientX: box.left + 0.6 * box.width, clientY: box.top + 0.5 * box.height,
        };
        const began = performance.now();
        target.dispatchEvent(new WheelEvent("wheel", given));
        const now = await picture();
        between.push(now - before);
        before = now;
    }
    return between;
}"""


# So many live runs, published until this process is ended.
LIVE = """
import sys, time
from offloop.bus import Event, Publisher
publishers = [Publisher(f"live-{number}") for number in range(int(sys.argv[1]))]
for number, publisher in enumerate(publishers):
    publisher.publish(Event.FIT_START, hyperparameters={"config": {"lr": 10.0 ** -number, "seed": number}})
batch = 0
while True:
    batch += 1
    for publisher in publishers:
        publisher.publish(Event.BATCH_END, batch=batch, sample=8 * batch, loss=1 / batch, lr={"SGD": [0.1]})
    time.sleep(0.02)
"""


def record(where: Path, batches: int, runs: int = RUNS) -> None:
    """Runs that are over, with five learning rates and ten seeds each."""
    sys.path.insert(0, str(SUPPORT))
    from run_folders import WrittenRun

    for number in range(runs):
        chance = random.Random(number)
        rate, seed = 10.0 ** -(number % 5), number // 5
        written = WrittenRun(where, f"rate-{rate:g}-seed-{seed}", {"config": {"lr": rate, "seed": seed}})
        for batch in range(1, batches + 1):
            loss = 2 * (1 + number % 5) / (1 + batch / 300) + chance.gauss(0, 0.1)
            metrics = {f"metric{one}": loss * one + chance.random() for one in range(1, CHARTS)}
            written.batch = batch
            written.send(Event.BATCH_END, {"loss": loss, "lr": {"SGD": [rate]}, "train_metrics": metrics})
        written.end()


def record_in_a_process(where: Path, batches: int, runs: int = RUNS) -> list[str]:
    """The same in a process that ends; returns the names of the runs."""
    code = f"import overlay, pathlib; overlay.record(pathlib.Path({str(where)!r}), {batches}, {runs})"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)
    return sorted(path.parent.name for path in where.glob("*/run.json"))


def address(url: str, names: list[str], find: str = "", **more: str) -> str:
    """The page of these runs, with the charts whose names have that text."""
    asked = [*(("run", name) for name in names), *more.items()]
    return f"{url}runs?{urlencode(asked)}#{urlencode({'find': find})}"


def quantile(values: list[float], share: float) -> float:
    """The value below which that share of them is."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def browser_seconds() -> float:
    """Processor time of all processes of the browser so far."""
    times = [one.cpu_times() for one in psutil.Process().children(recursive=True) if "chrom" in one.name()]
    return sum(one.user + one.system for one in times)


def measure_zoom(report: Report, where: Path, quick: bool) -> None:
    """Frames while a chart is zoomed, alone on the page and as one of six."""
    batches, frames = (300, 60) if quick else (4_000, 600)
    report.progress(f"recording {RUNS} runs")
    names = record_in_a_process(where, batches)
    with home(where) as (url, process), pages(1) as (page,):
        page.set_viewport_size(VIEW)
        for what, find in (("one chart", "total"), (f"one of {CHARTS} charts", "t")):
            begin = time.perf_counter()
            page.goto("about:blank")
            page.goto(address(url, names, find))
            page.wait_for_function(ARE_DRAWN, arg=[LOSS, len(names), batches - 1], timeout=120_000, polling=20)
            report.add(f"{what}: visit to {RUNS} runs drawn", time.perf_counter() - begin, "s")
            page.locator(f'[data-plot="{LOSS}"]').scroll_into_view_if_needed()
            page.wait_for_timeout(3000)
            report.progress(f"zooming {what}")
            began = browser_seconds()
            between = page.evaluate(WHEEL, [LOSS, frames])
            took = 1000 * (browser_seconds() - began) / frames
            in_time = sum(one < FRAME_MILLISECONDS * LATE for one in between) / len(between)
            report.add(f"{what}: from frame to frame, median", quantile(between, 0.5), "ms")
            report.add(f"{what}: from frame to frame, 95 % below", quantile(between, 0.95), "ms")
            report.add(f"{what}: processor time of the browser for a frame", took, "ms")
            report.add(f"{what}: frames in time", 100 * in_time, "%", 95, at_least=True)
        report.add("memory of the server", psutil.Process(process.pid).memory_info().rss / 2**20, "MiB")


@contextlib.contextmanager
def live_runs(where: Path, count: int) -> Iterator[None]:
    """So many trainings that go on."""
    settings = {**os.environ, "OFFLOOP_RUNS_DIR": str(where)}
    process = subprocess.Popen([sys.executable, "-c", LIVE, str(count)], env=settings)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def measure_memory(report: Report, where: Path, quick: bool) -> None:
    """Memory of the server and of the page, at first and after some minutes of frames, in groups and beside a
    baseline."""
    batches, live, minutes = (300, 2, 0.1) if quick else (20_000, 6, 5.0)
    report.progress(f"recording {RUNS - live} runs")
    names = record_in_a_process(where, batches, RUNS - live)
    with contextlib.ExitStack() as opened:
        opened.enter_context(live_runs(where, live))
        url, process = opened.enter_context(home(where))
        (page,) = opened.enter_context(pages(1))
        names += [f"live-{number}" for number in range(live)]
        wait_until(lambda: all((where / name / "run.json").exists() for name in names), "the live runs")
        page.set_viewport_size(VIEW)
        page.goto(address(url, names, "t", group="lr", singles="1", baseline=names[0]))
        page.wait_for_function(ARE_DRAWN, arg=[LOSS, len(names) + 5, 1], timeout=240_000, polling=100)
        page.wait_for_timeout(5000 if quick else 30_000)
        tools = page.context.new_cdp_session(page)
        tools.send("Performance.enable")

        def memory() -> tuple[float, float]:
            tools.send("HeapProfiler.collectGarbage")
            told = {one["name"]: one["value"] for one in tools.send("Performance.getMetrics")["metrics"]}
            return psutil.Process(process.pid).memory_info().rss / 2**20, told["JSHeapUsedSize"] / 2**20

        before = memory()
        report.progress(f"{minutes:g} minutes of frames")
        page.wait_for_timeout(60_000 * minutes)
        after = memory()
    for place, what in enumerate(("the server", "the page's objects")):
        report.add(f"memory of {what} with {RUNS} runs, {live} of them live", before[place], "MiB")
        report.add(f"memory of {what} after {minutes:g} minutes of frames", after[place], "MiB")


PARTS = {"zoom": measure_zoom, "memory": measure_memory}

if __name__ == "__main__":
    chosen = argument_parser(__doc__, PARTS).parse_args()
    if not CHROMIUM:
        raise SystemExit("chromium not found: apt-get install chromium, or set CHROMIUM to a browser like it")
    run("overlay", PARTS, chosen)
