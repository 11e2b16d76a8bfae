"""The web dashboard: seconds from the command to a page, milliseconds to draw and zoom a chart, cost for a training.

The training runs with and without ``offloop ui`` and three browsers. These are headless Chromium on the same machine
without a GPU. Beside a training they run with SCHED_IDLE (Chromium resets ``nice``): on few cores they would take time
that browsers on other machines do not take. They still share caches and wake-ups, so the training thread's own time is
reported too."""

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

from offloop.bus import Event, Publisher

CHROMIUM = shutil.which(os.environ.get("CHROMIUM", "chromium"))
LOSS = "loss/train/total"
LAST_IN_LINE = "echo 19 2>/dev/null >/proc/self/autogroup"
"""With automatic groups the kernel gives each session the same share, whatever its scheduling class."""
SETTLE_SECONDS = 3  # until a new browser has finished its start
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
    from playwright.sync_api import sync_playwright

    if not browser_path:
        raise SystemExit("chromium not found: apt-get install chromium, or set CHROMIUM to a browser like it")

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--headless=new", "--no-sandbox"])
        yield [browser.new_page() for _ in range(count)]
        browser.close()


@contextlib.contextmanager
def serve(*command: str) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Run a command that serves a page; yields the page's address."""
    process = subprocess.Popen([sys.executable, "-m", *command], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        address = next((line.split()[1] for line in process.stderr if line.startswith("dashboard: ")), None)
        if address is None:
            raise SystemExit("the command ended without a page")
        yield address, process
    finally:
        process.kill()
        process.communicate()


def home(where: Path) -> contextlib.AbstractContextManager[tuple[str, "subprocess.Popen[str]"]]:
    return serve("offloop", "ui", str(where), "--port", "0")


def measure_page(report: Report, where: Path, quick: bool) -> None:
    events, rounds = (1_000, 1) if quick else (100_000, 5)
    recording = record(where, "page", events)
    drawn, served = [], []
    for number in report.rounds("page", rounds):
        with pages(1) as (page,):
            begin = time.perf_counter()
            options = ("--callbacks", "dashboard", "-o", "dashboard.port=0", "--replay", str(recording))
            with serve("offloop.consumers", *options) as (url, _):
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
    rounds = 2 if quick else 20
    if not quick:
        page.wait_for_timeout(1000 * SETTLE_SECONDS)
    drawn = page.evaluate(DRAW, [LOSS, rounds])
    parts = [[events * 0.02 * step, events * (0.5 + 0.02 * step)] for step in range(1, rounds + 1)]
    first, finer = zip(*(page.evaluate(ZOOM, [LOSS, part]) for part in parts), strict=True)
    report.add(f"drawing a chart of {events:,} batches", drawn, "ms", 16)
    report.add(f"a zoom into {events:,} batches, first picture", first, "ms", 100)
    report.add(f"a zoom into {events:,} batches, finer points drawn", finer, "ms", 500)


def train(where: Path, batches: int, watched: bool) -> tuple[float, float]:
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
    batches, rounds = (20, 1) if quick else (1000, 3)
    alone, watched = [], []
    for _ in report.rounds("training", rounds):
        alone.append(train(where, batches, watched=False))
        watched.append(train(where, batches, watched=True))
    report.add("training, nobody watching", [speed for speed, _ in alone], "batches/s")
    for place, what in enumerate(("by the clock", "the training thread's own time")):
        speeds = ratios((one[place] for one in watched), (one[place] for one in alone))
        report.add(f"with offloop ui and three browsers / nobody, {what}", speeds, "x", 0.98, at_least=True)


PARTS = {"page": measure_page, "training": measure_training}

if __name__ == "__main__":
    run("dashboard", PARTS, argument_parser(__doc__, PARTS).parse_args())
