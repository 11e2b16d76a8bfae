"""The web dashboard in a real browser: what it shows of runs as they go on, and what can be done there."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from brokers import broker_pid
from browser import Dashboard, Visit, running, ui_of, visit

from offloop.bus import Event, Publisher

pytestmark = pytest.mark.timeout(180)

LOSS = "loss/train/total"
LONG, PEAK, NAN = 20_000, 12_345, 15_000


def record(where: Path, name: str, losses: list[float], status: str = "finished") -> None:
    with Publisher(name, runs_dir=where, resume=True) as publisher:
        publisher.publish(Event.FIT_START, max_duration=f"{len(losses)}ba")
        for batch, loss in enumerate(losses, 1):
            publisher.publish(Event.BATCH_END, batch=batch, sample=8 * batch, loss=loss, batch_size=8)
        publisher.close(status)


@pytest.fixture(scope="module")
def served() -> Iterator[Dashboard]:
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


def test_runs_and_attempts_are_drawn_over_one_another_and_the_keyboard_reaches_every_control(served, browser):
    with visit(browser, served.url) as there:
        there.waits_for(lambda: [len(there.points(LOSS, run)) for run in range(1, 4)] == [5, 2, 4], "three lines")
        there.waits_for(lambda: there.points(LOSS)[-1][0] == LONG - 1, "the long one")
        for name in ("long", "short", "again #1", "again #2"):
            there.page.get_by_role("article", name=f"Run {name}", exact=True).wait_for()
        assert there.page.locator(".status-stopped").count() == 1
        before = there.pixels(LOSS)
        there.page.get_by_role("button", name="Lines of long").click()
        there.waits_for(lambda: there.pixels(LOSS) != before, "one line less")

        there.page.get_by_role("heading", name="offloop training, as it happens", exact=True).wait_for()
        reached = set()
        for _ in range(60):
            there.page.keyboard.press("Tab")
            reached.add(there.page.evaluate("document.activeElement.closest('[aria-label]')?.ariaLabel || ''"))
        assert {"Keyboard shortcuts", "Smoothing", "Find charts by name", "Events and commands"} <= reached
        assert any(label.startswith(f"Chart of {LOSS} over batch") and "short: 0.25" in label for label in reached)
        there.page.keyboard.press("?")
        there.sees("next x axis")


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


def test_a_run_is_waited_for_and_goes_on_without_its_browsers_and_its_broker_but_not_without_its_trainer(
    runs_dir, browser
):
    with ui_of("later", "--wait") as served, visit(browser, served.url) as stays:

        def goes_on(batches: int = 100) -> None:
            before = stays.waits_for(lambda: stays.points(LOSS), "points")[-1][0]
            stays.waits_for(lambda: stays.points(LOSS)[-1][0] > before + batches, "later points")

        stays.page.locator(".status-waiting").wait_for()
        served.has_said("waiting for later")
        with running("later") as run:
            with visit(browser, served.url) as leaves:
                leaves.waits_for(lambda: len(leaves.points(LOSS)) > 5, "points")
            goes_on()
            _hide(stays, True)

            def is_still() -> bool:
                before = stays.page.locator(".run-facts").inner_text()
                stays.page.wait_for_timeout(1500)
                return stays.page.locator(".run-facts").inner_text() == before

            stays.waits_for(is_still, "a page that is sent nothing while it is hidden")
            _hide(stays, False)
            goes_on()
            os.kill(broker_pid(runs_dir / "later"), signal.SIGKILL)
            goes_on(200)
            stays.page.locator(".status", has_text="live").wait_for()
            run.kill()
            stays.page.locator(".status-lost").wait_for()
            assert not stays.page.get_by_role("button", name="stop", exact=True).is_visible()
        assert len(served.said) == 2, served.said


def _hide(there: Visit, is_hidden: bool) -> None:
    code = """(hidden) => {
        Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    there.page.evaluate(code, is_hidden)
