"""What the page shows beside lines: ranks, phases, images and texts, in whatever form they come; and the buttons."""

import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from browser import Visit, commanded, visit
from helpers import wait_for
from playwright.sync_api import Page

from offloop.bus import Event, Publisher
from offloop.bus.runs.directory import find_run

pytestmark = pytest.mark.timeout(180)

MARKUP = "<img src=x onerror='hacked=1'><script>hacked=1</script>{{7*7}}\"'"
CONSUMER = (sys.executable, "-m", "offloop.consumers", "-o", "dashboard.port=0", "--log", "")
MILLISECOND = 1_000_000

CALLBACK = textwrap.dedent("""
    import numpy as np
    from offloop.consumers import Callback

    class Odd(Callback):
        def fit_start(self, state, logger):
            grey, rgb = np.zeros((1, 4, 6)), np.full((3, 8, 8), 200, dtype=np.uint8)
            grey[0, 0, 0], grey[0, 1, 1] = np.nan, np.inf
            logger.log_images([grey] * 10, name=MARKUP)
            logger.log_images(rgb, name="colour")
            logger.log_text(MARKUP, name=MARKUP)
            logger.log_metrics({MARKUP: 0.25, "__proto__/polluted": 1.0})

        def batch_end(self, state, logger):
            batch = int(state.timestamp.batch)
            logger.log_images(np.full((3, 5, 5), 8 * batch, np.uint8), name="__proto__")
            if batch % 2:
                logger.log_images([np.full((2, 2), batch / 58)] * 2, name="maps")
""").replace("class Odd", f"MARKUP = {MARKUP!r}\n\nclass Odd")


def spans(began: int, late: int) -> dict[str, object]:
    forward, backward = [0, 4 * MILLISECOND], [(4 + late) * MILLISECOND, 3 * MILLISECOND]
    told = [["data", 0, MILLISECOND], ["forward", *forward], ["backward", *backward], [MARKUP, 0, MILLISECOND]]
    return {"began": began, "spans": told, "device": False, "publishing": [20_000, 1]}


@pytest.fixture
def recording(runs_dir: Path) -> Path:
    with (
        Publisher("odd", world_size=2) as first,
        Publisher("odd", broker=first.address, rank=1, world_size=2) as second,
    ):
        told = {"optimizer": {"lr": 0.125}, MARKUP: MARKUP}
        first.publish(Event.FIT_START, max_duration="30ba", hyperparameters=told)
        for batch in range(1, 31):
            at = {"batch": batch, "sample": 8 * batch, "batch_size": 8, "loss": 1 / batch}
            began = 1_700_000_000_000 * MILLISECOND + 10 * batch * MILLISECOND
            first.publish(Event.BATCH_END, **at, phases=spans(began, 0))
            second.publish(Event.BATCH_END, **at, phases=spans(began, 2))
            # Ranks are compared in windows of a second.
            time.sleep(0.08)
        second.close()
        first.close("failed", error=MARKUP)
    return runs_dir / "odd" / "recording-1.mcap"


def pixels(there: Visit, name: str) -> list[list[int]]:
    code = """(name) => [...document.querySelectorAll(`section[aria-label="${name}"] img`)].map((image) => {
        if (!image.complete || !image.naturalWidth) return null;
        const canvas = document.createElement("canvas");
        canvas.width = canvas.height = 1;
        const context = canvas.getContext("2d");
        context.drawImage(image, 0, 0);
        return [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)];
    })"""
    return list(there.page.evaluate(code, name))


OUTSIDE_ITS_CARD = """[...document.querySelectorAll('.chart .value')].filter(
    (one) => one.getBoundingClientRect().right > one.closest('.chart').getBoundingClientRect().right).length"""


def hacked(page: Page) -> bool:
    """Whether a script that came with the run has run, or an element that came with it is on the page."""
    code = "'hacked' in window || 'polluted' in {} || !!document.querySelector('img[src=x]')"
    return bool(page.evaluate(code))


def test_ranks_phases_and_images_of_every_step_are_drawn_and_names_stay_text(recording, tmp_path, browser):
    (tmp_path / "odd.py").write_text(CALLBACK)
    callbacks = f"dashboard,{tmp_path / 'odd.py'}:Odd"
    with commanded(*CONSUMER, "--callbacks", callbacks, "--replay", str(recording)) as served:
        served.has_said("stays at")
        with visit(browser, served.url, viewport={"width": 1280, "height": 3000}) as there:
            page = there.page
            asked: list[str] = []
            page.on("request", lambda request: asked.append(request.url))
            there.waits_for(lambda: len(there.points("loss/train/total")) == 30, "the losses")
            there.waits_for(lambda: there.drawn("phases/0"), "phases")
            assert page.evaluate(OUTSIDE_ITS_CARD) == 0
            page.locator('[data-chart="phases/0"] select').select_option("1")
            assert there.points(MARKUP) == [(0, 0.25)]
            ranks = page.get_by_role("table", name="Ranks").get_by_role("row")
            there.waits_for(lambda: ranks.count() == 3, "a row of each rank")
            page.get_by_label(
                "Time of a step by phase, run odd, rank 1. Latest: data 1 ms, forward 4 ms, backward 3 ms"
            ).wait_for()
            assert page.url.endswith("#rank=1")
            page.wait_for_function(
                "[...document.querySelectorAll('figure img')].filter(i => i.naturalWidth).length == 12"
            )
            sizes = "[...document.querySelectorAll('figure img')].map(i => [i.naturalWidth, i.naturalHeight])"
            assert sorted(page.evaluate(sizes)) == [[2, 2]] * 2 + [[5, 5]] + [[6, 4]] * 8 + [[8, 8]]
            there.sees("8 of 10")
            page.get_by_text("Hyperparameters").click()
            for text in ("optimizer/lr", "0.125"):
                page.get_by_role("cell", name=text, exact=True).wait_for()
            odd = page.get_by_role("cell", name=MARKUP)
            assert odd.count() == 2
            assert page.locator(".run-problem").inner_text() == MARKUP
            log = page.locator(".log").inner_text()
            assert f"{MARKUP}: {MARKUP}" in log
            assert "text: " not in log
            for chart in (MARKUP, "phases/0"):
                box = page.locator("[data-plot]").filter(visible=True)
                place = next(one for one in box.all() if one.get_attribute("data-plot") == chart).bounding_box()
                assert place is not None
                page.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
                page.locator(".chart-tip").wait_for()
            page.get_by_role("button", name="Keyboard shortcuts").click()
            there.sees("next x axis")
            page.keyboard.press("Escape")
            page.get_by_role("dialog").wait_for(state="hidden")
            there.waits_for(lambda: pixels(there, "__proto__") == [[240] * 3], "the newest image")
            slider = page.get_by_label("Step of __proto__")
            slider.focus()
            page.keyboard.press("ArrowLeft")
            there.waits_for(lambda: slider.get_attribute("aria-valuetext") == "batch 29", "the step in words")
            there.waits_for(lambda: pixels(there, "__proto__") == [[232] * 3], "the one before")
            page.keyboard.press("Home")
            there.waits_for(lambda: pixels(there, "__proto__") == [[8] * 3], "the first")
            assert pixels(there, "maps") == [[128] * 3] * 2, "other names stay where they are"
            assert not [url for url in asked if "step=15" in url and "__proto__" in url], "not those between"
            page.get_by_role("button", name="Newest of __proto__").click()
            there.waits_for(lambda: pixels(there, "__proto__") == [[240] * 3], "the newest again")
            assert not hacked(page)
            page.get_by_role("link", name="all runs").click()
            page.get_by_role("link", name="odd", exact=True).click()
            page.get_by_role("article", name="Run odd", exact=True).wait_for()


@pytest.mark.timeout(400)
def test_pause_resume_checkpoint_and_stop_say_what_became_of_them(runs_dir, tmp_path, browser):
    train = ("--max-duration", "100000ep", "--run-name", "obedient", "--save-folder", str(tmp_path), "--no-progress")
    training = subprocess.Popen([sys.executable, "-m", "offloop.trainer", "digits", *train], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: (runs_dir / "obedient" / "run.json").exists(), "the run", 200)
        wait_for(lambda: find_run("obedient").live, "the broker")
        dashboard = commanded(*CONSUMER, "--callbacks", "dashboard", "--run", "obedient")
        with dashboard as served, visit(browser, served.url, color_scheme="dark") as there:
            there.waits_for(lambda: len(there.points("loss/train/total")) > 5, "points")

            def press(name: str) -> None:
                there.page.get_by_role("button", name=name, exact=True).click()
                done = re.compile(f"'{name}' (took effect|wrote .*) at batch")
                there.page.locator(".run-answer", has_text=done).wait_for()

            there.page.get_by_label("Learning rate of obedient").fill("0.125")
            there.page.get_by_role("button", name="set lr").click()
            there.sees("'set lr 0.125' took effect")
            press("checkpoint")
            wait_for(lambda: any(path.is_file() for path in tmp_path.rglob("*")), "a checkpoint")
            press("pause")
            there.page.locator(".status-paused").wait_for()
            there.page.reload()
            there.page.locator(".status-paused").wait_for()
            before = there.waits_for(lambda: there.points("loss/train/total"), "points")[-1][0]
            press("resume")
            there.page.locator(".status-live").wait_for()
            there.waits_for(lambda: there.points("loss/train/total")[-1][0] > before + 5, "batches after the pause")
            for name in ("checkpoint", "pause", "resume"):
                there.page.locator(
                    ".log .command", has_text=re.compile(f"'{name}' .*web page.* (took effect|wrote)")
                ).first.wait_for()
            # Legible on dark.
            for name, color in (("pause", "rgb(108, 182, 255)"), ("stop", "rgb(255, 143, 132)")):
                button = there.page.get_by_role("button", name=name, exact=True)
                assert button.evaluate("one => getComputedStyle(one).color") == color
            there.page.get_by_role("button", name="stop", exact=True).click()
            there.page.get_by_role("button", name="Keep training").click()
            there.page.get_by_role("button", name="Keep training").wait_for(state="hidden")
            assert training.poll() is None
            there.page.get_by_role("button", name="stop", exact=True).click()
            there.page.get_by_role("button", name="Stop", exact=True).last.click()
            there.page.locator(".status-stopped").wait_for()
            # What was planned is not what was reached.
            assert re.match(r"epoch [\d,]+ of 100,000 · batch [\d,]+ · ", there.page.locator(".run-facts").inner_text())
            assert float(there.page.get_by_role("progressbar").get_attribute("aria-valuenow") or 100) < 50
    finally:
        training.terminate()
        training.wait(60)
