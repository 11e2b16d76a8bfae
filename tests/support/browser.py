"""A headless browser that looks at dashboards, runs for it to look at, and dashboards as people start them."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from helpers import wait_for
from playwright.sync_api import Browser, Error, Page, expect, sync_playwright

PATIENCE = 60.0
"""Seconds to wait for anything that a page is to show."""
expect.set_options(timeout=1000 * PATIENCE)

CHROMIUM = shutil.which(os.environ.get("CHROMIUM", "chromium"))

# All pages in one process, which stays: none begins or ends with a test.
FLAGS = ["--headless=new", "--no-sandbox", "--renderer-process-limit=1", "--disable-site-isolation-trials"]

LOOP = """
import math, sys, time
from offloop.bus import Event, Publisher

with Publisher(sys.argv[1]) as publisher:
    publisher.publish(Event.FIT_START, max_duration="100000ba")
    for batch in range(1, 100_001):
        at = {"epoch": batch // 100, "batch": batch, "sample": 8 * batch, "max_duration": "100000ba"}
        publisher.publish(Event.BATCH_END, **at, loss=2 * math.exp(-batch / 400), lr={"SGD": [0.1]}, batch_size=8)
        time.sleep(0.01)
        if publisher.stop_requested:
            publisher.close("stopped")
            break
    print("trained", batch, flush=True)
"""


@contextlib.contextmanager
def running(name: str) -> Iterator["subprocess.Popen[str]"]:
    """A loop of somebody's own, in its own process, that goes on until it is stopped or until the end."""
    process = subprocess.Popen([sys.executable, "-c", LOOP, name], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=60)


class Dashboard:
    """A command that serves a dashboard."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line.rstrip())

    def has_said(self, text: str) -> str:
        """Waits for a line with that text; returns it."""

        def found() -> str | None:
            line = next((line for line in self.said if text in line), None)
            assert line or self.process.poll() is None, f"it ended and said {self.said}"
            return line

        return str(wait_for(found, f"{text!r} among {self.said}"))

    @property
    def url(self) -> str:
        """The address that it printed."""
        found = re.search(r"https?://\S+", self.has_said("dashboard: "))
        assert found
        return found.group()

    @property
    def port(self) -> int:
        """The port of that address."""
        return int(urlsplit(self.url).port or 0)

    def close(self) -> int:
        """Waits until it has ended; returns the exit code."""
        code = self.process.wait(timeout=60)
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@contextlib.contextmanager
def commanded(*command: str) -> Iterator[Dashboard]:
    """A dashboard by a command such as ``consumer --callbacks dashboard``, at any free port."""
    started = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env={**os.environ, "COLUMNS": "200"}
    )
    served = Dashboard(started)
    try:
        yield served
    finally:
        if started.poll() is None:
            started.send_signal(signal.SIGINT)
        try:
            served.close()
        except subprocess.TimeoutExpired:
            started.kill()
            served.close()
            raise


def ui_of(*arguments: str) -> contextlib.AbstractContextManager[Dashboard]:
    """``offloop ui`` with these arguments, at any free port."""
    code = (
        "from offloop.bus.terminal import run_command;"
        " from offloop.consumers.dashboard.web.command import ui; run_command(ui)"
    )
    return commanded(sys.executable, "-c", code, "--port", "0", *arguments)


class Shared(NamedTuple):
    """A dashboard of a folder of runs that several tests use."""

    runs_dir: Path
    served: Dashboard

    def url_of(self, *runs: str) -> str:
        """The address of the page of these runs."""
        return f"{self.served.url}runs?" + "&".join(f"run={run}" for run in runs)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The browser, without a window."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            # Its helper processes begin with the first page that it loads.
            with contextlib.suppress(Error):
                browser.new_page().goto("http://127.0.0.1:9/")
            yield browser
        finally:
            browser.close()


class Visit:
    """A page that is open, with everything that went wrong on it and every host that it asked."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        self.hosts: set[str | None] = set()
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        page.on("request", lambda request: self._note(request.url))
        page.on("websocket", lambda socket: self._note(socket.url))

    def _note(self, url: str) -> None:
        if not url.startswith(("data:", "blob:")):
            self.hosts.add(urlsplit(url).hostname)

    def waits_for(self, condition: Callable[[], Any], name: str, timeout: float = PATIENCE) -> Any:
        """Waits until something holds on the page, while the page goes on."""

        def asked() -> Any:
            self.page.wait_for_timeout(20)
            return condition()

        return wait_for(asked, name, timeout)

    def sees(self, text: str) -> None:
        """Waits until a text is on the page."""
        self.page.get_by_text(text).first.wait_for()

    def board(self, method: str, *arguments: Any) -> Any:
        """Asks the element that holds the charts."""
        call = """([method, given]) => {
            const board = document.querySelector(".board");
            return board ? getElement(Number(board.id.slice(1)))[method](...given) : null;
        }"""
        return self.page.evaluate(call, [method, list(arguments)])

    def points(self, chart: str, run: int = 0) -> list[tuple[float, float | None]]:
        """The points of a run that a chart holds."""
        for line in self.board("pointsOf", chart) or []:
            if line["run"] == run:
                return list(zip(line["x"], line["y"], strict=True))
        return []

    def drawn(self, chart: str) -> dict[str, Any]:
        """What a chart shows: ``range`` and ``ends`` of its axes, ``lines`` with ``xs`` and ``ys``, ``cut``, ``odd``,
        ``marks``, and the ``texts`` of both axes; empty before it is drawn."""
        return dict(self.board("drawnOf", chart) or {})

    def line(self, chart: str, line: int | str) -> list[float | None]:
        """The values of a line as they are drawn; empty where it is not."""
        found = (one["ys"] for one in self.drawn(chart).get("lines", ()) if str(one["id"]) == str(line))
        return list(next(found, []))

    def point_at(self, chart: str, x: float, y: float) -> None:
        """Moves the pointer to a place and a value of a chart."""
        box, (left, top) = self.box(chart), self.board("pixelsOf", chart, x, y)
        self.page.mouse.move(box["x"] + left - 1, box["y"] + top)
        self.page.mouse.move(box["x"] + left, box["y"] + top)

    def tip(self) -> list[str]:
        """The lines of the box at the pointer."""
        found = self.page.locator(".chart-tip")
        return found.first.inner_text().splitlines() if found.count() else []

    def box(self, chart: str) -> Any:
        """Where a chart is, in pixels of the window."""
        found = self.page.locator(f'[data-plot="{chart}"]').bounding_box()
        assert found is not None
        return found

    def not_finite(self, chart: str) -> list[list[Any]]:
        """The marks of what is no number in a chart: where, and what it is."""
        return [mark for line in self.board("pointsOf", chart) or [] for mark in line["n"]]

    def pixels(self, chart: str) -> int:
        """How many pixels of a chart are drawn."""
        count = """(id) => {
            const canvas = document.querySelector(`[data-plot="${id}"] canvas`);
            if (!canvas || !canvas.width) return 0;
            const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            let drawn = 0;
            for (let place = 3; place < data.length; place += 4) drawn += data[place] > 0;
            return drawn;
        }"""
        return int(self.page.evaluate(count, chart))


@contextlib.contextmanager
def visit(browser: Browser, url: str, **options: Any) -> Iterator[Visit]:
    """Opens a page in a fresh profile, and checks at the end that nothing went wrong there and nothing left this
    machine."""
    with contextlib.closing(browser.new_context(**options)) as context:
        context.set_default_timeout(1000 * PATIENCE)
        opened = Visit(context.new_page())
        for _ in range(3):
            opened.errors.clear()
            opened.page.goto(url)
            # Whatever the machine's other networks do in that moment makes Chromium give up on loopback too.
            if not any("ERR_NETWORK_CHANGED" in error for error in opened.errors):
                break
        yield opened
        assert not opened.errors, opened.errors
        assert opened.hosts <= {"127.0.0.1"}
