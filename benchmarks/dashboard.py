"""What the web dashboard takes: seconds from the command to a drawn page, milliseconds to draw and to zoom a chart of a
long run, seconds to load a long history, and the speed of a training with the page of all runs and three browsers
attached against none.

The browsers are headless Chromium on the same machine and draw without a GPU. Beside a training they only get the time
that nobody else wants (SCHED_IDLE; of ``nice`` Chromium rids itself), because otherwise they would take from it, on few
cores, what on people's desks they do not. They still share caches and wake-ups with it, so the training thread's own
time is told beside the clock's."""

import contextlib
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from common import Report, argument_parser, ratios, run

from offloop.bus import Event, Publisher, Recording
from offloop.consumers.dashboard.view.run_view import RunView

CHROMIUM = shutil.which(os.environ.get("CHROMIUM", "chromium"))
LOSS = "loss/train/total"
LAST_IN_LINE = "echo 19 2>/dev/null >/proc/self/autogroup"
"""A kernel with automatic groups gives each session the same share, whatever the scheduling class of those in it."""
SETTLE_SECONDS = 3
"""Until a browser that was just started has done what it does once."""
DRAWN = """([chart, last]) => {
    const canvas = document.querySelector(`[data-plot="${chart}"] canvas`);
    const board = document.querySelector(".board");
    if (!canvas || !board) return false;
    const lines = getElement(Number(board.id.slice(1))).pointsOf(chart);
    return lines.length > 0 && lines[0].x[lines[0].x.length - 1] >= last;
}"""
DRAW = """async ([chart, rounds]) => {
    const board = getElement(Number(document.querySelector(".board").id.slice(1)));
    const took = [];
    for (let round = 0; round < rounds; round++) {
        const begin = performance.now();
        board.draw(chart, true);
        await null;
        took.push(performance.now() - begin);
    }
    return took;
}"""
ZOOM = """async ([chart, range]) => {
    const board = getElement(Number(document.querySelector(".board").id.slice(1)));
    const picture = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
    const line = () => board.lines.get("batch").get(chart).get(0);
    const begin = performance.now(), before = line();
    board.zoom(range);
    await picture();
    const first = performance.now() - begin;
    while (line() === before) await new Promise((resolve) => setTimeout(resolve));
    await picture();
    return [first, performance.now() - begin];
}"""


def record(where: Path, name: str, events: int) -> Path:
    """A run of so many batches that is over, with a loss of which every part of the axis has extremes to keep; returns
    its recording."""
    with Publisher(name, runs_dir=where) as publisher:
        publisher.publish(Event.FIT_START, max_duration=f"{events}ba")
        for batch in range(1, events + 1):
            loss = 1 + math.sin(batch * batch) / 2
            publisher.publish(Event.BATCH_END, batch=batch, sample=8 * batch, loss=loss, lr={"SGD": [0.1]})
            if batch % 5000 == 0:
                publisher.wait()
    return where / name / "recording-1.mcap"


@contextlib.contextmanager
def pages(count: int, browser_path: str | None = CHROMIUM) -> Iterator[list]:
    """So many empty pages of a browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--headless=new", "--no-sandbox"])
        yield [browser.new_page() for _ in range(count)]
        browser.close()


@contextlib.contextmanager
def dashboard(*options: str) -> Iterator[str]:
    """``consumer --callbacks dashboard`` with these options; gives the page's address."""
    command = [
        sys.executable,
        "-m",
        "offloop.consumers",
        "--callbacks",
        "dashboard",
        "-o",
        "dashboard.port=0",
        *options,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("dashboard: "):
                yield line.split()[1]
                break
        else:
            raise SystemExit("the consumer ended without a dashboard")
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def home(where: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """``offloop ui`` of that folder; gives the page's address."""
    code = """
from offloop.bus.terminal import run_command
from offloop.consumers.dashboard.web.command import ui
run_command(ui)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(where), "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("dashboard: "):
                yield line.split()[1], process
                break
        else:
            raise SystemExit("the command ended without a page")
    finally:
        process.kill()
        process.communicate()


def measure_page(report: Report, where: Path, quick: bool) -> None:
    """Seconds from the command to a page that shows the last point."""
    events, rounds = (1_000, 1) if quick else (100_000, 5)
    recording = record(where, "page", events)
    drawn, served = [], []
    for number in report.rounds("page", rounds):
        with pages(1) as (page,):
            begin = time.perf_counter()
            with dashboard("--replay", str(recording)) as url:
                page.goto(url)
                page.wait_for_selector(".chart canvas", timeout=120_000)
                served.append(time.perf_counter() - begin)
                page.wait_for_function(DRAWN, arg=[LOSS, events - 1], timeout=120_000, polling=10)
                drawn.append(time.perf_counter() - begin)
                if number + 1 == rounds:
                    measure_fluency(report, page, events, quick)
    report.add(f"command to the first drawn chart, {events:,} events", served, "s")
    report.add(f"command to the whole history drawn, {events:,} events", drawn, "s", 10)


def measure_fluency(report: Report, page: Any, events: int, quick: bool) -> None:
    """Milliseconds of a browser for a chart of a long run: to draw it, and for a step of a zoom, at first from the
    points that it has, then with the finer ones that the server sends for that part."""
    rounds = 2 if quick else 20
    if not quick:
        page.wait_for_timeout(1000 * SETTLE_SECONDS)
    drawn = page.evaluate(DRAW, [LOSS, rounds])
    parts = [[events * 0.02 * step, events * (0.5 + 0.02 * step)] for step in range(1, rounds + 1)]
    first, finer = zip(*(page.evaluate(ZOOM, [LOSS, part]) for part in parts), strict=True)
    report.add(f"drawing a chart of {events:,} batches", drawn, "ms", 16)
    report.add(f"a zoom into {events:,} batches, first picture", first, "ms", 100)
    report.add(f"a zoom into {events:,} batches, finer points drawn", finer, "ms", 500)


def measure_history(report: Report, where: Path, quick: bool) -> None:
    """Seconds to read a long recording into what the dashboard draws from."""
    events = 10_000 if quick else 1_000_000
    report.progress(f"recording {events:,} events")
    recording = record(where, "history", events)
    report.progress(f"reading {events:,} events")
    view, begin = RunView("history"), time.perf_counter()
    for snapshot in Recording(recording):
        view.see(snapshot)
    loaded = time.perf_counter() - begin
    report.add(f"reading {events:,} events into the view", loaded, "s", 30)
    begin = time.perf_counter()
    view.names()
    points = view.series(LOSS).points(width=512)
    report.add(f"thinning the loss to {len(points.xs)} points", 1000 * (time.perf_counter() - begin), "ms")


def train(where: Path, batches: int, watched: bool) -> tuple[float, float]:
    """Batches a second of the training, by the clock and by its thread's own time, by itself or with ``offloop ui`` and
    three browsers: one looks at the table of all runs, two at the page of this one."""
    from hot_loop import fit
    from jobs import JOBS, make_trainer

    trainer = make_trainer(JOBS["medium MLP"], batches, where)
    with contextlib.ExitStack() as opened:
        if watched:
            url, _ = opened.enter_context(home(where))
            modest = where / "chromium"
            modest.write_text(f'#!/bin/sh\n{LAST_IN_LINE}; exec chrt --idle 0 {CHROMIUM} "$@"\n')
            modest.chmod(0o755)
            table, *others = opened.enter_context(pages(3, str(modest)))
            table.goto(url)
            table.get_by_role("link", name=trainer.state.run_name, exact=True).wait_for()
            for page in others:
                page.goto(f"{url}runs?run={trainer.state.run_name}")
                page.wait_for_selector(".run")
        time.sleep(SETTLE_SECONDS)
        own = time.thread_time()
        speed = fit(trainer, batches)
        own = time.thread_time() - own
    trainer.close()
    return speed, batches / own


def measure_training(report: Report, where: Path, quick: bool) -> None:
    """The ratio of the two speeds, in rounds that take turns."""
    batches, rounds = (20, 1) if quick else (1000, 3)
    alone, watched = [], []
    for _ in report.rounds("training", rounds):
        alone.append(train(where, batches, watched=False))
        watched.append(train(where, batches, watched=True))
    report.add("training, nobody watching", [speed for speed, _ in alone], "batches/s")
    for place, what in enumerate(("by the clock", "the training thread's own time")):
        speeds = ratios((one[place] for one in watched), (one[place] for one in alone))
        report.add(f"with offloop ui and three browsers / nobody, {what}", speeds, "x", 0.98, at_least=True)


PARTS = {"page": measure_page, "history": measure_history, "training": measure_training}

if __name__ == "__main__":
    chosen = argument_parser(__doc__, PARTS).parse_args()
    if not CHROMIUM:
        raise SystemExit("chromium not found: apt-get install chromium, or set CHROMIUM to a browser like it")
    run("dashboard", PARTS, chosen)
