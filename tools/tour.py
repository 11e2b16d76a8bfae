"""Makes the tour at the head of the README, ``docs/images/tour.webp``: ``python tools/tour.py``.

Films terminals and pages of real runs. Waiting is cut out, so it lasts about a minute."""

import base64
import html
import io
import itertools
import os
import re
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from screenshots import CHROMIUM, IMAGES, PLOTS, runs_at, trainer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from helpers import wait_for
from terminals import Terminal

COLUMNS, LINES = 99, 40
TYPING, READING = 70, 600  # milliseconds of a frame
COMPARED = ("lr-0.003", "lr-0.001", "lr-0.0003")
SCROLL = """([plot, above]) =>
    window.scrollBy(0, document.querySelectorAll("[data-plot]")[plot].getBoundingClientRect().top - above)"""
STYLE = """<style>
* { box-sizing: border-box; margin: 0 }
body { width: 1200px; height: 850px; padding: 0 16px 16px; display: flex; flex-direction: column; gap: 12px;
  border-radius: 18px; background: linear-gradient(160deg, #31406b, #1b2440); overflow: hidden }
h1 { font: 600 27px/40px system-ui, "DejaVu Sans", sans-serif; color: #fff; padding: 14px 4px 0 }
h1 b { float: left; width: 40px; border-radius: 50%; margin-right: 14px; background: #5b8def; text-align: center }
section { border-radius: 10px; overflow: hidden; box-shadow: 0 6px 18px #0007; background: #0d1117; flex: none }
section:last-child { flex: 1 }
h2 { font: 500 15px/28px system-ui, "DejaVu Sans", sans-serif; padding: 0 14px; color: #aab4c8; background: #232c3d }
pre { font: 19px/27px "DejaVu Sans Mono", monospace; margin: 8px 14px 10px; color: #d6deeb }
img { display: block; width: 100% }
</style>"""


class Film:
    """Terminals, a page, and the frames that are taken of them."""

    def __init__(self, browser: Browser) -> None:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        size = {"columns": COLUMNS, "lines": LINES, "environment": {"PS1": "$ ", "PATH": path, "OMP_NUM_THREADS": "1"}}
        self.shells = {f"terminal {number}": Terminal("bash", "--norc", "--noprofile", **size) for number in (1, 2, 3)}
        self.page = browser.new_page(viewport={"width": 1168, "height": 660}, color_scheme="light")
        self.frames: list[tuple[str, int]] = []
        self._number, self._picture = itertools.count(1), ""

    def scene(self, caption: str, shown: dict[str, int]) -> None:
        """Begin to show these terminals with so many lines, and the page under any other name."""
        self._head, self._shown = f"<h1><b>{next(self._number)}</b>{caption}</h1>", shown
        if "terminal 2" in shown and self.frames:
            self.shells["terminal 2"].press("\x0c")  # clears the screen

    def take(self, milliseconds: int = READING, count: int = 1) -> None:
        for _ in range(count):
            self.page.wait_for_timeout(milliseconds)
            parts = [self._head]
            for title, lines in self._shown.items():
                if title in self.shells:
                    shown = f"<pre style='height: {27 * lines}px'>{text_of(self.shells[title], lines)}</pre>"
                else:
                    if milliseconds == READING:  # while a command is typed, the page stays as it was
                        self._picture = base64.b64encode(self.page.screenshot()).decode()
                    shown = f"<img src='data:image/png;base64,{self._picture}'>"
                parts.append(f"<section><h2>{title}</h2>{shown}</section>")
            self.frames.append(("".join(parts), milliseconds))

    def type(self, title: str, command: str, until: str = r"\n\$ *$", frames: int = 1) -> None:
        """Type a command, wait until this pattern, by default the next prompt, is behind it, and take more frames."""
        shell, pattern = self.shells[title], rf"{re.escape(command[-8:])}[\s\S]*{until}"
        for part in re.findall(".{1,4}", command):
            shell.press(part)
            self.take(TYPING)
        self.take()
        shell.press("\r")
        wait_for(lambda: re.search(pattern, shell.text.rstrip()), f"{until!r} after {command!r}", 120)
        if command.endswith("&"):
            shell.press("\r")  # a prompt below what the program has printed
        self.take(count=frames)

    def open(self, address: str) -> None:
        self.page.goto(f"{address}#smoothing=0.3")
        self.page.wait_for_function(PLOTS, timeout=120_000)
        self.page.wait_for_timeout(3000)


def text_of(shell: Terminal, lines: int) -> str:
    """Return the last lines of a terminal, with its cursor, as HTML."""
    rows = shell.text.split("\n")
    at = shell.screen.cursor
    rows[at.y] = f"{rows[at.y][: at.x]}█{rows[at.y][at.x + 1 :]}"
    return html.escape("\n".join("\n".join(rows).rstrip().split("\n")[-lines:]))


def play(film: Film) -> None:
    one, two, three = film.shells
    watch = "consumer --name watcher --callbacks speed,lr,metrics --log jsonl &"
    film.scene("A training publishes its events, at a few microseconds each", {one: 5, two: 19})
    film.type(one, "trainer digits --run-name digits --max-duration 400ep", "loss", frames=5)

    film.scene("Attach callbacks at any time: first the history, then live", {one: 5, two: 19})
    film.type(two, "consumer --callbacks speed,lr,metrics", "samples_per_sec", frames=8)
    film.shells[two].press("\x03")
    film.take(count=2)

    film.scene("Watch it in the browser", {three: 2, "the page of the run": 0})
    film.take()
    film.type(three, "offloop ui digits", r"dashboard: http\S+")
    url = re.findall(r"dashboard: (http://[^/]+/)", film.shells[three].text)[-1]
    film.open(url + runs_at("digits"))
    film.take(count=4)
    film.page.evaluate(SCROLL, [0, 105])
    film.take(count=5)

    film.scene("Steer it: a command takes effect between two batches", {two: 3, "the page of the run": 0})
    film.type(two, "offloop send digits set lr 0.01", "took effect", frames=10)
    cover = re.sub("<h1>.*?</h1>", "<h1>offloop: training callbacks, off the hot loop</h1>", film.frames[-1][0])

    film.scene("Kill a consumer: the training does not notice, the consumer resumes", {one: 4, two: 19})
    film.type(two, watch, "attached to", frames=4)
    film.type(two, "kill -9 $!; wait", frames=3)
    film.type(two, watch, "resumes after", frames=4)

    film.scene("Be alerted: this learning rate makes the loss NaN", {two: 9, "the page of the run": 0})
    film.type(two, "consumer --callbacks alert -o alert.rules=nan &", "more")
    film.type(two, "offloop send digits set lr 1e9", "ALERT", frames=8)
    film.shells[two].press("\r")
    film.type(two, "offloop send digits stop", r"handled[\s\S]*handled", frames=3)
    film.shells[two].press("\r")
    film.page.wait_for_timeout(3000)

    film.scene("Replay the recording: the same numbers, to the byte", {one: 4, two: 19})
    film.type(two, "mv runs/digits/metrics.jsonl live.jsonl")
    film.type(two, "consumer --replay runs/digits --callbacks speed,lr,metrics --log jsonl")
    film.type(two, "cmp live.jsonl runs/digits/metrics.jsonl && wc -l live.jsonl", frames=6)

    film.scene("Compare runs, live or finished", {two: 8, "the page of the runs": 0})
    film.open(url + runs_at(*COMPARED))
    film.page.evaluate(SCROLL, [1, 170])
    film.take()
    film.type(two, f"offloop compare {' '.join(COMPARED)}", frames=8)
    film.frames.insert(0, (cover, 4 * READING))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="ol-", dir="/tmp") as folder, sync_playwright() as playwright:
        os.chdir(folder)
        for name in COMPARED:
            trainer(
                "digits", "--run-name", name, "--lr", name[3:], "--seed", "1", "--max-duration", "4ep"
            ).communicate()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--headless=new", "--no-sandbox"])
        film = Film(browser)
        play(film)
        for shell in film.shells.values():
            shell.close()
        stage, pictures = browser.new_page(viewport={"width": 1200, "height": 850}), []
        stage.set_content(STYLE)
        for content, _ in film.frames:
            stage.evaluate("html => { document.body.innerHTML = html; return document.images[0]?.decode(); }", content)
            pictures.append(Image.open(io.BytesIO(stage.screenshot(omit_background=True))))
        durations = [milliseconds for _, milliseconds in film.frames]
        settings = {"save_all": True, "lossless": True, "minimize_size": True, "method": 4, "duration": durations}
        pictures[0].save(IMAGES / "tour.webp", append_images=pictures[1:], loop=0, **settings)


if __name__ == "__main__":
    main()
