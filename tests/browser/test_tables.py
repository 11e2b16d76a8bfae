"""Tables and spans on the page of runs: windows of many rows, opened rows, one prompt over steps and in two runs."""

from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from axe import DARK_PHONE, has_nothing_serious
from browser import Shared, Visit, visit
from helpers import wait_for
from playwright.sync_api import Browser, Locator

import offloop
from offloop.bus import BASE_EVENTS, Event, Image, Publisher
from offloop.bus.runs.directory import find_run
from offloop.bus.types.event import ANY_CUSTOM

pytestmark = pytest.mark.timeout(180)

MARKUP = "<img src=x onerror='hacked=1'><script>hacked=1</script>{{7*7}}\n**bold** [link](javascript:hacked=1)"
SCROLLED = """async ([by, frames]) => {
    const box = document.querySelector(".tables-scroll");
    let most = 0;
    for (let frame = 0; frame < frames; frame++) {
        box.scrollTop += by;
        await new Promise(requestAnimationFrame);
        most = Math.max(most, box.querySelectorAll(".tables-row").length);
    }
    return most;
}"""


def ended(name: str) -> None:
    wait_for(lambda: find_run(name).status == "finished", f"the end of {name}")


def samples(name: str, steps: int = 6) -> None:
    with Publisher(name) as publisher:
        publisher.publish(Event.FIT_START)
        for step in range(1, steps + 1):
            rows: list[dict[str, Any]] = [
                {
                    "prompt": f"prompt {prompt}",
                    "completion": f"{name} says {step}: {MARKUP}",
                    "reward": step / 8 + prompt,
                }
                for prompt in range(3)
            ]
            publisher.log_table("completions", rows, step=step)
            grey = np.full((4, 6), 40 * step, np.uint8)
            publisher.log_table("pictures", [{"image": Image(grey), MARKUP: 1}], step=step)
            publisher.publish(Event.BATCH_END, batch=step, sample=step, loss=1 / step)
    ended(name)


def rows(there: Visit) -> Locator:
    return there.page.locator(".tables-row")


def shows(there: Visit, count: str) -> None:
    there.page.locator(".tables-count", has_text=count).wait_for()


def menu(there: Visit, column: str) -> None:
    there.page.get_by_role("columnheader", name=column, exact=True).get_by_role("button").click()
    there.page.locator(".tables-column").wait_for()


def test_a_hundred_thousand_rows_are_scrolled_in_windows_sorted_and_found(shared: Shared, browser: Browser) -> None:
    with Publisher("many") as publisher:
        for step in range(200):
            named = [f"row {number}" for number in range(500 * step, 500 * step + 500)]
            publisher.log_table(
                "rows",
                [[text, 100_000 - number] for number, text in enumerate(named, 500 * step)],
                ["name", "left"],
                step,
            )
            publisher.publish(Event.BATCH_END, batch=step + 1, loss=1.0)
    ended("many")
    with visit(browser, shared.url_of("many")) as there:
        asked: list[str] = []
        there.page.on("request", lambda request: asked.append(request.url) if "/tables?" in request.url else None)
        there.page.locator(".tables").scroll_into_view_if_needed()
        shows(there, "100,000 rows")
        rows(there).filter(has_text="row 99500").wait_for()
        assert there.page.evaluate(SCROLLED, [400, 300]) < 60
        there.page.evaluate(SCROLLED, [1e9, 1])
        rows(there).filter(has_text="row 499").wait_for()
        # Of some thousand passed rows.
        assert len(asked) < 80
        menu(there, "left")
        there.page.get_by_role("img", name="Distribution of left from 1 to 100,000").wait_for()
        there.page.get_by_role("button", name="↑ ascending").click()
        rows(there).first.filter(has_text="row 99999").wait_for()
        there.page.get_by_label("Search all texts").fill("row 4242")
        shows(there, "20 of 100,000 rows")
        menu(there, "left")
        there.page.get_by_label("left to").fill("60000")
        there.page.get_by_role("button", name="filter", exact=True).click()
        shows(there, "16 of 100,000 rows")
        there.page.get_by_label("First step").fill("100")
        shows(there, "5 of 100,000 rows")


def test_a_row_is_opened_as_text_and_its_prompt_is_followed_over_steps_and_in_another_run(
    shared: Shared, browser: Browser
) -> None:
    samples("a")
    samples("b", steps=3)
    with visit(browser, shared.url_of("a", "b"), viewport={"width": 1400, "height": 1300}) as there:
        page = there.page
        shows(there, "27 rows")
        row = rows(there).filter(has_text="prompt 1").first
        row.click()
        detail = page.get_by_role("region", name="Row of step 6")
        assert detail.locator("pre").nth(1).inner_text() == f"a says 6: {MARKUP}"
        detail.get_by_role("button", name="over steps").first.click()
        shows(there, "9 of 27 rows")
        page.get_by_label("beside").select_option("b")
        page.locator(".tables-sides", has_text="b, step 3").wait_for()
        texts = page.locator(".tables-detail pre").all_inner_texts()
        assert texts[:4] == ["prompt 1", "prompt 1", f"a says 6: {MARKUP}", f"b says 3: {MARKUP}"]
        page.get_by_label("Close the row").click()
        page.get_by_role("button", name="Remove the filter prompt: prompt 1").click()
        shows(there, "27 rows")
        menu(there, "prompt")
        page.locator(".tables-texts").get_by_role("button", name="prompt 2").click()
        shows(there, "9 of 27 rows")
        page.get_by_role("button", name="columns").click()
        page.get_by_role("checkbox", name="completion").uncheck()
        page.keyboard.press("Escape")
        assert page.get_by_role("columnheader").all_inner_texts() == ["run", "step ↑", "prompt", "reward"]
        page.locator(".tables-names").get_by_role("button", name="pictures").click()
        shows(there, "9 rows")
        sizes = "[...document.querySelectorAll('.tables-row img')].map((one) => [one.naturalWidth, one.naturalHeight])"
        there.waits_for(lambda: [6, 4] in page.evaluate(sizes), "an image")
        assert not page.evaluate("'hacked' in window || !!document.querySelector('img[src=x]')")


def test_its_data_is_only_for_those_who_see_the_page_and_nothing_malformed_ends_it(
    shared: Shared, browser: Browser
) -> None:
    samples("private", steps=2)
    served = shared.served
    with visit(browser, shared.url_of("private")) as there:
        there.page.locator(".tables").scroll_into_view_if_needed()
        shows(there, "6 rows")
        address = there.page.evaluate("getElement(Number(document.querySelector('.tables').id.slice(1))).runs[0][2]")
        of_page = served.url.rstrip("/") + address.rstrip("/")

        def answered(path: str, base: str = of_page, **headers: str) -> int:
            return int(there.page.request.get(f"{base}/{path}", headers=headers).status)

        assert answered("tables?ask={}") == 200
        assert answered("tables?ask={}", Origin="http://example.com") == 403
        assert answered("tables?ask={}", base=f"{served.url}run-content/0123") == 404
        for bad in (
            "{",
            "[]",
            '{"search":{"table":"no"},"count":1}',
            '{"search":{"table":"completions","sort":"id;"},"count":1}',
            f'{{"table":"completions","row":{1 << 80}}}',
        ):
            assert answered(f"tables?ask={bad}") == 400, bad
        for path in ("cell?run=0&image=00", f"cell?run={1 << 80}&image=" + "0" * 32, "nothing"):
            assert answered(path) == 404, path
        for fine in ("spans?after=-7", f"spans?after={1 << 80}"):
            assert answered(fine) == 200, fine
        long = '{"search":{"table":"completions","until":9,"find":"' + 9000 * "%" + '"},"count":1}'
        assert answered(f"tables?ask={quote(long)}") == 200
    with visit(browser, shared.url_of("nothing")) as there:
        there.sees("There is no run 'nothing' now.")
        there.waits_for(lambda: there.page.get_by_text("Waiting for the first values").count(), "the empty page")
        assert not there.page.locator(".tables, .spans").filter(visible=True).count()
        assert not [line for line in served.said if "Error" in line]


def test_a_live_run_grows_in_tables_and_spans_and_a_phone_can_show_them(shared: Shared, browser: Browser) -> None:
    with (
        Publisher("live") as publisher,
        visit(browser, shared.url_of("live"), **DARK_PHONE) as there,
    ):
        step = 0

        def trained() -> None:
            nonlocal step
            step += 1
            with publisher.span("step"), publisher.span("generate"):
                publisher.log_table("on_demand", lambda: [{"text": f"only now {step}"}], step=step)
            publisher.event("rollout_end", reward=0.5)
            publisher.log_table("kept", [{"text": "always"}], step=step)
            publisher.publish(Event.BATCH_END, batch=step, sample=step, loss=1.0)

        def appears(text: str) -> None:
            there.waits_for(lambda: (trained(), there.page.get_by_text(text).first.is_visible())[1], text)

        appears("kept")
        there.page.locator(".tables").scroll_into_view_if_needed()
        appears("on_demand")
        there.page.locator(".tables-names").get_by_role("button", name="on_demand").click()
        appears("only now")
        there.page.get_by_text("Spans", exact=True).click()
        there.page.locator(".spans").scroll_into_view_if_needed()
        appears("together")
        there.page.get_by_role("table", name="Spans by name").get_by_role("row", name="generate").wait_for()
        told = "getElement(Number(document.querySelector('.spans').id.slice(1))).told().slice(-2)"
        inner, outer = there.page.evaluate(told)
        assert (inner[:2], outer[:2]) == (["generate", 0], ["step", 0])
        assert inner[2] > outer[2]
        there.page.locator(".log", has_text="rollout_end: reward 0.5").wait_for()
        has_nothing_serious(there)
        rows(there).first.click()
        there.page.locator(".tables-detail").wait_for()
        has_nothing_serious(there)


def test_actors_have_their_names_in_spans_events_and_rows(shared: Shared, browser: Browser) -> None:
    with (
        Publisher("with-actors", events=BASE_EVENTS | {ANY_CUSTOM}) as training,
        offloop.join("with-actors", role="rollout") as actor,
    ):
        training.publish(Event.BATCH_END, batch=1, sample=1, loss=1.0)
        with actor.span("generate"):
            actor.log_table("completions", [{"text": "a"}])
        actor.event("rollout_end", reward=0.5)
        name = actor.name
    ended("with-actors")
    with visit(browser, shared.url_of("with-actors")) as there:
        there.page.locator(".tables").scroll_into_view_if_needed()
        rows(there).first.click()
        there.page.locator(".tables-detail pre", has_text=name).wait_for()
        there.page.get_by_text("Spans", exact=True).click()
        there.page.locator(".spans-plot b", has_text=name).wait_for()
        there.page.locator(".log", has_text=f"{name} rollout_end: reward 0.5").wait_for()
