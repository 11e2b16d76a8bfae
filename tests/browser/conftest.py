"""The browser of these tests, which needs Chromium."""

from collections.abc import Iterator

import pytest
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
