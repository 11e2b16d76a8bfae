"""What people do with a chart in a real browser: marks of what happened, the best value, the order, and files of it."""

import csv
import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Dashboard, Visit, ui_of, visit
from PIL import Image

from offloop.bus import Event, Publisher
from offloop.bus.types.commands import Command
from offloop.bus.types.metric_names import MetricNames
from offloop.bus.types.timestamp import Timestamp

pytestmark = pytest.mark.timeout(180)

LOSS, RATE, ACCURACY = "loss/train/total", "lr-SGD/group0", "metrics/eval/accuracy"
BATCHES, PER_EPOCH, SAMPLES, BEST = 3_000, 100, 8, 1_200
HAPPENED = [(400, "pause"), (400, "resume"), (500, "evaluation"), (700, "set"), (1_000, "checkpoint")]
LARGE = {"width": 1280, "height": 1600}
"""All charts can be seen at once."""


def record(where: Path) -> Path:
    """A run whose loss is least at one batch, with commands, a checkpoint and an evaluation; its recording."""
    with Publisher("marked", runs_dir=where) as publisher:
        at = {"batch": 0, "sample": 0, "epoch": 0, "dataloader_len": PER_EPOCH, "max_duration": f"{BATCHES}ba"}
        publisher.publish(Event.FIT_START, **at)
        for batch in range(1, BATCHES + 1):
            at |= {"batch": batch, "sample": SAMPLES * batch, "epoch": (batch - 1) // PER_EPOCH}
            loss = 0.125 if batch == BEST + 1 else 2 + math.cos(batch / 100)
            more = {"batch_in_epoch": (batch - 1) % PER_EPOCH + 1, "batch_size": SAMPLES, "lr": {"SGD": [0.1]}}
            publisher.publish(Event.BATCH_END, **at, **more, loss=loss)
            now = Timestamp(batch=batch).values
            for kind in (kind for place, kind in HAPPENED if place == batch):
                if kind == "evaluation":
                    metrics = {"eval": {"accuracy": 0.75}}
                    publisher.publish(Event.EVAL_END, **at, dataloader_label="eval", eval_metrics=metrics)
                elif kind == "checkpoint":
                    publisher.mark_checkpoint("save", now)
                else:
                    arguments = ("lr", 0.1) if kind == "set" else ()
                    publisher.answer(Command(kind, arguments, f"{kind} {batch}"), Event.BATCH_CHECKPOINT, now)
        publisher.close("finished")
    return where / "marked" / "recording-1.mcap"


@pytest.fixture(scope="module")
def recording() -> Iterator[Path]:
    where = Path(tempfile.mkdtemp(prefix="ol-", dir="/tmp"))
    yield record(where)
    shutil.rmtree(where)


@pytest.fixture(scope="module")
def served(recording: Path) -> Iterator[Dashboard]:
    with ui_of(str(recording)) as started:
        yield started


def _sees_the_whole_run(there: Visit, *charts: str) -> None:
    for chart in charts or (LOSS, RATE, ACCURACY):
        last = 499 if chart == ACCURACY else BATCHES - 1
        there.waits_for(
            lambda chart=chart, last=last: there.points(chart) and there.points(chart)[-1][0] >= last, chart
        )


def _marks(there: Visit, chart: str) -> list[tuple[float, str]]:
    return sorted((round(mark["at"], 3), mark["kind"]) for mark in there.board("marksOf", chart))


def _chosen(there: Visit, chart: str, item: str) -> None:
    """Chooses from the menu of a chart, by the keyboard."""
    there.page.get_by_role("button", name=f"Menu of {MetricNames([chart]).short(chart)}", exact=True).focus()
    there.page.keyboard.press("Enter")
    there.waits_for(lambda: there.page.evaluate("document.activeElement.role") == "menuitem", "an item to begin at")

    def is_reached() -> bool:
        if there.page.evaluate("document.activeElement.innerText") == item:
            return True
        there.page.keyboard.press("ArrowDown")
        return False

    there.waits_for(is_reached, item)
    there.page.keyboard.press("Enter")
    there.page.get_by_role("menu").wait_for(state="detached")


def test_marks_stand_at_their_place_on_each_axis_say_what_happened_and_can_be_left_out(served, browser):
    with visit(browser, served.url, viewport=LARGE) as there:
        page = there.page
        _sees_the_whole_run(there)
        there.waits_for(lambda: _marks(there, LOSS) == HAPPENED and _marks(there, RATE) == HAPPENED, "marks")
        place = there.plot(LOSS, "chart.convertToPixel({xAxisIndex: 0}, 700)")
        box = there.box(LOSS)
        symbol = page.locator(f'[data-chart="{LOSS}"]').get_by_role("img", name=re.compile("'set lr 0.1'"))
        drawn = symbol.bounding_box()
        assert drawn is not None
        assert drawn["x"] + drawn["width"] / 2 - box["x"] == pytest.approx(place, abs=1.5)
        symbol.hover()
        tip = page.get_by_role("tooltip")
        assert "'set lr 0.1' took effect at batch 700" in tip.inner_text()
        assert re.search(r"batch 700 · .*\d\d:\d\d:\d\d", tip.inner_text())
        page.mouse.move(1, 1)
        tip.wait_for(state="detached")
        for axis, per_batch in (("sample", SAMPLES), ("epoch", 1 / PER_EPOCH)):
            page.get_by_role("button", name=axis, exact=True).click()
            expected = [(round(batch * per_batch, 3), kind) for batch, kind in HAPPENED]
            there.waits_for(lambda expected=expected: _marks(there, LOSS) == expected, f"marks by {axis}")
        page.get_by_role("button", name="batch", exact=True).click()
        page.get_by_role("switch", name="marks").click()
        there.waits_for(lambda: page.locator(".chart-mark").count() == 0, "no marks")
        page.reload()
        _sees_the_whole_run(there, LOSS)
        assert page.locator(".chart-mark").count() == 0
        assert page.get_by_role("switch", name="marks").get_attribute("aria-checked") == "false"


def test_a_caption_has_the_best_value_and_many_runs_have_a_table_and_no_marks(recording, served, browser, tmp_path):
    with visit(browser, served.url, viewport=LARGE) as there:
        _sees_the_whole_run(there)
        there.sees(f"best 0.125 @ {BEST:,}")
        there.sees("best 0.75 @ 499")
        assert f"best 0.125 at batch {BEST:,}" in (
            there.page.locator(f'[data-plot="{LOSS}"]').get_attribute("aria-label") or ""
        )
    copies = [tmp_path / f"recording-{number}.mcap" for number in range(1, 6)]
    for copy in copies:
        shutil.copy(recording, copy)
    with ui_of(*map(str, copies)) as five, visit(browser, five.url, viewport=LARGE) as there:
        there.waits_for(lambda: len(there.points(LOSS, 4)) > 0, "the last run")
        there.page.get_by_role("button", name="Values of loss", exact=True).click()
        rows = there.page.get_by_role("region", name="Values of loss").get_by_role("row")
        there.waits_for(lambda: rows.count() == 6, "a row of each")
        assert rows.nth(0).inner_text().split() == ["run", "last", "best", "max"]
        assert f"0.125 @ {BEST:,}" in rows.nth(5).inner_text()
        assert there.page.locator(".chart-mark").count() == 0
        there.page.get_by_role("switch", name="marks").click()
        there.waits_for(lambda: len(_marks(there, LOSS)) == 5 * len(HAPPENED), "marks that are asked for")
        assert "values=loss/train/total&marks=1" in there.page.url


def test_pinned_charts_keep_their_order(served, browser):
    with visit(browser, served.url, viewport=LARGE) as there:
        page = there.page
        _sees_the_whole_run(there)

        def pinned() -> list[str | None]:
            found = page.get_by_role("region", name="pinned", exact=True).locator(".chart")
            return [one.get_attribute("data-chart") for one in found.all()]

        for chart in (RATE, LOSS, ACCURACY):
            _chosen(there, chart, "Pin to the top")
        assert pinned() == [RATE, LOSS, ACCURACY]
        _chosen(there, ACCURACY, "Move left")
        there.waits_for(lambda: pinned() == [RATE, ACCURACY, LOSS], "one further to the left")
        focused = page.evaluate("document.activeElement.ariaLabel")
        assert focused == "Menu of accuracy"
        box = there.box(RATE)
        target = {"x": 20, "y": box["height"] / 2}
        page.locator(f'[data-chart="{LOSS}"] figcaption').drag_to(
            page.locator(f'[data-chart="{RATE}"]'), source_position={"x": 60, "y": 10}, target_position=target
        )
        there.waits_for(lambda: pinned() == [LOSS, RATE, ACCURACY], "one dragged to the front")
        page.reload()
        _sees_the_whole_run(there)
        assert pinned() == [LOSS, RATE, ACCURACY]
        there.waits_for(lambda: there.pixels(LOSS) > 0, "a chart that is drawn")
        _chosen(there, LOSS, "Unpin")
        there.waits_for(lambda: pinned() == [RATE, ACCURACY], "one less")
        there.waits_for(lambda: there.pixels(LOSS) > 0, "it where it was")


@pytest.mark.needs("openssl")
def test_a_viewer_saves_a_chart_as_a_picture_and_all_values_behind_tokens_and_tls(recording, browser, tmp_path):
    key, certificate, tokens = (str(tmp_path / name) for name in ("key.pem", "cert.pem", "tokens.txt"))
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=127.0.0.1"
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    guarded = ("--tokens", tokens, "--certificate", certificate, "--certificate-key", key)
    with ui_of(str(recording), *guarded) as served:
        url = served.url
        view = next(line.split()[1] for line in Path(tokens).read_text().splitlines() if line.startswith("view"))
        dark = {"viewport": LARGE, "color_scheme": "dark", "ignore_https_errors": True}
        with visit(browser, f"{url}?token={view}", **dark) as there:
            _sees_the_whole_run(there)
            there.waits_for(lambda: _marks(there, LOSS) == HAPPENED, "marks")

            def saved(item: str) -> Path:
                with there.page.expect_download() as download:
                    _chosen(there, LOSS, item)
                path = tmp_path / download.value.suggested_filename
                download.value.save_as(path)
                assert path.name == f"marked-loss-train-total{path.suffix}"
                return path

            with Image.open(saved("Save as PNG")) as picture:
                colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24) or ()}
                assert picture.width > 2 * there.box(LOSS)["width"]
                assert picture.height > 2 * there.box(LOSS)["height"]
            assert {(0x17, 0x1C, 0x23), (0x58, 0xA6, 0xFF)} <= colours, "the card and the line in dark"
            texts = """(id) => {
                const board = getElement(Number(document.querySelector(".board").id.slice(1)));
                const { title, legend, xAxis, series } = board.pictureOf({ id, title: id, ranks: [] }).option;
                const marks = series.at(-1).markLine.data.map((one) => one.label.formatter);
                return [title.text, ...legend.data, xAxis.name, ...marks];
            }"""
            assert {LOSS, "marked", "batch", "pause", "checkpoint"} <= set(there.page.evaluate(texts, LOSS))
            with saved("Save all values as CSV").open(newline="") as file:
                rows = list(csv.DictReader(file))
        assert [(int(row["batch"]), int(row["sample"])) for row in rows] == [(b, SAMPLES * b) for b in range(BATCHES)]
        assert [float(row["value"]) for row in rows[BEST : BEST + 2]] == [0.125, 2 + math.cos((BEST + 2) / 100)]
        assert {row["run"] for row in rows} == {"marked"}
        assert float(rows[250]["epoch"]) == 2.5
        with visit(browser, url, ignore_https_errors=True) as stranger:
            assert stranger.page.evaluate("fetch('/export/none').then((answer) => answer.status)") == 401
            stranger.errors.clear()
