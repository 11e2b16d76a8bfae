"""The page of all runs (``offloop ui``): seconds to read runs and show the table, milliseconds to filter and sort.

The runs are copies of a few recorded ones. The browser is a headless Chromium on the same machine."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from common import Report, argument_parser, run
from dashboard import home, pages

from offloop.bus import Event, Publisher
from offloop.bus.index.entry import STORED
from offloop.bus.index.index import RunIndex

DAY_SECONDS = 86_400
# Milliseconds from a change to the first picture of the server's answer.
UNTIL_DRAWN = """async (change) => {
    const home = getElement(Number(document.querySelector(".home").id.slice(1)));
    const box = document.querySelector(".table-box"), frame = home.frame, begin = performance.now();
    let isThere = false;
    home.frame = async (update) => {
        const number = await frame(update);
        isThere = true;
        return number;
    };
    new Function("home", "box", change)(home, box);
    while (!isThere && performance.now() < begin + 5000) await new Promise((resolve) => setTimeout(resolve));
    await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
    home.frame = frame;
    return performance.now() - begin;
}"""
FILTERS = (
    "lr > 0.01 and status == finished",
    "seed == 3",
    "rate-0.1",
    "metrics/eval/accuracy.best > 0.5 or width < 64",
)
COLUMNS = ("loss/train/total", "config/lr", "metrics/eval/accuracy.best", "duration", "run")


def record(where: Path, count: int) -> None:
    chance = random.Random(1)
    for number in range(count):
        lr, width = 10 ** chance.uniform(-4, 0), 2 ** chance.randrange(4, 11)
        config = {"lr": lr, "width": width, "seed": number % 5, **{f"option_{one}": one for one in range(40)}}
        name = f"rate-{lr:.3g}-{number}"
        with Publisher(name, runs_dir=where) as publisher:
            publisher.publish(Event.FIT_START, max_duration="20ba", hyperparameters={"config": config})
            for batch in range(1, 21):
                accuracy = 1 - 1 / (1 + batch * lr * width / 64)
                logged = {
                    "metrics/eval/accuracy": accuracy,
                    **{f"norm/layer{one}": one * accuracy for one in range(20)},
                }
                at = {"batch": batch, "sample": 8 * batch, "loss": 1 / batch + number % 11, "batch_size": 8}
                publisher.log(logged, batch)
                publisher.publish(Event.BATCH_END, **at)
            publisher.close("finished" if number % 7 else "failed")


def copy(sources: list[Path], where: Path, count: int) -> None:
    for number in range(count):
        source = sources[number % len(sources)]
        target = where / f"{source.name}-copy-{number}"
        target.mkdir()
        for file in source.iterdir():
            if file.name != "run.json" and file.is_file():
                os.link(file, target / file.name)
        about = json.loads((source / "run.json").read_text())
        for attempt in about["attempts"]:
            for name in ("started", "ended"):
                if attempt.get(name):
                    attempt[name] -= number * DAY_SECONDS / 50
        (target / "run.json").write_text(json.dumps(about))


def has_rows(page: Any, count: int) -> None:
    told = f"{count:,} runs"
    page.wait_for_function(
        "(told) => document.querySelector('.home-count')?.innerText === told && document.querySelector('tbody .name')",
        arg=told,
        timeout=60_000,
        polling=10,
    )


def page_heap(page: Any) -> float:
    tools = page.context.new_cdp_session(page)
    tools.send("HeapProfiler.enable")
    tools.send("HeapProfiler.collectGarbage")
    tools.send("Performance.enable")
    metrics = {one["name"]: one["value"] for one in tools.send("Performance.getMetrics")["metrics"]}
    return metrics["JSHeapUsedSize"] / 2**20


def measure_table(report: Report, where: Path, quick: bool) -> None:
    real, count, rounds = (8, 400, 1) if quick else (40, 10_000, 5)
    report.progress("recording")
    # In a process that exits: the index reads runs of a live publisher again each time.
    code = f"import home, pathlib; home.record(pathlib.Path({str(where)!r}), {real})"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)
    copy(sorted(path.parent for path in where.glob("*/run.json")), where, count - real)
    begin = time.perf_counter()
    with RunIndex(where) as index:
        assert index.refresh() == 0
        assert len(index.entries) == count
    report.add(f"reading {count:,} runs for the first time", time.perf_counter() - begin, "s")
    size = sum(file.stat().st_size for file in where.glob(f"*/{STORED}"))
    report.add("the index", size / 2**20, "MiB")
    started, opened = [], []
    found: dict[str, list[float]] = {what: [] for what in FILTERS}
    ordered: dict[str, list[float]] = {what: [] for what in COLUMNS}
    scrolled: list[float] = []
    memory: list[float] = []
    heap: list[float] = []
    for _ in report.rounds("page", rounds):
        with pages(1) as (page,):
            begin = time.perf_counter()
            with home(where) as (url, process):
                page.goto(url)
                has_rows(page, count)
                started.append(time.perf_counter() - begin)
                begin = time.perf_counter()
                page.goto("about:blank")
                page.goto(url)
                has_rows(page, count)
                opened.append(time.perf_counter() - begin)
                for what, times in found.items():
                    times.append(page.evaluate(UNTIL_DRAWN, f"home.settings.find = {json.dumps(what)};"))
                page.evaluate(UNTIL_DRAWN, "home.settings.find = '';")
                for what, times in ordered.items():
                    times.append(page.evaluate(UNTIL_DRAWN, f"home.settings.sort = {json.dumps(what)};"))
                for place in (0.2, 0.5, 0.99):
                    scrolled.append(page.evaluate(UNTIL_DRAWN, f"box.scrollTop = box.scrollHeight * {place};"))
                memory.append(psutil.Process(process.pid).memory_info().rss / 2**20)
                heap.append(page_heap(page))
    report.add(f"command to the table of {count:,} runs", started, "s")
    report.add(f"visit to the table of {count:,} runs", opened, "s", 1)
    for what, times in found.items():
        report.add(f"filter {what!r}", times, "ms", 200)
    for what, times in ordered.items():
        report.add(f"sort by {what}", times, "ms", 200)
    report.add("a jump in the table", scrolled, "ms", 200)
    report.add("memory of the command", memory, "MiB", 400)
    report.add("memory of the page's script", heap, "MiB", 100)


PARTS = {"table": measure_table}

if __name__ == "__main__":
    run("home", PARTS, argument_parser(__doc__, PARTS).parse_args())
