"""The browser of these tests, which needs Chromium, and a dashboard for many of them."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Shared, chromium, ui_of
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


@pytest.fixture(scope="session")
def shared_dashboard() -> Iterator[Shared]:
    folder = Path(tempfile.mkdtemp(prefix="ol-", dir="/tmp"))
    with ui_of(str(folder)) as served:
        yield Shared(folder, served)
    shutil.rmtree(folder)


@pytest.fixture
def shared(shared_dashboard: Shared, monkeypatch: pytest.MonkeyPatch) -> Shared:
    """A dashboard of the folder to which the runs of the test go, each under a name that no other test uses."""
    monkeypatch.setenv("OFFLOOP_RUNS_DIR", str(shared_dashboard.runs_dir))
    return shared_dashboard
