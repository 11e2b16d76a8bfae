"""Events, spans and tables of one's own: published on request, bounded, recorded exactly once."""

import asyncio
import contextvars
import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import wait_for
from hypothesis import given, settings
from hypothesis import strategies as st

from offloop.bus import BASE_EVENTS, Event, Image, Publisher, Recording, Snapshot, Subscriber
from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.frames import copy_map
from offloop.bus.protocol.tables import RowsAdded
from offloop.bus.publisher import table_rows
from offloop.bus.publisher.table_rows import TableRows
from offloop.bus.recording.tables import read_rows
from offloop.bus.types.demand import Demand
from offloop.bus.types.event import ANY_CUSTOM, ANY_TABLE
from offloop.bus.types.span import read_span

ALL = BASE_EVENTS | {ANY_CUSTOM, ANY_TABLE}


def recorded(publisher: Publisher) -> list[Snapshot]:
    return list(Recording(publisher.run_dir))


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with Publisher("own", events=ALL) as made:
        yield made


def test_an_unrequested_event_is_not_published_and_a_table_always() -> None:
    with Publisher("own") as publisher:
        publisher.event("rollout_end", reward=1.0)
        with publisher.span("generate"):
            pass
        publisher.log_table("completions", [{"text": "a"}])
        publisher.log_table("expensive", lambda: pytest.fail("computed though nobody requests it"))
    assert [one.event.value for one in recorded(publisher)] == ["#completions"]


def test_more_names_than_a_recording_has_room_for_are_refused(publisher: Publisher) -> None:
    for number in range(64):
        publisher.event(f"e{number}")
    with pytest.raises(ConfigurationError, match="put what varies into fields"):
        publisher.event("e64")
    publisher.event("e3")  # a known one still goes


def test_spans_nest_over_threads_and_tasks(publisher: Publisher) -> None:
    async def task(name: str) -> None:
        with publisher.span(name):
            await asyncio.sleep(0.01)
            with publisher.span(f"{name}_inner"):
                await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(task("one"), task("two"))

    def thread() -> None:
        with publisher.span("thread"):
            pass

    def wait() -> Iterator[None]:
        with publisher.span("generator"):
            yield

    with pytest.raises(KeyError), publisher.span("fails"):
        raise KeyError("x")
    # One may end in another context than it began in.
    waiting = wait()
    contextvars.copy_context().run(next, waiting)
    assert list(waiting) == []
    with publisher.span("outer", n=1) as fields:
        fields["m"] = 2
        other = threading.Thread(target=thread)
        other.start()
        other.join()
        asyncio.run(both())
    publisher.close()
    spans = {one.event.value: one for one in recorded(publisher) if one.event.is_custom}
    found = {name: read_span(one.fields) for name, one in spans.items()}
    assert (spans["@outer"].n, spans["@outer"].m, spans["@fails"].error) == (1, 2, "KeyError")
    parents = {name: span.parent for name, span in found.items() if span}
    ids = {name: span.id for name, span in found.items() if span}
    assert parents == {
        **dict.fromkeys(("@fails", "@generator", "@outer", "@thread"), 0),
        "@one": ids["@outer"],
        "@two": ids["@outer"],
        "@one_inner": ids["@one"],
        "@two_inner": ids["@two"],
    }
    assert found["@one"].duration >= 10_000_000


def test_a_consumer_requests_one_event_or_all_of_a_kind() -> None:
    with Publisher("own") as publisher:
        for requested, seen in ((Event("@wanted"), "@wanted"), (ANY_TABLE, "#t"), (ANY_CUSTOM, "@wanted")):
            with Subscriber(publisher.run_dir, events=[requested], demand=Demand.of([requested])) as subscriber:
                wait_for(lambda: publisher.wait() or requested in publisher.requested_events, "the request")  # noqa: B023  called at once
                publisher.event("wanted", n=1)
                publisher.event("unwanted")
                publisher.log_table("t", lambda: [{"a": 1}])
                assert next(iter(subscriber)).event.value == seen


CELLS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.lists(st.integers(-9, 9))
)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(CELLS, min_size=2, max_size=2), max_size=20), st.integers(0, 2**40))
def test_rows_are_read_as_they_were_written(rows: list[list[Any]], step: int) -> None:
    parts = list(TableRows().pack("t", rows, ["a", "b"], step, 1 << 30))
    read = []
    for fields in parts:
        body = copy_map(fields)
        added = RowsAdded.of(Snapshot.build(Event("#t"), **body))
        assert (added.step, added.columns) == (step, ["a", "b"])
        read += added.rows
    expected = json.loads(
        json.dumps(
            [
                [cell.encode("utf-8", "backslashreplace").decode() if isinstance(cell, str) else cell for cell in row]
                for row in rows
            ]
        )
    )
    assert repr(read) == repr(expected)


def test_what_another_writer_puts_into_cells_is_read_as_text() -> None:
    cells = [b"\xff\x00", {1: b"\xff"}, [0.5, b"\xff"], {"image": "0f"}]
    added = RowsAdded.of(Snapshot.build(Event("#t"), step=0, columns=["a", "b", "c", "d"], rows=[cells]))
    assert added.rows == [["/wA=", '{"1": "/w=="}', [0.5, "/w=="], {"image": "0f"}]]


def test_rows_have_the_columns_of_their_maps_and_each_image_is_stored_once(publisher: Publisher) -> None:
    publisher.log_table("t", [{"prompt": "a", "step": 9}, {"reward": np.float32(0.5), "prompt": "b"}], step=7)
    publisher.log_table("many", ({"n": number, "text": "z" * 1000} for number in range(8000)))
    red = np.zeros((4, 5, 3), np.uint8)
    red[..., 0] = 255
    for _ in range(3):
        images = Image(red), Image(red.copy()), Image(b"\x89PNG\r\n\x1a\n..")
        publisher.log_table("images", [{"image": image} for image in images])
    publisher.close()
    recording = [Recording(publisher.run_dir)]
    (added,) = read_rows(recording, "t")
    # None hides one of the fixed ones.
    assert added.columns == ["prompt", "step_", "reward"]
    assert list(added.records()) == [
        {"step": 7, "time": added.time, "rank": 0, "attempt": 1, "prompt": "a", "step_": 9, "reward": None},
        {"step": 7, "time": added.time, "rank": 0, "attempt": 1, "prompt": "b", "step_": None, "reward": 0.5},
    ]
    # Many rows are several events.
    parts = list(read_rows(recording, "many"))
    assert len(parts) > 2
    assert [row[0] for part in parts for row in part.rows] == list(range(8000))
    parts = list(read_rows(recording, "images"))
    assert [len(part.images) for part in parts] == [2, 0, 0]
    first, same, other = (row[0]["image"] for row in parts[2].rows)
    assert first == same != other
    assert parts[0].images[first] == [4, 5, 3, red.tobytes()]


CYCLE: list[Any] = []
CYCLE.append(CYCLE)

REFUSED_ROWS: list[tuple[Any, list[str] | None, str]] = [
    ([[1]], None, "give columns="),
    ([[1, 2]], ["a"], "a cell for each of its 1 columns"),
    (["ab"], ["a", "b"], "a cell for each"),
    ([{"b": 1}], ["a"], "has the column 'b'"),
    ([[object()]], ["a"], "a value of type object"),
    ([[CYCLE]], ["a"], "lists in more than 14 levels"),
    ([[1, 2]], ["a", "a"], "different names"),
    ([{}], [str(number) for number in range(201)], "201 columns"),
]


def test_names_fields_steps_and_rows_that_cannot_be_sent_are_refused(publisher: Publisher) -> None:
    names: list[Any] = ["", "a b", "1a", "*", "x" * 101, "a/b", "ä", 3]
    for name in names:
        for call in (publisher.event, publisher.span, lambda name: publisher.log_table(name, [])):
            with pytest.raises(ConfigurationError, match="cannot name"):
                call(name)
    several: list[dict[str, Any]] = [{"span": 1}, {"logged": []}, {"x": object()}, {"x": {1j: 2}}]
    for fields in several:
        with pytest.raises(ConfigurationError):
            publisher.event("e", **fields)
    steps: list[Any] = [-1, 1.5, "3", True, 2**63]
    for step in steps:
        with pytest.raises(ConfigurationError, match="step is"):
            publisher.log_table("t", [{"a": 1}], step=step)
    for rows, columns, text in REFUSED_ROWS:
        with pytest.raises(ConfigurationError, match=text):
            publisher.log_table("t", rows, columns)
    with pytest.raises(KeyError, match="mine"):
        publisher.log_table("t", lambda: {}["mine"])


def test_the_deepest_cell_is_read_again(publisher: Publisher) -> None:
    cell: Any = np.float32(0.5)
    for _ in range(14):
        cell = [cell]
    publisher.log_table("t", [[cell], [[Image(np.zeros((1, 1), np.uint8))]]], ["a"])
    publisher.close()
    (added,) = read_rows([Recording(publisher.run_dir)])
    assert str(added.rows[0]) == "[" * 15 + "0.5" + "]" * 15


def test_other_images_are_refused() -> None:
    wrong: list[Any] = [b"text", np.zeros((2, 2)), np.zeros((2, 2, 2), np.uint8), np.zeros((0, 2), np.uint8), "a"]
    for data in wrong:
        with pytest.raises(ConfigurationError, match="PNG"):
            Image(data)


def test_rows_beyond_the_limits_are_left_out_counted_and_named(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(table_rows, "MAX_STEP", 3_000_000)
    rows = [{"text": "x" * 900_000}, {"text": "x" * 2_000_000}, *[{"text": "y" * 900_000}] * 4]
    with pytest.raises(ConfigurationError, match="1 rows are over the limit of 1,048,576 bytes a row, 2 rows are over"):
        publisher.log_table("t", rows)
    publisher.log_table("t", [{"text": "next step"}], step=1)
    publisher.close()
    parts = list(read_rows([Recording(publisher.run_dir)]))
    assert sum(len(part.rows) for part in parts) == 4
    left_out = [dict(part.left_out) for part in parts if part.left_out]
    assert left_out == [{"1,048,576 bytes a row": 1, "3,000,000 bytes a step": 2}]


def test_rows_never_take_more_than_half_of_the_send_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    with Publisher("own", backlog_bytes=1 << 20) as publisher:
        publisher._outbox.paused = True  # as while no broker serves the run
        for _ in range(10):
            publisher.publish("batch_end", loss=1.0)
        with pytest.raises(ConfigurationError, match="half of the send buffer"):
            publisher.log_table("t", [{"text": "x" * 100_000}] * 20)
        assert publisher.statistics().dropped == 0
        publisher._outbox.paused = False
