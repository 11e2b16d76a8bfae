"""The page of a run, below the charts: its checkpoints, alerts and files, and very many metrics."""

import re
from urllib.parse import urljoin

import pytest
from browser import Shared, visit
from playwright.sync_api import expect

from offloop.bus import Event, Publisher
from offloop.bus.checkpoints.announced import announce_checkpoint
from offloop.bus.runs.alerts import FIRING, RESOLVED, RunAlert, note_alert

pytestmark = pytest.mark.timeout(120)


def test_a_run_shows_its_checkpoints_alerts_stacks_and_profiles_and_gives_no_other_file(
    shared: Shared, browser
) -> None:
    run = shared.runs_dir / "with-files"
    with Publisher(run.name) as publisher:
        publisher.publish(Event.BATCH_END, batch=4, sample=32, loss=0.5)
    (run / "ba4.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    announce_checkpoint(run, run / "ba4.safetensors", 0, 4, None)
    names = ("stacks-1-1.txt", "profile-1-0-5.json.gz", "profile-1-0-6.json.gz")
    text = "rank 0 is in <b>f</b> (a.py:1)\n<script>"
    (run / "stacks-1-1.txt").write_text(text)
    (run / "profile-1-0-5.json.gz").write_bytes(b"trace")
    (run / "profile-1-0-6.json.gz").symlink_to("run.json")
    with visit(browser, shared.url_of(run.name)) as there:
        row = there.page.get_by_role("row").filter(has_text="ba4.safetensors")
        row.filter(has_text="latest").wait_for()
        for status, number in ((FIRING, 1), (RESOLVED, 2), (FIRING, 3)):
            note_alert(run, RunAlert(str(number), status, "rule", f"loss > {number} <b>", 1.7e9 + number, 1, number))
        there.page.locator(".run-head .firing", has_text="2 alerts").wait_for()
        there.waits_for(lambda: there.page.locator(".log .alert").count() == 3, "alerts in the log")
        statuses = there.page.locator(".panel .q-td .mark").filter(has_text="fir")
        assert statuses.all_inner_texts() == ["firing", "fired"]
        there.page.get_by_role("cell", name="rank 0 is in <b>f</b> (a.py:1)").wait_for()
        links = there.page.get_by_role("link", name=re.compile("^(stacks|profile)-")).all()
        addresses = {one.inner_text(): urljoin(shared.served.url, one.get_attribute("href")) for one in links}
        stacks, profile, link = (there.page.request.get(addresses[name]) for name in names)
        assert (stacks.text(), stacks.headers["content-type"]) == (text, "text/plain; charset=utf-8")
        assert (profile.body(), link.status) == (b"trace", 404)
        assert there.page.request.get(addresses["stacks-1-1.txt"].replace("stacks-1-1.txt", "run.json")).status == 404
        there.page.get_by_role("link", name="drop it into Perfetto").first.wait_for()
        expect(there.page.locator(".panel", has_text="Console")).to_be_hidden()


def test_of_very_many_metrics_the_chosen_ones_are_drawn_and_shown_in_the_table_of_runs(shared: Shared, browser) -> None:
    with Publisher("with-very-many-metrics") as publisher:
        for step in range(3):
            values = {f"moe/layer_{part // 100}/expert_{part % 100:02}/load": part + step for part in range(3000)}
            publisher.log(values | {f"moe/<b>{step}</b>": step}, step=step)
    with visit(browser, shared.served.url) as there:
        there.page.get_by_role("button", name="Columns").click()
        there.sees("more: find them by name")
        there.page.get_by_label("Find columns by name").fill("layer_7/expert_42")
        column = there.page.get_by_role("group", name="moe/layer_7/expert_42/load")
        column.get_by_role("button", name="max").click()
        there.page.keyboard.press("Escape")
        link = there.page.get_by_role("link", name="with-very-many-metrics", exact=True)
        row = there.page.locator("tbody tr", has=link)
        there.waits_for(lambda: "744" in row.inner_text(), "its value in the table")
        link.click()
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
