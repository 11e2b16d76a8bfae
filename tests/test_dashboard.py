"""The web dashboard in a real browser: what it shows of runs as they go on, and what can be done there."""

import os
import signal
import sys
from collections.abc import Iterator

import pytest
from browser import Visit, chromium, commanded, dashboard_of, running, visit
from helpers import wait_for
from playwright.sync_api import Browser

from bus import Event, Publisher
from bus.runs import find_run

pytestmark = pytest.mark.timeout(180)

LOSS = "loss/train/total"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


def record(name: str, losses: list[float], end: str = "finished") -> None:
    """A run that is over, with these losses."""
    with Publisher(name) as publisher:
        for batch, loss in enumerate(losses, 1):
            publisher.publish(Event.BATCH_END, batch=batch, sample=8 * batch, loss=loss, batch_size=8)
        if end != "finished":
            publisher.close(end)


def test_points_arrive_live_and_the_stop_button_stops_the_run(runs_dir, browser):
    with running("live", pause=0.005) as run:
        wait_for(lambda: (runs_dir / "live" / "run.json").exists(), "the run")
        command = (sys.executable, "-m", "consumers", "--callbacks", "dashboard", "-o", "dashboard.port=0")
        with commanded(*command, "--run", "live") as served, visit(browser, served.url) as there:
            there.page.locator(f'[data-plot="{LOSS}"] canvas').first.wait_for()
            there.waits_for(lambda: len(there.points(LOSS)) > 20, "points")
            before = there.points(LOSS)[-1][0]
            there.waits_for(lambda: there.points(LOSS)[-1][0] > before, "later points")
            there.sees("live")
            there.page.get_by_role("button", name="stop", exact=True).click()
            there.page.get_by_role("button", name="Let it go on").click()
            there.waits_for(lambda: there.points(LOSS)[-1][0] > before + 50, "a training that goes on")
            assert run.process.poll() is None
            there.page.get_by_role("button", name="stop", exact=True).click()
            there.page.get_by_role("button", name="Stop it").click()
            assert "trained" in run.end()
            there.sees("took effect at batch")
            there.page.locator(".status-stopped").wait_for()
            served.has_said("stays at")
            assert served.leave() == 130


def test_a_zoom_brings_finer_points(runs_dir, browser):
    peak = 50_000
    with running("long", 100_000, 0.0, f"peak@{peak}", "nan@70000") as run:
        run.end()
    with dashboard_of("long") as served, visit(browser, served.url) as there:
        there.waits_for(lambda: there.points(LOSS) and there.points(LOSS)[-1][0] == 100_000, "the whole run")
        whole = there.points(LOSS)
        assert len(whole) < 5_000
        assert (peak, 100.0) in [tuple(point) for point in whole]
        assert there.not_finite(LOSS) == [[70_000, "NaN"]]
        there.sees("1 not finite")
        box = there.page.locator(f'[data-plot="{LOSS}"]').bounding_box()
        assert box is not None
        there.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        there.page.keyboard.down("Control")
        for _ in range(12):
            there.page.mouse.wheel(0, -300)
            there.page.wait_for_timeout(30)
        there.page.keyboard.up("Control")

        def shown() -> list[float]:
            low, high = there.board("shownRange", LOSS)
            return [x for x, _ in there.points(LOSS) if low <= x <= high]

        def is_finer() -> bool:
            inside = shown()
            return len(inside) > 100 and len(inside) == inside[-1] - inside[0] + 1

        there.waits_for(is_finer, "every single batch of a part")
        there.page.locator(f'[data-plot="{LOSS}"]').press("0")
        there.waits_for(lambda: there.points(LOSS)[0][0] == 1, "the whole run again")
        assert there.board("shownRange", LOSS) == [1, 100_000]


def test_drawing_over_a_chart_zooms_into_it(runs_dir, browser):
    record("short", [1.0 / batch for batch in range(1, 401)])
    with dashboard_of("short") as served, visit(browser, served.url) as there:
        there.waits_for(lambda: len(there.points(LOSS)) == 400, "the run")
        plot = there.page.locator(f'[data-plot="{LOSS}"]')
        box = plot.bounding_box()
        assert box is not None
        there.page.wait_for_timeout(300)
        there.page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
        there.page.mouse.down()
        there.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 80, steps=5)
        there.page.mouse.up()

        def zoomed() -> bool:
            low, high = there.board("shownRange", LOSS)
            return bool(100 < low < 200 < high < 300)

        there.waits_for(zoomed, "the part that was drawn over")


def test_runs_and_attempts_are_drawn_over_one_another(runs_dir, browser):
    record("first", [3.0, 2.0, 1.0])
    record("second", [4.0, 3.0], end="stopped")
    record("second", [5.0, 4.0, 3.0, 2.0])
    recording = str(runs_dir / "first" / "recording-1.mcap")
    with dashboard_of(recording, "second") as served, visit(browser, served.url) as there:
        there.waits_for(lambda: [len(there.points(LOSS, run)) for run in range(3)] == [3, 2, 4], "three lines")
        for name in ("first", "second #1", "second #2"):
            there.page.get_by_role("article", name=f"Run {name}").wait_for()
        assert there.page.locator(".status-stopped").count() == 1
        before = there.pixels(LOSS)
        there.page.get_by_role("button", name="Lines of second #2").click()
        there.waits_for(lambda: there.pixels(LOSS) < before, "one line less")


def test_axes_scales_and_tables(runs_dir, browser):
    record("axes", [2.0, 1.0, float("inf"), 0.5])
    with dashboard_of("axes") as served, visit(browser, served.url) as there:
        there.waits_for(lambda: len(there.points(LOSS)) == 4, "the run")
        assert there.not_finite(LOSS) == [[3, "inf"]]
        there.page.get_by_role("button", name="sample", exact=True).click()
        there.waits_for(lambda: [x for x, _ in there.points(LOSS)] == [8, 16, 24, 32], "samples")
        plain = there.pixels(LOSS)
        there.page.keyboard.press("l")
        there.waits_for(lambda: there.pixels(LOSS) != plain, "another scale")
        there.page.get_by_text("Latest values").click()
        there.page.get_by_role("cell", name=LOSS).wait_for()
        there.page.get_by_role("cell", name="0.5", exact=True).wait_for()
        there.page.get_by_label("Find charts by name").fill("no such metric")
        there.waits_for(lambda: there.page.locator(".chart").count() == 0, "no chart")
        label = there.page.locator(".board").get_attribute("class")
        assert label is not None


def test_the_theme_follows_the_system_and_can_be_chosen(runs_dir, browser):
    record("themes", [1.0, 2.0])
    with dashboard_of("themes") as served, visit(browser, served.url, color_scheme="dark") as there:
        there.page.locator("body.body--dark").wait_for()
        there.page.keyboard.press("d")
        there.page.keyboard.press("d")
        there.page.locator("body:not(.body--dark)").wait_for()


def test_a_run_that_is_killed_is_shown_as_lost(runs_dir, browser):
    with running("dead") as run:
        wait_for(lambda: (runs_dir / "dead" / "run.json").exists(), "the run")
        with dashboard_of("dead") as served, visit(browser, served.url) as there:
            there.page.locator(".status", has_text="live").wait_for()
            run.process.send_signal(signal.SIGKILL)
            there.page.locator(".status-lost").wait_for(timeout=20_000)
            assert there.page.get_by_role("button", name="stop", exact=True).count() == 0


def test_a_broker_that_dies_and_comes_back_is_survived(runs_dir, browser):
    with running("survivor") as run:
        wait_for(lambda: (runs_dir / "survivor" / "run.json").exists(), "the run")
        with dashboard_of("survivor") as served, visit(browser, served.url) as there:
            there.waits_for(lambda: len(there.points(LOSS)) > 10, "points")
            wait_for(lambda: find_run("survivor").live, "the broker")
            os.kill(_broker_pid(runs_dir / "survivor"), signal.SIGKILL)
            before = there.points(LOSS)[-1][0]
            there.waits_for(lambda: there.points(LOSS)[-1][0] > before + 300, "points of after that", timeout=40)
            assert run.process.poll() is None
            there.page.locator(".status", has_text="live").wait_for()


def test_a_run_that_has_not_begun_is_waited_for(runs_dir, browser):
    with dashboard_of("later", "--wait") as served, visit(browser, served.url) as there:
        there.page.locator(".status-waiting").wait_for()
        served.has_said("waiting for later")
        record("later", [1.0, 2.0, 3.0])
        there.waits_for(lambda: len(there.points(LOSS)) == 3, "the run")


def test_a_browser_that_goes_away_costs_nothing_and_the_others_go_on(runs_dir, browser):
    with running("watched") as run, dashboard_of("watched", "--wait") as served, visit(browser, served.url) as stays:
        with visit(browser, served.url) as leaves:
            leaves.waits_for(lambda: len(leaves.points(LOSS)) > 5, "points")
        before = stays.waits_for(lambda: stays.points(LOSS), "points")[-1][0]
        stays.waits_for(lambda: stays.points(LOSS)[-1][0] > before + 100, "later points")
        assert run.process.poll() is None


def test_a_page_on_a_phone_fits_its_width(runs_dir, browser):
    record("phone", [1.0, 2.0])
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    with dashboard_of("phone") as served, visit(browser, served.url, **phone) as there:
        there.waits_for(lambda: len(there.points(LOSS)) == 2, "the run")
        assert there.page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_keyboard_reaches_every_control_and_charts_have_words(runs_dir, browser):
    record("keys", [1.0, 0.25])
    with dashboard_of("keys") as served, visit(browser, served.url) as there:
        there.waits_for(lambda: len(there.points(LOSS)) == 2, "the run")
        reached = set()
        for _ in range(40):
            there.page.keyboard.press("Tab")
            reached.add(there.page.evaluate("document.activeElement.getAttribute('aria-label') || ''"))
        assert {"Keyboard shortcuts", "Smoothing", "Find charts by name", "Events and commands"} <= reached
        assert any(label.startswith(f"Chart of {LOSS} over batch") and "0.25" in label for label in reached)
        there.page.keyboard.press("Escape")
        there.page.locator("body").click(position={"x": 1, "y": 1})
        there.page.keyboard.press("?")
        there.sees("next x axis")


def _broker_pid(run_dir) -> int:
    import json

    return int(json.loads((run_dir / "broker.json").read_text())["pid"])


def test_visits_notice_what_goes_wrong(runs_dir, browser):
    record("wrong", [1.0])
    with dashboard_of("wrong") as served, pytest.raises(AssertionError), visit(browser, served.url) as there:
        assert isinstance(there, Visit)
        there.page.evaluate("setTimeout(() => { throw new Error('on purpose') })")
        there.waits_for(lambda: there.errors, "the error")
