"""The file of ``offloop export --to html`` in a browser: from disk, without network, with and without scripts."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from playwright.sync_api import Browser
from run_folders import WrittenRun

from offloop.bus.cli.recordings import export_recording

EVIL = "<script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\">"


@pytest.mark.parametrize("has_scripts", [True, False])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_from_disk(runs_dir: Path, tmp_path: Path, browser: Browser, has_scripts: bool, scheme: str) -> None:
    for name, losses in (("one", [4.0, 3.0, 2.0]), ("two", [1.0, 1.0, 1.0])):
        WrittenRun(runs_dir, name, {"config": {"evil": EVIL}}).train(losses).end("failed", EVIL)
    path = tmp_path / "report.html"
    done = CliRunner().invoke(export_recording, ["one", "two", "--to", "html", "-o", str(path)])
    assert done.exit_code == 0, done.output
    context = browser.new_context(offline=True, java_script_enabled=has_scripts, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    asked: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(path.as_uri())
    assert asked == [path.as_uri()]
    assert page.title() == "2 runs · offloop"
    line = page.locator("figure").first.locator(".line.c0 path").first
    box = line.bounding_box()
    assert box is not None
    assert box["width"] > 200
    assert box["height"] > 50
    plot = page.locator("figure").first.locator(".plot")
    tips = page.locator(".tip")
    plot.hover(position={"x": 5, "y": 60})
    if has_scripts:
        assert tips.inner_text().splitlines() == ["step 0", "one 4", "two 1"]
        page.mouse.move(2, 2)
    assert tips.count() == 0
    if has_scripts:
        color = line.evaluate("path => getComputedStyle(path).stroke")
        assert color == ("rgb(31, 111, 235)" if scheme == "light" else "rgb(88, 166, 255)")
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(245, 246, 248)" if scheme == "light" else "rgb(14, 17, 22)")
    page.set_viewport_size({"width": 390, "height": 800})
    assert has_scripts is False or page.evaluate("document.documentElement.scrollWidth") <= 390
    assert said == []
    context.close()
