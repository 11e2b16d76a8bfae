"""Console output on the page of a run: followed, of each rank, as text; and the traceback of a failure."""

import subprocess
import sys

import pytest
from axe import has_nothing_serious
from browser import Shared, visit
from helpers import wait_for
from playwright.sync_api import Browser, expect

pytestmark = pytest.mark.timeout(180)

MARKUP = "<img src=x onerror='hacked=1'>{{7*7}} \u202e"
TRAINING = f"""
import sys
from offloop.bus import Event, Publisher
with (
    Publisher("printing", world_size=2, capture_console=True) as first,
    Publisher("printing", world_size=2, rank=1, broker=first.address) as second,
):
    first.publish(Event.FIT_START)
    for line in sys.stdin:
        if line == "fail\\n":
            raise ValueError({MARKUP!r})
        print("\\n".join(f"line {{number}}" for number in range(int(line))) + {MARKUP!r}, flush=True)
"""


def test_output_is_followed_and_a_failure_shows_its_traceback(shared: Shared, browser: Browser) -> None:
    training = subprocess.Popen(
        [sys.executable, "-c", TRAINING], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    assert training.stdin is not None

    def order(line: str) -> None:
        assert training.stdin is not None
        training.stdin.write(f"{line}\n".encode())
        training.stdin.flush()

    order("40000")
    run = shared.runs_dir / "printing"
    wait_for(lambda: (run / "console-1-0.log").is_file(), "the output")
    (run / "console-1-1.log").write_text("of rank 1\n")
    with visit(browser, shared.url_of("printing")) as there:
        page = there.page
        text = page.get_by_label("Console output")
        text.scroll_into_view_if_needed()
        expect(text).to_contain_text("line 39999<img src=x onerror='hacked=1'>{{7*7}} \\u202e")
        assert len(text.inner_text()) < 300_000
        at_end = "box => box.scrollHeight - box.scrollTop - box.clientHeight < 8"
        there.waits_for(lambda: text.evaluate(at_end), "the end of the text")
        order("5")
        there.waits_for(
            lambda: text.inner_text().rstrip().endswith("line 4" + MARKUP[:-1] + "\\u202e"), "the next lines"
        )
        there.waits_for(lambda: text.evaluate(at_end), "the end of the text")
        while "line 0\n" not in text.inner_text()[:200]:
            before = len(text.inner_text())
            page.get_by_role("button", name="earlier output").click()
            there.waits_for(lambda: len(text.inner_text()) > before, "earlier output")  # noqa: B023
        shown = [line.partition("<")[0].strip() for line in text.inner_text().split("\n")]
        assert shown[:40_005] == [f"line {number}" for number in [*range(40_000), *range(5)]]
        expect(page.get_by_role("button", name="earlier output")).to_have_count(0)
        page.get_by_label("Find lines").fill("LINE 3999")
        expect(page.locator(".console [role=status]")).to_have_text("11 lines")
        page.get_by_label("Find lines").fill("")
        page.locator(".console select").select_option("1")
        expect(text).to_have_text("of rank 1\n")
        order("fail")
        traceback = page.get_by_label("Traceback", exact=True)
        expect(traceback).to_contain_text("Traceback (most recent call last):")
        expect(traceback).to_contain_text("ValueError: <img src=x onerror='hacked=1'>{{7*7}} \\u202e")
        page.evaluate("scrollTo(0, 0)")
        expect(traceback).to_be_in_viewport()
        assert not page.evaluate("'hacked' in window")
        has_nothing_serious(there)
        training.communicate(timeout=60)
