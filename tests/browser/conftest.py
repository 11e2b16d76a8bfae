"""The browser of these tests, which needs Chromium."""

from collections.abc import Iterator
from typing import Any

import pytest
from axe import LOOKS
from browser import chromium
from playwright.sync_api import Browser


def pytest_itemcollected(item: pytest.Item) -> None:
    if "browser" in item.fixturenames:
        item.add_marker(pytest.mark.needs("chromium"))


# Not for the session: while playwright is there, an event loop counts as running in this thread, and tests of other
# files have their own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture(params=LOOKS, ids=["light", "dark phone"])
def look(request: pytest.FixtureRequest) -> dict[str, Any]:
    scheme, size = request.param
    return {"color_scheme": scheme, **size}
