"""The web dashboard in a real browser: what it shows of runs as they go on, and what can be done there."""

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Dashboard, Visit, commanded, running, ui_of, visit
from helpers import wait_for

from offloop.bus import Event, Publisher
from offloop.bus.runs.directory import find_run
from offloop.consumers.dashboard.web.page import FRAME_SECONDS, rest_after

pytestmark = pytest.mark.timeout(180)

LOSS = "loss/train/total"
LONG, PEAK, NAN = 20_000, 12_345, 15_000


def record(where: Path, name: str, losses: list[float], status: str = "finished") -> None:
    """A run that is over, with these losses, the first one at batch 0."""
    with Publisher(name, runs_dir=where, resume=True) as publisher:
        publisher.publish(Event.FIT_START, max_duration=f"{len(losses)}ba")
        for batch, loss in enumerate(losses, 1):
            publisher.publish(Event.BATCH_END, batch=batch, sample=8 * batch, loss=loss, batch_size=8)
        publisher.close(status)


@pytest.fixture(scope="module")
def served() -> Iterator[Dashboard]:
    """A page with four lines: a long run, a short one from its recording, and two attempts of a third."""
    where = Path(tempfile.mkdtemp(prefix="ol-", dir="/tmp"))
    losses = [2.0 - batch / LONG for batch in range(LONG)]
    losses[PEAK], losses[NAN] = 100.0, float("nan")
    record(where, "long", losses)
    record(where, "short", [3.0, 2.0, 1.0, float("inf"), 0.25])
    record(where, "again", [4.0, 3.0], "stopped")
    record(where, "again", [5.0, 4.0, 3.0, 2.0])
    recording = str(where / "short" / "recording-1.mcap")
    with ui_of("long", recording, "again", "--runs-dir", str(where)) as started:
        yield started
    shutil.rmtree(where)


def test_runs_recordings_and_attempts_are_drawn_over_one_another(served, browser):
    with visit(browser, served.url) as there:
        there.waits_for(lambda: [len(there.points(LOSS, run)) for run in range(1, 4)] == [5, 2, 4], "three lines")
        there.waits_for(lambda: there.points(LOSS)[-1][0] == LONG - 1, "the long one")
        for name in ("long", "short", "again #1", "again #2"):
            there.page.get_by_role("article", name=f"Run {name}", exact=True).wait_for()
        assert there.page.locator(".status-stopped").count() == 1
        before = there.pixels(LOSS)
        there.page.get_by_role("button", name="Lines of long").click()
        there.waits_for(lambda: there.pixels(LOSS) != before, "one line less")


def test_a_zoom_brings_finer_points_and_nothing_is_hidden_before(served, browser):
    with visit(browser, served.url) as there:
        there.waits_for(lambda: there.points(LOSS) and there.points(LOSS)[-1][0] == LONG - 1, "the whole run")
        whole = there.points(LOSS)
        assert len(whole) < LONG / 10
        assert [PEAK, 100.0] in [list(point) for point in whole]
        assert sorted(there.not_finite(LOSS)) == [[3, "inf"], [NAN, "NaN"]]
        there.sees("2 not finite")
        box = there.box(LOSS)
        there.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        there.page.keyboard.down("Control")
        for _ in range(12):
            there.page.mouse.wheel(0, -400)
            there.page.wait_for_timeout(60)
        there.page.keyboard.up("Control")

        def is_finer() -> bool:
            low, high = there.drawn(LOSS)["range"]
            inside = [x for x, _ in there.points(LOSS) if low <= x <= high]
            return high - low < LONG / 2 and 1.2 * len(whole) * (high - low) / LONG < len(inside)

        there.waits_for(is_finer, "more points of a part")
        there.page.locator(f'[data-plot="{LOSS}"]').press("0")
        there.waits_for(lambda: there.points(LOSS) == whole, "the whole run again")
        assert there.drawn(LOSS)["range"] == [0, LONG]


def test_drawing_over_a_chart_zooms_into_it_down_to_single_batches(served, browser):
    with visit(browser, served.url) as there:
        there.waits_for(lambda: there.points(LOSS) and there.points(LOSS)[-1][0] == LONG - 1, "the whole run")
        there.page.wait_for_timeout(300)
        for first, last in ((0.6, 0.65), (0.4, 0.45)):
            low, high = there.drawn(LOSS)["range"]
            box = there.box(LOSS)
            there.page.mouse.move(box["x"] + box["width"] * first, box["y"] + 60)
            there.page.mouse.down()
            there.page.mouse.move(box["x"] + box["width"] * last, box["y"] + 90, steps=5)
            there.page.mouse.up()
            there.waits_for(lambda low=low, high=high: _is_smaller(there.drawn(LOSS)["range"], low, high), "it")

        def shows_every_batch() -> bool:
            low, high = there.drawn(LOSS)["range"]
            inside = [x for x, _ in there.points(LOSS) if low <= x <= high]
            return len(inside) > 20 and len(inside) == inside[-1] - inside[0] + 1

        there.waits_for(shows_every_batch, "every single batch")


def _is_smaller(shown: list[float], low: float, high: float) -> bool:
    return low <= shown[0] < shown[1] <= high and shown[1] - shown[0] < (high - low) / 5


def test_a_chart_that_was_put_away_has_its_whole_history_when_it_is_back(served, browser):
    with visit(browser, served.url) as there:
        there.waits_for(lambda: there.points(LOSS) and there.points(LOSS)[-1][0] == LONG - 1, "the whole run")
        whole = there.points(LOSS)
        there.page.get_by_label("Find charts by name").fill("zz")
        there.waits_for(lambda: LOSS not in there.visible(), "the chart to be away")
        # Lines of other axes are sent meanwhile, each once.
        for axis in ("sample", "time", "batch"):
            there.page.get_by_role("button", name=axis, exact=True).click()
        there.page.get_by_label("Find charts by name").fill("total")
        # Alone it may be wider, and have more.
        there.waits_for(lambda: len(there.points(LOSS)) >= len(whole) and there.pixels(LOSS) > 0, "every point")
        assert [there.points(LOSS)[place] for place in (0, -1)] == [whole[place] for place in (0, -1)]


def test_axes_scales_and_filter(served, browser):
    with visit(browser, served.url) as there:
        there.waits_for(lambda: len(there.points(LOSS, 1)) == 5, "the runs")
        there.page.get_by_role("button", name="sample", exact=True).click()
        there.waits_for(lambda: [x for x, _ in there.points(LOSS, 1)] == [0, 8, 16, 24, 32], "samples")
        before = there.pixels(LOSS)
        there.page.keyboard.press("l")
        there.waits_for(lambda: there.pixels(LOSS) != before, "another scale")
        low, high = there.drawn(LOSS)["ends"]
        assert 0.1 < low <= 0.25 < 100 <= high < 200
        assert {"1", "10", "100"} <= set(there.drawn(LOSS)["texts"][1])
        assert there.page.get_by_text("Ranks", exact=True).is_hidden()
        there.page.get_by_label("Find charts by name").fill("no such metric")
        there.waits_for(lambda: there.page.locator(".chart").count() == 0, "no chart")
        there.sees("no chart is called 'no such metric'")


def test_the_theme_follows_the_system_and_can_be_chosen(served, browser):
    with visit(browser, served.url, color_scheme="dark") as there:
        there.page.locator("body.body--dark").wait_for()
        there.page.get_by_role("button", name="Theme: as the system has it").click()
        there.page.get_by_role("button", name="Theme: dark").click()
        there.page.locator("body:not(.body--dark)").wait_for()
        assert "theme" not in there.page.url
        there.page.goto("about:blank")
        there.page.goto(served.url)
        there.page.get_by_role("button", name="Theme: light").wait_for()
        there.page.locator("body:not(.body--dark)").wait_for()


def test_a_page_on_a_phone_fits_its_width(served, browser):
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    with visit(browser, served.url, **phone) as there:
        there.waits_for(lambda: len(there.points(LOSS, 1)) == 5, "the runs")
        assert there.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_keyboard_reaches_every_control_and_charts_have_words(served, browser):
    with visit(browser, served.url) as there:
        there.waits_for(lambda: len(there.points(LOSS, 1)) == 5, "the runs")
        there.page.get_by_role("heading", name="offloop training, as it happens", exact=True).wait_for()
        reached = set()
        for _ in range(60):
            there.page.keyboard.press("Tab")
            reached.add(there.page.evaluate("document.activeElement.closest('[aria-label]')?.ariaLabel || ''"))
        assert {"Keyboard shortcuts", "Smoothing", "Find charts by name", "Events and commands"} <= reached
        assert any(label.startswith(f"Chart of {LOSS} over batch") and "short: 0.25" in label for label in reached)
        there.page.keyboard.press("?")
        there.sees("next x axis")


def test_points_arrive_live_and_the_stop_button_stops_the_run(runs_dir, browser):
    command = (sys.executable, "-m", "offloop.consumers", "--callbacks", "dashboard", "-o", "dashboard.port=0")
    with running("live", pause=0.005) as run:
        wait_for(lambda: (runs_dir / "live" / "run.json").exists(), "the run")
        with commanded(*command, "--run", "live") as served, visit(browser, served.url, color_scheme="dark") as there:
            there.waits_for(lambda: len(there.points(LOSS)) > 20, "points")
            assert there.pixels(LOSS) > 0
            before = there.points(LOSS)[-1][0]
            there.waits_for(lambda: there.points(LOSS)[-1][0] > before, "later points")
            there.page.locator(".status", has_text="live").wait_for()
            # Legible on dark.
            for name, color in (("pause", "rgb(108, 182, 255)"), ("stop", "rgb(255, 143, 132)")):
                button = there.page.get_by_role("button", name=name, exact=True)
                assert button.evaluate("one => getComputedStyle(one).color") == color
            there.page.get_by_role("button", name="stop", exact=True).click()
            there.page.get_by_role("button", name="Keep training").click()
            there.page.get_by_role("button", name="Keep training").wait_for(state="hidden")
            assert run.process.poll() is None
            there.page.get_by_role("button", name="stop", exact=True).click()
            there.page.get_by_role("button", name="Stop", exact=True).click()
            assert "trained" in run.end()
            there.page.locator(".status-stopped").wait_for()
            there.sees("'stop' took effect at batch")
            served.has_said("stays at")
            assert served.leave() == 0


def test_a_broker_that_dies_is_survived_and_a_trainer_that_dies_is_lost(runs_dir, browser):
    with running("mortal") as run, ui_of("mortal", "--wait") as served, visit(browser, served.url) as there:
        there.waits_for(lambda: len(there.points(LOSS)) > 10, "points")
        wait_for(lambda: find_run("mortal").live, "the broker")
        os.kill(json.loads((runs_dir / "mortal" / "broker.json").read_text())["pid"], signal.SIGKILL)
        before = there.points(LOSS)[-1][0]
        there.waits_for(lambda: there.points(LOSS)[-1][0] > before + 300, "points of after that", timeout=60)
        there.page.locator(".status", has_text="live").wait_for()
        run.process.kill()
        there.page.locator(".status-lost").wait_for(timeout=30_000)
        assert not there.page.get_by_role("button", name="stop", exact=True).is_visible()


def test_a_run_is_waited_for_and_a_browser_that_goes_away_takes_nothing_along(runs_dir, browser):
    with ui_of("later", "--wait") as served, visit(browser, served.url) as stays:
        stays.page.locator(".status-waiting").wait_for()
        served.has_said("waiting for later")
        with running("later") as run:
            with visit(browser, served.url) as leaves:
                leaves.waits_for(lambda: len(leaves.points(LOSS)) > 5, "points")
            before = stays.waits_for(lambda: stays.points(LOSS), "points")[-1][0]
            stays.waits_for(lambda: stays.points(LOSS)[-1][0] > before + 100, "later points")
            assert run.process.poll() is None
            _hide(stays, True)

            def is_still() -> bool:
                before = stays.page.locator(".run-facts").inner_text()
                stays.page.wait_for_timeout(1500)
                return stays.page.locator(".run-facts").inner_text() == before

            stays.waits_for(is_still, "a page that is sent nothing while it is hidden")
            before = stays.points(LOSS)[-1][0]
            _hide(stays, False)
            stays.waits_for(lambda: stays.points(LOSS)[-1][0] > before + 100, "what came meanwhile")
        assert len(served.said) == 2, served.said


def test_a_slow_browser_gets_fewer_frames_and_the_newest_points_and_holds_up_nobody(runs_dir, browser):
    with contextlib.ExitStack() as opened:
        opened.enter_context(running("seen"))
        served = opened.enter_context(ui_of("seen", "--wait"))
        fast, slow = (opened.enter_context(visit(browser, served.url)) for _ in range(2))
        for there in (fast, slow):
            there.waits_for(lambda there=there: there.points(LOSS), "the chart")
            there.count_frames()
        slow.hold_frames(True)
        slow.waits_for(lambda: slow.counted()["begun"] > 0, "a frame that is never done")
        before = fast.counted()["begun"], slow.counted()["begun"]
        fast.waits_for(lambda: fast.counted()["begun"] >= before[0] + 2, "frames of the fast one", timeout=60)
        assert all(0 < times <= fast.counted()["begun"] for times in fast.counted()["set"].values()), "each chart once"
        after = fast.counted()["begun"], slow.counted()["begun"]
        assert after[0] - before[0] > after[1] - before[1]
        newest = fast.points(LOSS)[-1][0]
        slow.hold_frames(False)
        slow.waits_for(lambda: slow.points(LOSS)[-1][0] >= newest, "the newest points in the slow one", timeout=60)


def test_a_browser_that_draws_slowly_rests_between_frames_but_its_texts_come_twice_a_second(runs_dir, browser):
    with contextlib.ExitStack() as opened:
        opened.enter_context(running("calm"))
        served = opened.enter_context(ui_of("calm", "--wait"))
        there = opened.enter_context(visit(browser, served.url))
        there.waits_for(lambda: there.points(LOSS), "the chart")
        began = time.monotonic()
        there.count_frames(least_seconds=1.0)
        there.waits_for(lambda: len(there.counted()["told"]) >= 3, "frames", timeout=60)
        counted = there.counted()
        # Whatever frame was under way at first, those after it were sent in this time, but for the last.
        rests = [rest_after(seconds) - FRAME_SECONDS / 2 for seconds in counted["told"][1:-1]]
        assert 3 < sum(rests) <= time.monotonic() - began
        assert counted["text"] > 2 * len(rests)


def _hide(there: Visit, is_hidden: bool) -> None:
    """Puts a page behind others, as far as it can tell."""
    code = """(hidden) => {
        Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    there.page.evaluate(code, is_hidden)
