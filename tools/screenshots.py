"""Makes the pictures of the web pages in ``docs/images``: ``python tools/screenshots.py [NAME ...]``.

Trains small networks for some minutes, then takes a picture of each view, or of the named ones. ``--runs DIR`` keeps
the runs there, and uses those that exist."""

import argparse
import io
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

EXAMPLES = Path(__file__).parents[1] / "examples"
IMAGES = Path(__file__).parents[1] / "docs" / "images"
CHROMIUM = shutil.which(os.environ.get("CHROMIUM", "chromium"))
LARGEST = 200_000
RATES, SEEDS = ("0.003", "0.001", "0.0003"), ("1", "2", "3", "4")
LIVE = "digits-long"
ACCURACY = "metrics/eval/MulticlassAccuracy"
PLOTS = "document.querySelectorAll('[data-plot]').length > 1"  # plots below the visible part are not drawn
ROWS = "document.querySelectorAll('tbody .name a').length > 5"


def runs_at(*names: str) -> str:
    return "runs?" + "&".join(f"run={name}" for name in names)


class View(NamedTuple):
    name: str
    address: str  # relative to the address of the table of all runs
    wait: str  # JavaScript that is true when everything is drawn
    height: int = 860
    scheme: Literal["light", "dark"] = "light"
    act: str = ""  # JavaScript, once everything is drawn


# The same prompt in two runs.
ACT = """async () => {
    const wait = () => new Promise((done) => setTimeout(done, 1500));
    document.querySelector(".tables").closest(".panel").scrollIntoView();
    await wait();
    [...document.querySelectorAll(".tables-row")].find((row) => row.innerText.includes("sums-1")).click();
    await wait();
    document.querySelector(".tables-same").click();
    await wait();
    const select = document.querySelector(".tables-detail select");
    select.value = "1";
    select.dispatchEvent(new Event("change"));
    await wait();
    document.querySelector(".tables-scroll").scrollTop = 1e6;
    await wait();
    [...document.querySelectorAll(".tables-row")].filter((row) => row.innerText.includes("sums-1")).at(-1).click();
}"""
OPENED = """async () => {
    document.querySelector(".tables").closest(".panel").scrollIntoView();
    await new Promise((done) => setTimeout(done, 1500));
    document.querySelector(".tables-scroll").scrollTop = 1e6;
    await new Promise((done) => setTimeout(done, 1500));
    [...document.querySelectorAll(".tables-row")].at(-1).click();
}"""
COMPARED = [f"digits-{rate}-seed-1" for rate in RATES]
GROUPED = [f"digits-{rate}-seed-{seed}" for rate in RATES for seed in SEEDS]
VIEWS = (
    View("runs", f"#sort=-{ACCURACY}.best&run=digits-0.003-seed-1&run=digits-0.003-seed-2", ROWS, 760),
    View("scatter", "#view=scatter", "!!document.querySelector('.home canvas')", 760),
    View("run", f"{runs_at(LIVE)}#smoothing=0.3", PLOTS, 1250),
    View("compare", f"{runs_at(*COMPARED)}#smoothing=0.3", PLOTS, scheme="dark"),
    View("groups", f"{runs_at(*GROUPED)}&group=config/lr", PLOTS),
    View("grpo", runs_at("grpo"), "document.querySelector('.tables')", 640, act=OPENED),
    View("tables", runs_at("sums-1", "sums-2"), "document.querySelector('.tables')", 640, act=ACT),
)


def trainer(*arguments: str) -> "subprocess.Popen[str]":
    """Start a training, by a command without paths of this machine, which the pages show."""
    code = "import sys; from offloop.commands import trainer; sys.argv[0] = 'trainer'; trainer()"
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True)


def train(runs: Path) -> None:
    from offloop.bus.index.annotations import annotate

    for rate in RATES:
        for seed in SEEDS:
            name = f"digits-{rate}-seed-{seed}"
            if not (runs / name).exists():
                options = ("--run-name", name, "--lr", rate, "--seed", seed, "--no-progress")
                trainer("digits", "--max-duration", "3ep", *options).communicate()
    annotate(runs / "digits-0.001-seed-1", add=["baseline"], note="what we had before", pinned=True)
    annotate(runs / "digits-0.003-seed-2", add=["baseline", "paper"])


def sample() -> None:
    """Publish tables as two trainings with rewards would, of a made-up policy that learns to add."""
    from offloop.bus import Event, Publisher

    for number, talent in enumerate((1.0, 0.1), 1):
        chance = random.Random(number)
        with Publisher(f"sums-{number}") as publisher:
            publisher.publish(Event.FIT_START, max_duration="40ba")
            for step in range(40):
                rows = []
                for _ in range(16):
                    first, second = chance.randrange(10, 14), chance.randrange(3, 6)
                    is_right = chance.random() < 0.2 + talent * step / 55
                    total = first + second + (0 if is_right else chance.choice((-2, -1, 1, 10)))
                    steps = [f"{first} + {one} = {first + one}" for one in range(1, second)]
                    text = "\n".join(["<think>", "I count up.", *steps, "</think>", f"The answer is {total}."])
                    prompt = f"What is {first} plus {second}? Think first, then answer in one sentence."
                    rows.append(
                        {"prompt": prompt, "completion": text, "reward": float(is_right), "tokens": len(text) // 3}
                    )
                publisher.log_table("completions", rows, step=step)
                reward = sum(row["reward"] for row in rows) / len(rows)
                publisher.publish(Event.BATCH_END, batch=step + 1, sample=16 * (step + 1), loss=1 - reward)


@contextmanager
def training(runs: Path) -> Iterator[None]:
    shutil.rmtree(runs / LIVE, ignore_errors=True)
    options = ("--run-name", LIVE, "--seed", "1", "--no-progress")
    process = trainer("digits", "--max-duration", "400ep", *options)
    try:
        yield
    finally:
        process.terminate()
        process.communicate()


@contextmanager
def served(runs: Path) -> Iterator[str]:
    arguments = [sys.executable, "-m", "offloop", "ui", "--port", "0", "--every", "2", str(runs)]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"dashboard: (\S+)", line):
                yield found.group(1)
                break
        else:
            raise SystemExit("the page ended")
    finally:
        process.terminate()
        process.communicate()


def save(page: Page, path: Path) -> None:
    # In as many colours as the size limit allows.
    whole = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    few = (whole.quantize(count, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE) for count in (256, 128, 64))
    for one in (whole, *few):
        one.save(path, optimize=True)
        if path.stat().st_size < LARGEST:
            return
    raise SystemExit(f"{path} has {path.stat().st_size:,} bytes")


def picture(browser: Browser, url: str, view: View) -> None:
    size = {"width": 1440, "height": view.height}
    with browser.new_context(color_scheme=view.scheme, viewport=size) as context:
        page = context.new_page()
        page.goto(url + view.address)
        page.wait_for_function(view.wait, timeout=120_000)
        page.wait_for_timeout(2500)
        if view.act:
            page.evaluate(view.act)
            page.wait_for_timeout(1500)
        save(page, IMAGES / f"{view.name}-{view.scheme}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path)
    parser.add_argument("names", nargs="*", choices=[[], *(view.name for view in VIEWS)], metavar="NAME")
    given = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    with ExitStack() as opened:
        runs = given.runs or Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="ol-", dir="/tmp")))
        os.environ["OFFLOOP_RUNS_DIR"] = str(runs)
        train(runs)
        if not (runs / "sums-2").exists():
            sample()
        if not (runs / "grpo").exists():
            with tempfile.TemporaryDirectory() as folder:
                subprocess.run([sys.executable, EXAMPLES / "grpo.py"], check=True, cwd=folder)
        opened.enter_context(training(runs))
        url = opened.enter_context(served(runs))
        playwright = opened.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--headless=new", "--no-sandbox"])
        with browser.new_context() as context:
            page = context.new_page()
            page.goto(f"{url}#find=status+%3D%3D+live")
            page.wait_for_function("/epoch ([5-9]|[1-9]\\d)/.test(document.body.innerText)", timeout=180_000)
        for view in VIEWS:
            if not given.names or view.name in given.names:
                picture(browser, url, view)
        browser.close()


if __name__ == "__main__":
    main()
