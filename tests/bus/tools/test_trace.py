"""The timeline: what is drawn of a run, and that every reader takes it."""

import io
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from helpers import REFERENCE
from timeline_stream import BEGAN_NS, MS, RankStream, training_of
from trace_rules import TraceFile, read_trace

from offloop.bus.protocol.order import Ending
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.tools.trace import TraceWriter
from offloop.bus.types.commands import Command, Outcome
from offloop.bus.types.event import Event
from offloop.bus.types.health import HEALTH, Gpu, Health

GOLDEN = REFERENCE / "timeline.json"
FINISHED = Ending("finished")


def drawn(stream: Iterable[Snapshot], ending: Ending | None = FINISHED) -> str:
    """Return the text of a trace of that stream."""
    file = io.StringIO()
    writer = TraceWriter(file)
    for snapshot in stream:
        writer.see(snapshot)
    writer.close(ending)
    return file.getvalue()


def shown(stream: Iterable[Snapshot], **options: Any) -> TraceFile:
    return read_trace(drawn(stream, **options))


def names(slices: Iterable[Any]) -> list[str]:
    return [one.name for one in slices]


# -- what is drawn ----------------------------------------------------------------------------------------------------


def test_a_run_is_drawn_as_it_went() -> None:
    trace = shown(training_of())
    assert trace.processes == {0: "rank 0 (node-0)"}
    spans = [(one.name, int(one.began), int(one.ended or 0)) for one in trace.on("batches")]
    assert spans == [
        ("batch 1", 5000, 15000),
        ("batch 2", 15000, 25000),
        ("batch 3", 45000, 55000),
        ("batch 4", 55000, 65000),
    ]
    assert [(int(one.began), int(one.ended or 0)) for one in trace.on("data")][2:] == [(45000, 47000), (55000, 57000)]
    assert [one.args["batch"] for one in trace.on("backward")] == [1, 2, 3, 4]
    assert names(trace.on("epochs")) == ["epoch 1", "epoch 2"]
    assert [(int(one.began), int(one.ended or 0)) for one in trace.on("epochs")] == [(5000, 25000), (45000, 65000)]
    outer, inner = trace.on("evaluation")[:2]
    assert {outer.name, inner.name} == {"evaluation", "eval"}
    assert next(one.args for one in trace.on("evaluation") if one.name == "eval") == {"accuracy": 0.75}
    assert names(trace.instants) == [
        "run run, attempt 1",
        "epoch 1 ends",
        "epoch_checkpoint",
        "epoch 2 ends",
        "epoch_checkpoint",
        "run finished",
    ]
    assert trace.instants[0].args == {"began": "2023-11-14T22:13:20+00:00", "began_ns": str(BEGAN_NS)}
    assert trace.counters["training loss"] == [(15000, 1), (25000, 0.5), (55000, 1 / 3), (65000, 0.25)]
    assert trace.counters["learning rate SGD/group0"] == [(15000, 0.1)]
    # What an evaluation takes is not the training's.
    assert [value for _, value in trace.counters["samples per second"]] == [800] * 3


def test_spans_of_a_gpu_that_is_behind_are_cut_and_not_left_out() -> None:
    stream = RankStream()
    slow = {"began": BEGAN_NS, "spans": [["forward", 0, 9 * MS]], "device": True}
    late = {"began": BEGAN_NS + 2 * MS, "spans": [["forward", 1 * MS, 8 * MS]], "device": True}
    events = [stream.event(Event.FIT_START)]
    events += [stream.event(Event.BATCH_END, 2, phases=phases, on_demand=["phases"]) for phases in (slow, late)]
    first, second = shown(events).on("forward")
    assert (first.ended, second.began, second.ended) == (9000, 9000, 11000)


def test_a_loss_that_is_no_number_breaks_nothing() -> None:
    stream = RankStream()
    losses = [0.5, math.nan, math.nan, 0.25, math.inf]
    metrics = {"eval": {"accuracy": math.nan, "names": ["a"]}}
    events = [stream.event(Event.FIT_START), *(stream.batch([], loss=loss) for loss in losses)]
    events += [
        stream.event(Event.EVAL_START, dataloader_label="eval"),
        stream.event(Event.EVAL_END, dataloader_label="eval", eval_metrics=metrics),
    ]
    trace = shown(events)
    assert [value for _, value in trace.counters["training loss"]] == [0.5, 0.25]
    assert trace.on("evaluation")[0].args == {"accuracy": "NaN", "names": ["a"]}


def test_the_health_of_the_host_is_drawn_as_counters() -> None:
    stream = RankStream()
    fields: dict[str, Any] = msgspec.to_builtins(Health("node-0", {"cpu_percent": 30}, gpus=[Gpu(0, {"throttled": 1})]))
    trace = shown([stream.event(Event.FIT_START), stream.event(HEALTH, 5, **fields)])
    assert trace.counters["system/cpu_percent value"] == [(5000, 30)]
    assert trace.counters["system/gpu_throttled value"] == [(5000, 1)]
    assert "offloop.health" not in names(trace.instants)


def test_phases_that_somebodys_own_loop_sends_in_another_form_are_left_out() -> None:
    stream = RankStream()
    odd: list[Any] = [None, 5, {}, {"began": 1.5, "spans": []}, {"began": 1, "spans": [["data", 1]]}]
    odd += [{"began": 1, "spans": 7}, {"began": 1, "spans": [["data", 0, -1]]}, {"began": 1, "spans": [[3, 0, 1]]}]
    trace = shown([stream.event(Event.BATCH_END, 1, phases=one, lr={"SGD": 0.1}) for one in odd])
    assert {one.track for one in trace.slices} == {"batches"}
    odd_names = [stream.event(Event.BATCH_END, 1, lr=0.1), stream.event(Event.EVAL_START)]
    odd_names.append(stream.event(Event.EVAL_END, eval_metrics={"None": 1}, dataloader_label=None))
    assert names(shown(odd_names).on("evaluation")) == ["None"]
    unknown = {"began": BEGAN_NS, "spans": [["all_reduce", 0, MS]], "device": False}
    assert names(shown([stream.event(Event.BATCH_END, 1, phases=unknown)]).on("all_reduce")) == ["all_reduce"]


def test_an_epoch_that_is_gone_on_with_begins_where_the_attempt_does() -> None:
    stream = RankStream()
    stream.event(Event.EPOCH_START)
    stream.batch([])
    trace = shown([stream.event(Event.FIT_START), stream.batch([]), stream.event(Event.EPOCH_END)])
    (epoch,) = trace.on("epochs")
    assert (epoch.name, epoch.args) == ("epoch 1", {"resumed at batch": 1})


def test_a_training_that_stops_in_an_epoch_leaves_nothing_open() -> None:
    stream = RankStream()
    events = [stream.event(Event.FIT_START), stream.event(Event.EPOCH_START), stream.batch([])]
    assert shown([*events, stream.event(Event.FIT_END)], ending=None).on("epochs")[0].ended == 1000
    failed = shown([*events, stream.event(Event.EVAL_BEFORE_ALL)], ending=Ending("failed", "no memory left"))
    assert all(one.ended is not None for one in failed.slices)
    assert (failed.instants[-1].name, failed.instants[-1].args) == ("run failed", {"error": "no memory left"})


def test_commands_stand_where_they_took_effect() -> None:
    file = io.StringIO()
    writer = TraceWriter(file)
    for snapshot in training_of():
        writer.see(snapshot)
    writer.command(Outcome(Command("pause"), "batch_checkpoint", 3, None), BEGAN_NS + 56 * MS)
    writer.command(Outcome(Command("stop"), "batch_checkpoint", 4, "too late"), BEGAN_NS + 60 * MS)
    writer.close(FINISHED)
    trace = read_trace(file.getvalue())
    commands = [(one.name, int(one.began)) for one in trace.instants if one.name.startswith("command")]
    assert commands == [("command pause", 56000), ("command stop refused", 60000)]
    assert trace.instants[-2].args["error"] == "too late"


# -- several ranks ----------------------------------------------------------------------------------------------------


def two_ranks(batches: int) -> Iterator[Snapshot]:
    """Two ranks on two hosts that end each batch together."""
    streams = [RankStream(rank, 2, host=f"node-{rank}") for rank in (0, 1)]
    for event in (Event.INIT, Event.FIT_START, Event.EPOCH_START):
        yield from (stream.event(event) for stream in streams)
    for _ in range(batches):
        yield from (stream.batch([("data", 1 + stream.rank), ("backward", 3 - stream.rank)]) for stream in streams)


# -- the file ---------------------------------------------------------------------------------------------------------


def test_the_timeline_is_the_one_that_was_kept() -> None:
    """The file in ``reference`` was looked at in chrome://tracing's own model; it changes only on purpose."""
    text = drawn(two_ranks(2))
    if os.environ.get("UPDATE_TIMELINE"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_a_run_without_events_is_an_empty_list() -> None:
    assert drawn([]) == "[\n]\n"
