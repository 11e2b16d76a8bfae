"""Makes the pictures of the web pages in ``docs/images``: ``python tools/screenshots.py``.

Trains small networks for some minutes, with a headless Chromium looking on."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

IMAGES = Path(__file__).parents[1] / "docs" / "images"
CHROMIUM = shutil.which(os.environ.get("CHROMIUM", "chromium"))
DESK = {"viewport": {"width": 1280, "height": 900}}
WIDE = {"viewport": {"width": 1440, "height": 760}}
TALL = {"viewport": {"width": 1280, "height": 1250}}
PHONE = {"viewport": {"width": 390, "height": 780}, "is_mobile": True, "has_touch": True, "device_scale_factor": 1.5}


def command(module: str, *arguments: str) -> "subprocess.Popen[str]":
    """Starts one of the project's commands."""
    return subprocess.Popen([sys.executable, "-m", module, *arguments], stderr=subprocess.PIPE, text=True)


def address(process: "subprocess.Popen[str]") -> str:
    """Where a dashboard is."""
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"dashboard: (\S+)", line):
            return found.group(1)
    raise SystemExit("the dashboard ended")


def picture(browser: Browser, url: str, name: str, scheme: str, keys: str, view: dict, wait: str) -> None:
    """Opens a page, waits, presses some keys, and keeps what is to be seen."""
    with browser.new_context(color_scheme=scheme, **view) as context:
        page = context.new_page()
        page.goto(url)
        page.wait_for_function(wait, timeout=120_000)
        for key in keys:
            page.keyboard.press(key)
        page.wait_for_timeout(2500)
        page.screenshot(path=str(IMAGES / name))


def served(name: str, *arguments: str) -> "subprocess.Popen[str]":
    """Starts a command that serves a page, at any free port."""
    code = f"from bus.terminal import run_command; from consumers.dashboard.web.command import {name} as served; "
    command = [sys.executable, "-c", code + "run_command(served)", "--port", "0", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def pictures_of_all_runs(browser: Browser) -> None:
    """The table of a dozen runs, one of them live, in three sizes."""
    from bus.index.annotations import annotate

    with tempfile.TemporaryDirectory(prefix="ol-", dir="/tmp") as runs:
        os.environ["OFFLOOP_RUNS_DIR"] = runs
        for rate in ("0.003", "0.001", "0.0003"):
            for seed in ("1", "2", "3", "4"):
                name = ("--run-name", f"digits-{rate}-seed-{seed}", "--lr", rate, "--seed", seed, "--no-progress")
                command("trainer", "digits", "--max-duration", "3ep", *name).communicate()
        annotate(Path(runs, "digits-0.001-seed-1"), add=["baseline"], note="what we had before", pinned=True)
        annotate(Path(runs, "digits-0.003-seed-2"), add=["baseline", "paper"])
        live = command("trainer", "digits", "--max-duration", "200ep", "--run-name", "digits-long", "--no-progress")
        page = served("ui", runs)
        url = address(page)
        shown = "document.querySelectorAll('tbody .name a').length == 13 && !!document.querySelector('.part')"
        sorted_by_it = "#sort=-metrics/eval/MulticlassAccuracy.best"
        chosen = "".join(f"&run=digits-0.003-seed-{seed}" for seed in (1, 2))
        picture(browser, url + sorted_by_it + chosen, "runs-light.png", "light", "", WIDE, shown)
        picture(browser, url + sorted_by_it, "runs-dark.png", "dark", "", WIDE, shown)
        columns = "".join(f"&column={name}" for name in ("status", "metrics/eval/MulticlassAccuracy.best", "config/lr"))
        picture(browser, url + sorted_by_it + columns, "runs-phone.png", "light", "", PHONE, shown.partition(" &&")[0])
        for process in (live, page):
            process.terminate()
            process.communicate()


def main() -> None:
    """Makes them all."""
    IMAGES.mkdir(exist_ok=True)
    drawn = "document.querySelectorAll('.plot canvas').length > 3"
    with tempfile.TemporaryDirectory(prefix="ol-", dir="/tmp") as runs, sync_playwright() as playwright:
        os.environ["OFFLOOP_RUNS_DIR"] = runs
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--headless=new", "--no-sandbox"])
        long = command("trainer", "digits", "--max-duration", "200ep", "--run-name", "digits", "--no-progress")
        options = ("-o", "dashboard.port=0", "-o", "dashboard.every=2", "--wait", "--run", "digits")
        consumer = command("consumers", "--callbacks", "dashboard,memory", *options)
        url = address(consumer)
        far = "/epoch ([5-9]|[1-9]\\d)/.test(document.body.innerText)"
        picture(browser, url, "dashboard-light.png", "light", "sss", TALL, f"{drawn} && {far}")
        picture(browser, url, "dashboard-phone.png", "light", "sss", PHONE, far)
        for process in (long, consumer):
            process.terminate()
            process.communicate()
        for seed in (1, 2, 3):
            other = ("--run-name", f"digits-seed-{seed}", "--seed", str(seed), "--no-progress")
            command("trainer", "digits", "--max-duration", "6ep", *other).communicate()
        names = [f"digits-seed-{seed}" for seed in (1, 2, 3)]
        page = served("dashboard", *names)
        finished = "document.querySelectorAll('.status-finished').length == 3"
        picture(browser, address(page), "dashboard-dark.png", "dark", "sssl", DESK, f"{drawn} && {finished}")
        page.terminate()
        page.communicate()
        pictures_of_all_runs(browser)
        browser.close()


if __name__ == "__main__":
    main()
