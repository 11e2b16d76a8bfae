"""The tables and spans behind a run's page: found, sorted and counted, and requested only while somebody looks."""

import io
import math
import time

import msgspec
import numpy as np
import PIL.Image
import pytest
from helpers import wait_for

from offloop.bus import Event, Image, Publisher, Snapshot
from offloop.bus.errors import ConfigurationError
from offloop.bus.runs.directory import find_run
from offloop.bus.types.event import ANY_CUSTOM, ANY_TABLE
from offloop.consumers.dashboard.view import own_events
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.view.spans import Spans
from offloop.consumers.dashboard.view.tables import Filter, Search, TableStore
from offloop.consumers.dashboard.web.follow import FollowedRuns
from offloop.consumers.dashboard.web.tables import TablesAsk, answer
from offloop.consumers.runner.places import FolderRuns

HOSTILE = "x'); DROP TABLE t0; --\"%_\\"


def rows_of(columns, rows, step=0, table="samples", **fields):
    event = Event(f"#{table}")
    return Snapshot.build(event, step=step, columns=columns, rows=rows, **fields)


@pytest.fixture
def store():
    return TableStore([])


def ids(store, filters=(), **search):
    search = Search("samples", until=1 << 40, filters=tuple(filters), **search)
    return [row[1] for row in store.window(search, 0, 100, ["c0"])[1]]


def test_rows_are_sorted_searched_and_filtered_by_what_is_in_them(store):
    columns = ["text", "reward"]
    store.take(0, rows_of(columns, [["Apple pie", 1.5], ["banana 100%", 2], [HOSTILE, None]], step=1))
    store.take(1, rows_of([*columns, HOSTILE], [["apple_tart", -1, "later"], ["Apple pie", math.nan, True]], step=2))
    everything = ["apple_tart", "Apple pie", "Apple pie", "banana 100%", HOSTILE]
    assert ids(store) == everything
    assert ids(store, sort="c1") == [HOSTILE, "apple_tart", "Apple pie", "banana 100%", "Apple pie"]
    assert ids(store, sort="c1", descending=True)[-1] == HOSTILE
    assert ids(store, find="APPLE tart") == ["apple_tart"]
    for literal, found in (("100%", ["banana 100%"]), ("e_t", ["apple_tart"]), (HOSTILE, [HOSTILE]), ("%a%", [])):
        assert ids(store, [Filter("c0", contains=literal)]) == found, literal
    assert ids(store, [Filter("c1", low=-1, high=1.5)]) == ["apple_tart", "Apple pie"]
    assert ids(store, [Filter("run", low=1, high=1), Filter("step", low=2)]) == everything[:2]
    assert ids(store, [Filter("c0", row=1)]) == ["Apple pie", "Apple pie"]
    state = store.describe()["tables"]
    assert [(one["name"], one["rows"], one["steps"]) for one in state] == [("samples", 5, (1, 2))]
    assert [name for _, name, *_ in state[0]["columns"]][-3:] == [*columns, HOSTILE]
    assert store.row("samples", 5)[-3:] == ["Apple pie", "NaN", "true"]
    for search in (Search("nothing"), Search("samples", sort="c0; --"), Search("samples", filters=(Filter("1=1"),))):
        with pytest.raises(ConfigurationError, match=r"no (table|column)"):
            store.window(search, 0, 1, [])


def test_the_rows_of_a_window_have_short_texts_and_an_opened_one_all(store):
    long = "word " * 1000
    store.take(0, rows_of(["text"], [[f"{number} {long}"] for number in range(300)]))
    search = Search("samples", until=250, sort="step")
    total, rows = store.window(search, 240, 100, ["c0"])
    assert (total, len(rows)) == (250, 10)
    assert rows[0][1] == f"240 {long}"[:160]
    assert store.row("samples", rows[0][0])[-1] == f"240 {long}"


def test_the_same_prompt_of_another_run_is_the_one_of_the_closest_step(store):
    for step in (1, 5, 9):
        store.take(0, rows_of(["prompt", "answer"], [["a", step], ["b", step]], step=step))
        store.take(1, rows_of(["prompt", "answer"], [["b", 10 * step]], step=step + 1))
    first = next(row[0] for row in store.window(Search("samples", until=99, sort="step"), 0, 9, [])[1])
    ask = TablesAsk(table="samples", row=first + 1, beside=(1, "c0"))
    found = answer(store, ask)
    assert (found["row"][-2:], found["beside"][-2:]) == (["b", 1], ["b", 10])
    assert answer(store, msgspec.structs.replace(ask, row=first))["beside"] is None


def test_a_distribution_counts_the_found_rows(store):
    cells = [[number, "even" if number % 2 == 0 else "odd"] for number in range(100)]
    store.take(0, rows_of(["number", "kind"], [*cells, [math.inf, "even"], [None, None], [1 << 63, "big"]]))
    search = Search("samples", until=99, filters=(Filter("c0", high=49),))
    numbers = store.distribution(search, "c0")
    assert (numbers["numbers"], numbers["low"], numbers["high"], sum(numbers["bars"])) == (50, 0, 49, 50)
    assert [(text, count) for _, text, count in store.distribution(search, "c1")["texts"]] == [
        ("even", 25),
        ("odd", 25),
    ]
    everything = Search("samples", until=1000)
    assert sum(store.distribution(everything, "c0")["bars"]) == 101
    assert store.distribution(everything, "c1")["distinct"] == 3


def test_images_are_found_by_their_hash_and_only_if_they_are_images(store):
    good, file, bad = "0" * 32, "1" * 32, "2" * 32
    images = {
        good: [1, 2, 3, bytes(6)],
        file: [b"\x89PNG\r\n\x1a\nrest"],
        bad: [b"<svg onload=alert(1)>"],
        "x": [b"GIF8"],
    }
    cells = [[{"image": good}], [[{"image": file}, {"image": good}]], [{"image": "../../etc/passwd"}]]
    store.take(0, rows_of(["image"], cells, images=images))
    assert [store.row("samples", row)[-1] for row in (1, 2)] == [[good], [file, good]]
    assert store.row("samples", 3)[-1] == '{"image": "../../etc/passwd"}'
    pixels, found = store.image(0, good), store.image(0, file)
    assert pixels is not None
    assert found is not None
    assert found == (images[file][0], "image/png")
    assert pixels[1] == "image/png"
    assert PIL.Image.open(io.BytesIO(pixels[0])).size == (2, 1)
    assert [store.image(0, bad), store.image(1, good), store.image(0, "nonsense")] == [None] * 3


def test_rows_beyond_the_size_are_left_out_and_counted():
    store = TableStore([], max_bytes=1 << 20)
    for step in range(40):
        store.take(0, rows_of(["text"], [["x" * 10_000]] * 10, step=step))
    state = store.describe()
    kept = state["tables"][0]["rows"]
    assert 50 < kept < 110
    assert kept + state["leftOut"] == 400
    assert store.window(Search("samples", until=kept), 0, 1, ["c0"])[0] == kept
    # Malformed events change nothing.
    store.take(0, rows_of(["a", "b"], [["too few"]]))
    store.take(0, Snapshot.build(Event("#samples"), rows="none"))
    assert store.describe()["leftOut"] == state["leftOut"]


def followed(runs_dir, name):
    runs = FollowedRuns(FolderRuns(runs_dir), every=10)
    runs.add(name, wait=False)
    runs.start()
    wait_for(lambda: runs.runs[0].stream is not None, "the stream of the run")
    return runs


def test_a_live_run_is_asked_for_its_tables_only_while_somebody_looks(runs_dir, monkeypatch):
    def keep(seconds):
        monkeypatch.setattr(own_events, "KEEP_SECONDS", seconds)

    keep(60.0)
    with Publisher("r") as publisher:
        publisher.log_table("kept", [{"text": "first"}])
        publisher.publish(Event.BATCH_END, batch=1)
        runs = followed(runs_dir, "r")
        try:
            store = TableStore(runs.runs)

            def requested():
                publisher.poll()
                return ANY_TABLE in publisher.requested_events

            def rows():
                store.look()
                publisher.poll()
                return {one["name"]: one["rows"] for one in store.describe()["tables"]}

            time.sleep(0.3)
            assert not requested()
            wait_for(lambda: rows() == {"kept": 1} and requested(), "the recorded row, and the request")
            publisher.log_table("on_demand", lambda: [{"text": "second"}])
            wait_for(lambda: rows() == {"kept": 1, "on_demand": 1}, "the row on demand")
            keep(0.1)
            rows()
            wait_for(lambda: not requested(), "the request to end")
            publisher.log_table("on_demand", lambda: pytest.fail("nobody looks"))
            publisher.log_table("kept", [{"text": "third"}])
            # It continues, without rows twice.
            keep(60.0)
            wait_for(lambda: rows() == {"kept": 2, "on_demand": 1} and requested(), "the later row")
        finally:
            publisher.close()
            wait_for(lambda: not (store.look(), store.describe())[1]["isBehind"], "the end")
            runs.stop()
    assert [row[1] for row in store.window(Search("kept", until=9), 0, 9, ["c0"])[1]] == ["third", "first"]


def test_spans_are_requested_while_shown_and_events_are_in_the_log(runs_dir):
    with Publisher("r") as publisher:
        publisher.publish(Event.BATCH_END, batch=1)
        runs = followed(runs_dir, "r")
        (view,) = runs.runs
        spans = Spans(view)

        def look():
            spans.events.look()
            publisher.poll()
            return spans.after(0, 100)

        wait_for(lambda: look() == [] and ANY_CUSTOM in publisher.requested_events, "the request")
        with publisher.span("step"), publisher.span("generate", tokens=7):
            pass
        publisher.event("rollout_end", reward=0.5, text="<b>")
        wait_for(lambda: len(look()) == 2, "two spans")
        wait_for(lambda: any("rollout_end" in entry.text for entry in view.log()), "the event")
        publisher.close()
        runs.stop()
    inner, outer = spans.after(0, 100)
    assert (inner.name, inner.text, outer.name, inner.parent, outer.parent) == (
        "generate",
        "tokens 7",
        "step",
        outer.id,
        0,
    )
    tolerance = 1.0  # ends and durations are of two clocks, between which a busy machine may do something else
    assert outer.began - tolerance <= inner.began
    assert inner.began + inner.seconds <= outer.began + outer.seconds + tolerance
    assert spans.after(outer.number, 100) == []
    assert [entry.text for entry in view.log() if "rollout" in entry.text] == ["rollout_end: reward 0.5, text <b>"]


def test_a_page_knows_of_tables_without_reading_their_rows(runs_dir):
    with Publisher("r") as publisher:
        publisher.log_table("samples", [{"image": Image(np.zeros((2, 2), np.uint8))}] * 3)
        publisher.publish(Event.BATCH_END, batch=1)
    wait_for(lambda: find_run("r").last.ended, "the end of the run")
    runs = followed(runs_dir, "r")
    (view,) = runs.runs
    view.count_own()
    view.count_own()
    assert view.own == {"#samples": 3}
    runs.stop()
    untouched = RunView("elsewhere")
    untouched.count_own()
    assert untouched.own == {}
