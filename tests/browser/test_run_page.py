"""The page of a run, below the charts: images over the steps, checkpoints, alerts, and what the run says."""

import re
import sys
import textwrap
from pathlib import Path
from urllib.parse import urljoin

import pytest
from browser import Visit, commanded, ui_of, visit

from offloop.bus import Event, Publisher
from offloop.bus.checkpoints.announced import announce_checkpoint
from offloop.bus.runs.alerts import FIRING, RESOLVED, RunAlert, note_alert

pytestmark = pytest.mark.timeout(120)

CONSUMER = (sys.executable, "-m", "offloop.consumers", "-o", "dashboard.port=0", "--log", "")

PICTURES = textwrap.dedent("""
    import numpy as np
    from offloop.consumers import Callback

    class Pictures(Callback):
        def batch_end(self, state, logger):
            batch = int(state.timestamp.batch)
            logger.log_images(np.full((3, 4, 4), 10 * batch, np.uint8), name="__proto__")
            if batch % 2:
                logger.log_images([np.full((2, 2), batch / 10)] * 2, name="maps")
""")


@pytest.fixture
def run(runs_dir: Path) -> Path:
    with Publisher("r", info={"config": {"lr": 0.5}}) as publisher:
        publisher.publish(Event.FIT_START, hyperparameters={"config": {"lr": 0.5, "width": 32}})
        for batch in range(1, 7):
            publisher.publish(Event.BATCH_END, batch=batch, sample=8 * batch, batch_size=8, loss=1 / batch)
    return runs_dir / "r"


def pixels(there: Visit, name: str) -> list[list[int]]:
    code = """(name) => [...document.querySelectorAll(`section[aria-label="${name}"] img`)].map((image) => {
        if (!image.complete || !image.naturalWidth) return null;
        const canvas = document.createElement("canvas");
        canvas.width = canvas.height = 1;
        const context = canvas.getContext("2d");
        context.drawImage(image, 0, 0);
        return [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)];
    })"""
    return list(there.page.evaluate(code, name))


def test_images_of_every_step_are_loaded_when_they_are_chosen_and_a_link_leads_to_all_runs(
    run: Path, tmp_path: Path, browser
) -> None:
    (tmp_path / "pictures.py").write_text(PICTURES)
    callbacks = f"dashboard,{tmp_path / 'pictures.py'}:Pictures"
    with commanded(*CONSUMER, "--callbacks", callbacks, "--replay", str(run)) as served:
        served.has_said("stays at")
        with visit(browser, served.url, viewport={"width": 1280, "height": 2000}) as there:
            asked: list[str] = []
            there.page.on("request", lambda request: asked.append(request.url))
            there.waits_for(lambda: pixels(there, "__proto__") == [[60] * 3], "the newest image")
            slider = there.page.get_by_label("Step of __proto__")
            slider.focus()
            there.page.keyboard.press("ArrowLeft")
            there.waits_for(lambda: slider.get_attribute("aria-valuetext") == "batch 5", "the step in words")
            there.waits_for(lambda: pixels(there, "__proto__") == [[50] * 3], "the one before")
            there.page.keyboard.press("Home")
            there.waits_for(lambda: pixels(there, "__proto__") == [[10] * 3], "the first")
            assert pixels(there, "maps") == [[128] * 3] * 2, "other names stay where they are"
            assert not [url for url in asked if "step=3" in url and "__proto__" in url], "not those between"
            there.page.get_by_role("button", name="Newest of __proto__").click()
            there.waits_for(lambda: pixels(there, "__proto__") == [[60] * 3], "the newest again")
            there.page.get_by_role("link", name="all runs").click()
            there.page.get_by_role("link", name="r", exact=True).click()
            there.page.get_by_role("article", name="Run r", exact=True).wait_for()


def test_a_run_shows_its_checkpoints_and_alerts(run: Path, browser) -> None:
    (run / "ba4.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    announce_checkpoint(run, run / "ba4.safetensors", 0, 4, None)
    with ui_of(str(run.parent)) as served, visit(browser, f"{served.url}runs?run=r") as there:
        row = there.page.get_by_role("row").filter(has_text="ba4.safetensors")
        row.filter(has_text="latest").wait_for()
        for status, number in ((FIRING, 1), (RESOLVED, 2), (FIRING, 3)):
            note_alert(run, RunAlert(str(number), status, "rule", f"loss > {number} <b>", 1.7e9 + number, 1, number))
        there.page.locator(".run-head .firing", has_text="2 alerts").wait_for()
        there.waits_for(lambda: there.page.locator(".log .alert").count() == 3, "alerts in the log")
        statuses = there.page.locator(".panel .q-td .mark").filter(has_text="fir")
        assert statuses.all_inner_texts() == ["firing", "fired"]


def test_a_run_shows_its_stacks_and_profiles_and_gives_no_other_file(run: Path, browser) -> None:
    names = ("stacks-1-1.txt", "profile-1-0-5.json.gz", "profile-1-0-6.json.gz")
    text = "rank 0 is in <b>f</b> (a.py:1)\n<script>"
    (run / "stacks-1-1.txt").write_text(text)
    (run / "profile-1-0-5.json.gz").write_bytes(b"trace")
    (run / "profile-1-0-6.json.gz").symlink_to("run.json")
    with ui_of(str(run.parent)) as served, visit(browser, f"{served.url}runs?run=r") as there:
        there.page.get_by_role("cell", name="rank 0 is in <b>f</b> (a.py:1)").wait_for()
        links = there.page.get_by_role("link", name=re.compile("^(stacks|profile)-")).all()
        addresses = {one.inner_text(): urljoin(served.url, one.get_attribute("href")) for one in links}
        stacks, profile, link = (there.page.request.get(addresses[name]) for name in names)
        assert (stacks.text(), stacks.headers["content-type"]) == (text, "text/plain; charset=utf-8")
        assert (profile.body(), link.status) == (b"trace", 404)
        assert there.page.request.get(addresses["stacks-1-1.txt"].replace("stacks-1-1.txt", "run.json")).status == 404
        there.page.get_by_role("link", name="drop it into Perfetto").first.wait_for()


def test_of_very_many_metrics_the_chosen_ones_are_drawn(runs_dir: Path, browser) -> None:
    with Publisher("many") as publisher:
        for step in range(3):
            values = {f"moe/layer_{part // 100}/expert_{part % 100:02}/load": part + step for part in range(3000)}
            publisher.log(values | {f"moe/<b>{step}</b>": step}, step=step)
    with ui_of(str(runs_dir)) as served:
        with visit(browser, f"{served.url}runs?run=many") as there:
            there.sees("3,003 metrics: choose those to draw")
            metrics = there.page.get_by_role("region", name="Metrics")
            assert there.page.locator(".plot").count() == 0, "nothing is drawn until it is chosen"
            metrics.get_by_role("button", name="moe/ 3,003").click()
            metrics.get_by_role("button", name="layer_7/ 100").click()
            metrics.get_by_role("button", name="expert_42/ 1", exact=True).click()
            metrics.get_by_role("checkbox", name="load").check()
            chart = "moe/layer_7/expert_42/load"
            there.waits_for(lambda: [y for _, y in there.points(chart)] == [742, 743, 744], "its values")
            there.page.get_by_label("Find charts by name").fill("12/EXPERT_1")
            there.sees("10 of 3,003 metrics have '12/EXPERT_1' in their names")
            assert there.page.locator(".plot").count() == 1, "the chosen one stays"
            metrics.get_by_role("button", name="draw 10 of them").click()
            there.waits_for(lambda: there.page.locator(".plot").count() == 11, "those that are found")
            found = "moe/layer_12/expert_10/load"
            there.waits_for(lambda: [y for _, y in there.points(found)] == [1210, 1211, 1212], "their values")
            assert there.page.locator("*").count() < 2500
            link = there.page.url
        with visit(browser, link) as there:
            there.waits_for(lambda: there.points(chart), "a link has what is chosen")
            there.page.get_by_role("button", name="draw none").click()
            there.waits_for(lambda: there.page.locator(".plot").count() == 0, "nothing")
