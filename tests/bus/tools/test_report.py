"""``offloop export --to html`` and ``--to svg``: files for people, with what was recorded, whatever they contain."""

import base64
import hashlib
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from helpers import wait_for
from run_folders import WrittenRun, write_run

from offloop.bus import ConfigurationError, Event, Publisher, find_run
from offloop.bus.cli.main import bus
from offloop.bus.cli.recordings import export_recording
from offloop.bus.index.annotations import annotate
from offloop.bus.tools import report

EVIL = "<script>document.title='hacked'</script><img src=x onerror=alert(1)>\"'&\x1b\u202e"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(export_recording, [str(argument) for argument in arguments], catch_exceptions=False)


class Read(HTMLParser):
    """The elements of a file, and the text of each, by nesting."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.whole = path.read_text("utf-8")
        self.feed(self.whole)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self._open):
            self.texts[tag][-1] += data

    def points(self, line: int = 0, *, is_cut: bool = False) -> list[tuple[float, float]]:
        """Return the steps and values of a line, which is drawn at places that fit, unless outliers are cut off."""
        place = [place for place, (tag, _) in enumerate(self.tags) if tag == "g"][line]
        told = [tuple(map(float, point.split())) for point in str(self.tags[place][1]["data-points"]).split(",")]
        path = next(str(about["d"]) for tag, about in self.tags[place:] if tag == "path")
        drawn = [(float(x), float(y)) for x, y in re.findall(r"[ML]([^,]+),([^ML]+)", path)]
        for known, places in () if is_cut else zip(zip(*told, strict=True), zip(*drawn, strict=True), strict=True):
            least, most = known.index(min(known)), known.index(max(known))
            unit = (places[most] - places[least]) / ((known[most] - known[least]) or 1)
            assert [places[least] + (one - known[least]) * unit for one in known] == pytest.approx(places, abs=0.2)
        return [(step, value) for step, value in told]


def exported(*arguments: object) -> Read:
    run(*arguments, "--to", "html", "-o", "out.html", "--force")
    return Read(Path("out.html"))


@pytest.fixture(autouse=True)
def folder(runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_one_file_has_a_run_with_all_that_people_ask_for(runs_dir: Path) -> None:
    losses = [math.exp(-batch / 50) for batch in range(200)]
    written = WrittenRun(runs_dir, "digits", {"config": {"lr": 0.1, "evil": EVIL}, "version": {"torch": "2.9"}})
    path = written.train(losses[:100], 0.5).train(losses[100:], 0.75).end("failed", f"RuntimeError: {EVIL}\n  line two")
    annotate(path, add=["good"], note=f"a note {EVIL}")
    assert run("digits", "--to", "html").output.startswith("wrote digits.html, ")

    read = Read(Path("digits.html"))
    value = f"{losses[-1]:.6f}"
    assert read.texts["figcaption"] == [f"loss{value} best {value}", "Accuracy0.75 best 0.75", "lr0.1 "]
    drawn = read.points()
    assert [step for step, _ in drawn] == list(range(200))
    assert [value for _, value in drawn] == pytest.approx(losses, rel=1e-5)
    assert read.points(1) == [(99, 0.5), (199, 0.75)]
    rows = read.texts["tr"]
    assert "config/lr0.1" in rows
    assert "version/torch2.9" in rows
    (error,) = read.texts["pre"]
    assert error.endswith("\n  line two")
    assert "failed" in read.texts["article"][0]
    assert "tags good" in read.texts["article"][0]

    # No part of the run is markup, nothing comes from elsewhere, and the only script is ours.
    assert "\x1b" not in read.whole
    assert "\u202e" not in read.whole
    assert "img" not in {tag for tag, _ in read.tags}
    assert not re.search(r"https?:|//\w|url\(|@import", re.sub(r"// .*|http://www.w3.org/2000/svg", "", read.whole))
    attributes = {name for _, about in read.tags for name in about}
    assert not {name for name in attributes if name.startswith("on")} | (attributes & {"src", "href", "style"})
    (policy,) = (about["content"] for _, about in read.tags if about.get("http-equiv") == "Content-Security-Policy")
    assert str(policy).startswith("default-src 'none'; ")
    for tag in ("style", "script"):
        (text,) = read.texts[tag]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in str(policy)


FAILING = """
from offloop import Publisher
publisher = Publisher("failing")
publisher.publish("batch_end", batch=1, loss=1.0)
print("not captured")
%s RuntimeError("no <b>luck</b>")
"""


@pytest.mark.parametrize("end", ["with publisher: raise", "raise"])
def test_a_failed_run_has_its_traceback_although_nothing_else_is_captured(runs_dir: Path, end: str) -> None:
    training = [sys.executable, "-c", FAILING % end]
    assert subprocess.run(training, capture_output=True, timeout=60, check=False).returncode
    wait_for(lambda: find_run("failing").status == "failed", "the end of the run")
    (shown,) = exported("failing").texts["pre"]
    assert shown.startswith("Traceback (most recent call last):\n")
    assert shown.endswith("RuntimeError: no <b>luck</b>")
    assert CliRunner().invoke(bus, ["show", "failing"]).output.endswith(f"{shown}\n")
    assert (runs_dir / "failing" / "console-1-0.log").read_text() == f"{shown}\n"


def test_several_runs_are_drawn_over_one_another(runs_dir: Path) -> None:
    write_run(runs_dir, "a", [3.0, 2.0], 0.5, optimizer="SGD", seed=1)
    write_run(runs_dir, "b", [4.0, 1.0], 0.25, optimizer="Adam", seed=1)
    read = exported("a", "b")
    assert read.texts["h1"] == ["2 runs"]
    assert read.points(0) == [(0, 3), (1, 2)]
    assert read.points(1) == [(0, 4), (1, 1)]
    assert read.texts["figcaption"][:2] == ["loss2 best 21 best 1", "Accuracy0.5 best 0.50.25 best 0.25"]
    assert "optimizerSGDAdam" in read.texts["tr"]
    assert "optimizer" in read.texts["b"]
    assert "seed" not in read.texts["b"]
    with pytest.raises(ConfigurationError, match="9 runs are too many for one file: name up to 8"):
        run(*["a"] * 9, "--to", "html")


def test_a_resumed_attempt_replaces_what_it_repeats(runs_dir: Path) -> None:
    for begin, losses in ((1, [5.0, 4.0, 3.0]), (2, [9.0, 1.0, 1.0])):
        with Publisher("twice", resume=True) as publisher:
            for batch, loss in enumerate(losses, begin):
                publisher.publish(Event.BATCH_END, batch=batch, loss=loss)
    read = exported("twice")
    assert [value for _, value in read.points()] == [5, 4, 1, 1]
    assert "attempts 2" in read.texts["article"][0]


def test_tables_are_bounded(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Publisher("samples") as publisher:
        publisher.publish(Event.FIT_START)
        for step in range(5):
            rows = [{"prompt": f"{step}-{row} {EVIL}", "long": "x" * 5000, "reward": row / 7} for row in range(30)]
            publisher.log_table("completions", rows, step=step)
        publisher.log_table("other", [{"a": [1, None]}])
    read = exported("samples")
    assert "completions the last 100 of 150 rows" in read.texts["h2"]
    rows = [row for row in read.texts["tr"] if row.startswith(tuple("01234"))]
    assert rows[-2].startswith(f"44-29 {EVIL[:40]}")
    assert "x" * 1000 + "…" in rows[-2]
    assert "4.1429" in rows[-2]
    assert len(read.whole) < 200_000
    assert "other rows: 1" in read.texts["h2"]
    write_run(runs_dir, "without")
    assert "completions" not in str(exported("samples", "without", "--table", "other").texts["h2"])
    with pytest.raises(ConfigurationError, match="has no table 'others'"):
        exported("samples", "--table", "others")
    monkeypatch.setattr(report, "MAX_TABLE", 20_000)
    assert any("completions the last 1" in title for title in exported("samples").texts["h2"])


def test_of_very_many_metrics_some_are_drawn(runs_dir: Path) -> None:
    written = WrittenRun(runs_dir, "many")
    for step in range(3):
        written.batch += 1
        values: dict[str, Any] = {f"layer/{number:05}": number + step for number in range(20_000)}
        written.send(Event.BATCH_END, {"loss": 1.0, "logged": [[step, values]]})
    written.end()
    output = run("many", "--to", "html").output
    assert "without 19,900 metrics: choose some with '--metrics'" in output
    read = Read(Path("many.html"))
    assert len(read.texts["figure"]) == 100
    assert read.texts["figcaption"][0] == "loss1 best 1"
    assert "Charts of 100 metrics; 19,900 are left out" in read.texts["h2"]
    assert Path("many.html").stat().st_size < 500_000
    read = exported("many", "--metrics", "layer/19997,loss")
    assert read.texts["figcaption"] == ["layer/1999719,999 ", "loss1 best 1"]
    with pytest.raises(ConfigurationError, match="there is no metric 'nothing'"):
        exported("many", "--metrics", "nothing")


def test_values_that_are_not_finite_and_outliers(runs_dir: Path) -> None:
    values = [1.0, 2.0, math.nan, 1.0, 2.0, math.inf, 1e308, *[1.0, 2.0] * 100, 1e9]
    write_run(runs_dir, "odd", values)
    write_run(runs_dir, "nan", [math.nan])
    read = exported("odd")
    assert [step for step, _ in read.points(is_cut=True)][:6] == [0, 1, 3, 4, 7, 8]
    assert sum("cut off: up to 1e9" in text for text in read.texts["text"]) == 1
    assert {"1", "1.5", "2"} <= set(read.texts["text"])
    assert "lossNaN " in exported("nan").texts["figcaption"]


def test_the_chart_of_a_metric_for_a_slide(runs_dir: Path) -> None:
    write_run(runs_dir, "a", [3.0, 2.0])
    write_run(runs_dir, "b", [4.0, 1.0])
    assert re.fullmatch(r"wrote a-b\.svg, [\d.]+ KiB\n", run("a", "b", "--to", "svg", "--metrics", "loss").output)
    root = ElementTree.parse("a-b.svg").getroot()
    assert (root.tag, root.get("width"), root.get("height")) == ("{http://www.w3.org/2000/svg}svg", "1920", "1080")
    texts = ["".join(one.itertext()) for one in root.iter() if one.tag.endswith("}text")]
    assert {"loss", "a", "b", "step", "0", "1", "4"} <= set(texts)
    for arguments in ((), ("--metrics", "loss,lr"), ("--metrics", "loss", "--events", "batch_end")):
        assert CliRunner().invoke(export_recording, ["a", "--to", "svg", *arguments]).exit_code == 2
    assert CliRunner().invoke(export_recording, ["a", "b", "--to", "csv"]).exit_code == 2
    with pytest.raises(ConfigurationError, match=r"a-b\.svg exists"):
        run("a", "b", "--to", "svg", "--metrics", "loss")
