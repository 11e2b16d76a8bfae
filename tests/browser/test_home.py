"""The page of all runs in a real browser: what is found there, what is said of runs, and the way to their own pages."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from axe import DARK_PHONE, has_nothing_serious
from browser import Dashboard, Visit, running, ui_of, visit
from playwright.sync_api import Error
from run_folders import write_run

from offloop.bus.index.annotations import read_annotations
from offloop.consumers.dashboard.web.access import Tokens

pytestmark = pytest.mark.timeout(180)

LOSS = "loss/train/total"
RATES = (0.1, 0.01, 0.001)
SEEDS = (1, 2, 3, 4)
BEST = "rate-0.1-seed-4"
HOSTILE = "<img src=x onerror='window.attacked = 1'>&run=\u202eevil"


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    where = Path(tempfile.mkdtemp(prefix="ol-", dir="/tmp"))
    for rate in RATES:
        for seed in SEEDS:
            config = {"lr": rate, "seed": seed, "width": 32, "text": "<b>bold</b>"}
            losses = [1 / batch + seed - rate for batch in (1, 2, 3)]
            status = "failed" if (rate, seed) == (0.001, 1) else "finished"
            accuracy = rate + 0.1 * seed + 0.003
            write_run(where, f"rate-{rate}-seed-{seed}", losses, accuracy, status, config=config)
    yield where
    shutil.rmtree(where)


@pytest.fixture(scope="module")
def served(template: Path) -> Iterator[Dashboard]:
    with ui_of(str(template)) as started:
        yield started


@pytest.fixture(scope="module")
def runs(template: Path) -> Iterator[Path]:
    where = Path(tempfile.mkdtemp(prefix="ol-", dir="/tmp"))
    shutil.copytree(template, where, dirs_exist_ok=True)
    yield where
    shutil.rmtree(where, ignore_errors=True)


@pytest.fixture(scope="module")
def own(runs: Path) -> Iterator[Dashboard]:
    with ui_of(str(runs)) as started:
        yield started


def rows(there: Visit) -> list[str]:
    try:
        return list(there.page.locator(".table-box tbody .name a").all_inner_texts())
    except Error:
        return []


def shows(there: Visit, count: int) -> None:
    there.waits_for(lambda: len(rows(there)) == count, f"{count} runs")


def find(there: Visit, text: str) -> None:
    there.page.get_by_label("Search or filter runs").fill(text)


def row(there: Visit, name: str):
    return there.page.locator("tbody tr", has=there.page.get_by_role("link", name=name, exact=True))


def words(locator) -> str:
    return " ".join(locator.inner_text().split())


def test_runs_are_found_by_expressions_and_by_words_and_mistakes_are_explained(served, browser):
    with visit(browser, served.url) as there:
        shows(there, 12)
        find(there, "lr < 0.005 and status == finished")
        shows(there, 3)
        assert {name[:10] for name in rows(there)} == {"rate-0.001"}
        there.sees("3 of 12 runs")
        find(there, "lr < 0.005 and stat == finished")
        there.sees("no run has 'stat'")
        assert len(rows(there)) == 3, "what was found before stays"
        find(there, "SEED-2 rate")
        there.waits_for(lambda: {name[-6:] for name in rows(there)} == {"seed-2"}, "those with both words")
        assert there.page.locator(".home-error").count() == 0
        find(there, "nothing of that name")
        there.sees("No run is found by that.")
        there.page.get_by_role("button", name="Show all runs").click()
        shows(there, 12)


def test_a_link_keeps_what_is_found_sorted_shown_and_selected(template, tmp_path, browser):
    file = tmp_path / "tokens.txt"
    with ui_of(str(template), "--tokens", str(file)) as served:
        _keeps_all_in_a_link(f"{served.url}?token={Tokens.load(file).command}", browser)


def _keeps_all_in_a_link(url, browser):
    with visit(browser, url, viewport={"width": 1600, "height": 900}) as there:
        shows(there, 12)
        find(there, "seed >= 3")
        shows(there, 6)
        there.page.get_by_role("button", name="loss", exact=True).click()
        there.page.get_by_role("button", name="Columns").click()
        there.page.get_by_role("dialog", name="Columns").wait_for()
        has_nothing_serious(there)
        there.page.get_by_label("Find columns by name").fill("wid")
        there.page.get_by_label("config/width").check()
        there.page.keyboard.press("Escape")
        there.page.get_by_label(f"Select {BEST}").check()

        def is_as_it_was(other: Visit) -> None:
            shows(other, 6)
            assert other.page.locator("th[aria-sort=ascending]").inner_text().startswith("loss")
            assert "width" in other.page.locator("thead th").all_inner_texts()
            assert other.page.get_by_label(f"Select {BEST}").is_checked()
            other.sees("1 selected")

        is_as_it_was(there)
        order = rows(there)
        there.page.reload()
        is_as_it_was(there)
        assert rows(there) == order
        there.page.get_by_role("button", name="Link for viewers").click()
        link = there.page.get_by_role("textbox", name="Link for viewers").input_value()
    with visit(browser, link, viewport={"width": 1600, "height": 900}) as viewer:
        is_as_it_was(viewer)
        assert viewer.page.locator(".tag-add, .tag-form, button.note").count() == 0
        row(viewer, BEST).get_by_role("button", name="Actions for").click()
        items = viewer.page.get_by_role("menuitem")
        viewer.waits_for(lambda: items.all_inner_texts() == ["Open", "Use as the baseline"], "what changes nothing")
        viewer.page.keyboard.press("Escape")
        viewer.page.get_by_role("link", name=BEST).click()
        viewer.page.wait_for_url("**/runs?run=*")
        viewer.page.get_by_text("view only").wait_for()


def test_tags_notes_and_pins_are_kept_with_the_run_and_seen_by_others(runs, own, browser):
    name = "rate-0.01-seed-2"
    wide = {"width": 1700, "height": 900}
    with visit(browser, own.url, viewport=wide) as there, visit(browser, own.url, viewport=wide) as other:
        for page in (there, other):
            find(page, "rate-0.01-")
        there.waits_for(lambda: name in rows(there), "the run")
        row(there, name).get_by_role("button", name="Add a tag").click()
        there.page.keyboard.type("baseline, to <keep>")
        there.page.keyboard.press("Enter")
        row(there, name).get_by_role("button", name="Note of").click()
        there.page.keyboard.type("the first one")
        there.page.keyboard.press("Enter")
        row(other, name).get_by_text("to <keep>").wait_for()
        row(other, name).get_by_text("the first one").wait_for()
        said = read_annotations(runs / name)
        assert (said.tags, said.note) == (("baseline", "to <keep>"), "the first one")
        row(there, name).get_by_role("button", name="Add a tag").click()
        there.page.keyboard.type("a" * 65)
        there.page.keyboard.press("Enter")
        there.sees("is not a tag: use 1 to 64 characters")
        row(there, name).get_by_role("button", name="Remove the tag baseline").click()
        there.waits_for(lambda: read_annotations(runs / name).tags == ("to <keep>",), "one tag less")
        has_nothing_serious(there)
        row(there, name).get_by_role("button", name="Actions for").click()
        there.page.get_by_role("menuitem", name="Pin").wait_for()
        has_nothing_serious(there)
        there.page.get_by_role("menuitem", name="Pin").click()
        there.waits_for(lambda: rows(there)[0] == name and rows(other)[0] == name, "it at the top")
        # Escape leaves a note as it was.
        row(there, name).get_by_role("button", name="Note of").click()
        there.page.keyboard.type("not this")
        there.page.keyboard.press("Escape")
        row(there, name).get_by_role("button", name="to <keep>", exact=True).click()
        there.waits_for(lambda: rows(there) == [name], "the one with that tag")
        assert read_annotations(runs / name).note == "the first one"


def test_selected_runs_are_drawn_over_one_another_beside_what_differs_in_them(served, browser):
    names = ("rate-0.1-seed-1", "rate-0.01-seed-1")
    with visit(browser, served.url) as there:
        shows(there, 12)
        for name in names:
            there.page.get_by_label(f"Select {name}", exact=True).check()
        there.page.get_by_role("link", name="Compare").click()
        for run in (0, 1):
            there.waits_for(lambda run=run: len(there.points(LOSS, run)) == 3, "a line of each")
        there.waits_for(lambda: there.pixels(LOSS) > 0, "them drawn")
        table = there.page.get_by_label("Hyperparameters")
        first = table.locator("tbody tr").first
        there.waits_for(lambda: first.locator("td").all_inner_texts() == ["config/lr", "≠", "0.1", "0.01"], "the rates")
        same = table.get_by_text("config/width")
        assert same.count() == 0, "what is the same in both"
        there.page.get_by_role("switch", name="also equal values").click()
        same.wait_for()
        there.page.get_by_role("link", name="all runs").click()
        there.sees("2 selected")
        row(there, BEST).get_by_role("link").click()
        there.waits_for(lambda: len(there.points(LOSS)) == 3, "its own page")


def test_runs_are_grouped_with_mean_and_range_and_a_group_is_compared(served, browser):
    wide = {"width": 1600, "height": 900}
    with visit(browser, served.url, viewport=wide) as there:
        shows(there, 12)
        there.page.get_by_role("button", name="accuracy").click()
        there.page.get_by_label("Group by", exact=True).select_option("config/lr")
        head = there.page.get_by_role("button", name="lr: 0.1, 4 runs")
        head.wait_for()

        def groups() -> list[str]:
            return there.page.locator(".group-toggle").evaluate_all("all => all.map((one) => one.ariaLabel)")

        assert groups() == [f"lr: {rate}, 4 runs" for rate in RATES], "by their means"
        first = words(there.page.locator(".group-head").first)
        assert "mean 0.353 0.203 to 0.503" in first
        assert "4 finished" in first
        there.page.get_by_role("button", name="accuracy").click()
        there.waits_for(lambda: groups() == [f"lr: {rate}, 4 runs" for rate in reversed(RATES)], "the lowest first")
        head.click()
        shows(there, 8)
        assert head.get_attribute("aria-expanded") == "false"
        link = there.page.url
    with visit(browser, link, viewport=wide) as other:
        shows(other, 8)
        other.page.get_by_role("button", name="lr: 0.1, 4 runs").click()
        for number in (1, 2, 3, 4):
            other.page.get_by_role("checkbox", name=f"Select rate-0.1-seed-{number}").check()
        other.sees("4 selected")
        compare = other.page.get_by_role("link", name="Compare")
        assert compare.get_attribute("href").endswith("&group=config/lr")
        compare.click()
        other.waits_for(lambda: other.page.get_by_role("article").count() == 4, "the four runs")
        other.waits_for(lambda: other.pixels(LOSS) > 0, "a chart")
        has_nothing_serious(other)
    compared = f"runs?run={BEST}&run=rate-0.1-seed-1&baseline={BEST}"
    for view, text in (("#baseline=rate-0.01-seed-2", "+0.1 better"), (compared, BEST)):
        with visit(browser, served.url + view, **DARK_PHONE) as phone:
            phone.page.get_by_text(text).first.wait_for()
            width = phone.page.evaluate("document.documentElement.scrollWidth")
            assert view is not compared or width <= DARK_PHONE["viewport"]["width"]
            has_nothing_serious(phone)


def test_live_runs_move_and_ended_ones_are_archived_and_deleted_after_a_question_that_names_the_size(
    runs, own, browser, monkeypatch
):
    monkeypatch.setenv("OFFLOOP_RUNS_DIR", str(runs))
    with visit(browser, own.url) as there:
        find(there, "rate-0.001")
        shows(there, 4)
        there.page.get_by_label("Select all runs that are found").check()
        there.page.get_by_role("button", name="Archive", exact=True).click()
        shows(there, 0)
        there.sees("4 archived")
        there.page.get_by_role("switch", name="archived").click()
        shows(there, 4)
        assert all(read_annotations(path).archived for path in runs.glob("rate-0.001*"))
        there.page.reload()
        find(there, "seed == 1 or status == live")
        shows(there, 3)
        with running("living") as run:
            shows(there, 4)
            live = row(there, "living")
            live.get_by_text("live", exact=True).wait_for()

            def batch() -> int:
                text = live.locator(".of-progress").inner_text()
                return int(text.split()[1].replace(",", "")) if text else 0

            before = there.waits_for(batch, "a batch")
            there.waits_for(lambda: batch() > before, "a later one")
            there.page.get_by_label("Select all runs that are found").check()
            there.page.get_by_role("button", name="Delete…").click()
            there.sees("living: cannot be deleted before the training ends")
            question = there.page.get_by_role("alertdialog")
            there.sees("Delete these 3 runs?")
            assert "KiB" in question.inner_text()
            question.get_by_role("button", name="Keep").click()
            question.wait_for(state="hidden")
            assert sum(path.name.endswith("seed-1") for path in runs.iterdir()) == 3
            there.page.get_by_role("button", name="Delete…").click()
            question.get_by_role("button", name="Delete").click()
            there.waits_for(lambda: rows(there) == ["living"], "the live one alone")
            assert not [path.name for path in runs.iterdir() if path.name.endswith("seed-1")]
            find(there, "living")
            run.terminate()
        live.get_by_text("lost", exact=True).wait_for()


def test_what_comes_from_runs_is_text(runs, own, browser):
    hostile = runs / HOSTILE
    shutil.copytree(runs / BEST, hostile)
    said = {"tags": ["<i>tag</i>", "\u202egat"], "note": "<script>window.attacked = 1</script>\u202e"}
    (hostile / "annotations.json").write_text(json.dumps(said))
    about = json.loads((hostile / "run.json").read_text())
    about["attempts"][-1] |= {"status": "failed", "error": "<b onmouseover='window.attacked = 1'>error</b>"}
    (hostile / "run.json").write_text(json.dumps(about))
    with visit(browser, f"{own.url}#column=tags&column=note&column=error&column=config/text&find=run+~+img") as there:
        shows(there, 1)
        texts = there.page.locator("tbody tr").filter(has_text="img").inner_text()
        for text in ("<img src=x", "<i>tag</i>", "\\u202egat", "<script>", "<b onmouseover", "<b>bold</b>"):
            assert text in texts, texts
        assert "\u202e" not in there.page.locator("body").inner_text()
        there.page.locator("tbody .name a").first.click()
        there.waits_for(lambda: len(there.points(LOSS)) == 3, "its page")
        for attack in ("../..", "/etc", f"{runs}/{BEST}", "<img src=x onerror='window.attacked = 1'>"):
            there.page.goto(f"{own.url}runs")
            there.page.goto(there.page.url + "?run=" + attack)
            there.sees("There is no run")
        assert there.page.evaluate("window.attacked") is None
