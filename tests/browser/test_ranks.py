"""The heat map of ranks on the page: what it is sent and what it says."""

from collections.abc import Iterator

import pytest
from axe import has_nothing_serious
from browser import Visit, visit
from many_hosts import many_hosts
from playwright.sync_api import Browser

from offloop.bus.protocol.host_windows import MEMORY
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.web.access import Listening
from offloop.consumers.dashboard.web.site import Site

pytestmark = pytest.mark.timeout(120)
HOSTS, RANKS = 256, 8


@pytest.fixture
def view() -> RunView:
    view = RunView("large")
    for window in range(1, 7):
        view.take_windows(many_hosts(HOSTS, RANKS, window, slow=139, nan=41, late=(20,)))
    return view


@pytest.fixture
def url(view: RunView) -> Iterator[str]:
    site = Site(Listening("127.0.0.1", 0, None, None, None, False), None, [view])
    site.start()
    try:
        yield site.url
    finally:
        site.stop()


def asked(there: Visit, method: str, *given: object) -> object:
    call = """([method, given]) => {
        const ranks = document.querySelector(".ranks");
        return getElement(Number(ranks.id.slice(1)))[method](...given);
    }"""
    return there.page.evaluate(call, [method, list(given)])


def test_thousands_of_ranks_are_a_map(url: str, view: RunView, browser: Browser) -> None:
    sent: list[int] = []
    with visit(browser, url, viewport={"width": 1280, "height": 1000}, color_scheme="dark") as there:
        page = there.page
        page.on("websocket", lambda socket: socket.on("framereceived", lambda frame: sent.append(len(frame))))
        page.reload()
        there.waits_for(lambda: asked(there, "told")["cells"] == HOSTS * RANKS, "all cells")  # type: ignore[index]
        there.sees("2,048 ranks on 256 hosts")
        there.sees("the others wait for rank 139 on node017")
        there.sees("loss first not finite at batch 4: rank 41 on node005")
        there.sees("behind the others: rank 20 on node002")
        picture = page.locator(".ranks-map")
        assert "Heat map of 2,048 ranks on 256 hosts by arrival" in str(picture.get_attribute("aria-label"))
        # The slowest by name come first.
        first = page.get_by_role("table", name="Ranks").get_by_role("row").nth(1)
        assert first.inner_text().split()[:2] == ["139", "node017"]
        has_nothing_serious(there)
        picture.scroll_into_view_if_needed()
        at = asked(there, "boxOf", 2_000)
        box = page.locator(".ranks canvas").bounding_box()
        assert box is not None
        assert isinstance(at, dict)
        place = box["x"] + at["x"] + at["size"] / 2, box["y"] + at["y"] + at["size"] / 2
        page.mouse.move(*place)
        there.waits_for(lambda: "rank 2000 on node250" in page.locator(".ranks-tip").inner_text(), "the tip")
        # Another quantity: memory, which is in the address.
        page.get_by_label("ranks by").select_option(MEMORY)
        there.sees("The worst by memory")
        assert "ranks=memory" in page.url
        # What comes each second is small.
        sent.clear()
        view.take_windows(many_hosts(HOSTS, RANKS, 7, slow=139))
        there.waits_for(lambda: "28" in first.inner_text(), "the next window")
        assert sum(sent) < 15_000
        # And nothing comes while it is closed.
        page.get_by_text("Ranks", exact=True).click()
        page.wait_for_timeout(500)
        sent.clear()
        view.take_windows(many_hosts(HOSTS, RANKS, 8, slow=139))
        # Longer than from one look at the ranks to the next.
        page.wait_for_timeout(1500)
        assert sum(sent) < 4_000
