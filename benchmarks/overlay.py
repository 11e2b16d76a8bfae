"""The page of many runs: seconds until it is drawn, and frames a second while one of its charts is zoomed.

The browser is a headless Chromium on the same machine, without a GPU. Each frame has one step of the wheel."""

import random
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlencode

import psutil
from common import Report, argument_parser, run
from dashboard import LOSS, home, pages

from offloop.bus import Event

SUPPORT = Path(__file__).parent.parent / "tests" / "support"
RUNS = 50
CHARTS = 6
VIEW = {"width": 1400, "height": 1000}
FRAME_MILLISECONDS = 1000 / 60
LATE = 1.05  # a frame is in time within this many intervals after the last one: clocks are not exact
ARE_DRAWN = """([chart, runs, last]) => {
    const board = document.querySelector(".board");
    if (!board) return false;
    const lines = getElement(Number(board.id.slice(1))).pointsOf(chart);
    return lines.length === runs && lines.every((one) => one.x.at(-1) >= last);
}"""
# One step of the wheel in each frame: a second in, a second out. Returns the times between frames.
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


def record(where: Path, batches: int, runs: int = RUNS) -> None:
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
    code = f"import overlay, pathlib; overlay.record(pathlib.Path({str(where)!r}), {batches}, {runs})"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)
    return sorted(path.parent.name for path in where.glob("*/run.json"))


def address(url: str, names: list[str], find: str = "", **more: str) -> str:
    asked = [*(("run", name) for name in names), *more.items()]
    return f"{url}runs?{urlencode(asked)}#{urlencode({'find': find})}"


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def browser_seconds() -> float:
    times = [one.cpu_times() for one in psutil.Process().children(recursive=True) if "chrom" in one.name()]
    return sum(one.user + one.system for one in times)


def measure_zoom(report: Report, where: Path, quick: bool) -> None:
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


PARTS = {"zoom": measure_zoom}

if __name__ == "__main__":
    run("overlay", PARTS, argument_parser(__doc__, PARTS).parse_args())
