"""``offloop compare --events``: where two runs begin to differ, and nothing where they do not."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from recorded_runs import BEGAN, Entry, entries, write_foreign, write_recording
from recording_files import spoil

from offloop.bus.cli.compare import compare_runs
from offloop.bus.terminal import run_command
from offloop.bus.tools.convert import convert
from offloop.bus.tools.diff import Diff, diff

quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

INNER = ("before_forward", "after_loss")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(
        compare_runs, ["--events", *(str(argument) for argument in arguments)], standalone_mode=False
    )


def compare(folder: Path, a: list[Entry], b: list[Entry], options: dict[str, Any] | None = None, **more: Any) -> Diff:
    """Compare two recordings that have different names, attempts and times."""
    paths = folder / "a.mcap", folder / "b.mcap"
    for path in paths:
        path.unlink(missing_ok=True)
    write_recording(paths[0], a)
    write_recording(paths[1], b, **({"run": "other", "attempt": 2, "began": BEGAN + 10**12} | (options or {})))
    return diff(*paths, **more)


def loss(batch: int, value: Any, **more: Any) -> Entry:
    return Entry(batch=batch, fields={"loss": value, **more})


def losses(*values: Any) -> list[Entry]:
    return [loss(batch, value) for batch, value in enumerate(values, 1)]


@quick
@given(data=st.data(), stream=entries())
def test_the_same_run_under_another_name_at_another_time_and_watched_by_others_is_the_same(tmp_path, data, stream):
    assume(any(not entry.name.startswith("$") and entry.name not in INNER for entry in stream))
    not_requested = data.draw(st.sets(st.sampled_from(("$demand", *INNER))))
    watched = []
    for entry in stream:
        if entry.name in not_requested:
            continue
        if data.draw(st.booleans()):
            watched.append(Entry(data.draw(st.sampled_from(("before_loss", "$demand"))), entry.rank, entry.batch))
        watched.append(entry)
    ranks = {entry.rank for entry in stream}
    assume({entry.rank for entry in watched} == ranks)
    found = compare(tmp_path, stream, watched)
    assert found.same
    assert (found.first, found.incomplete) == (None, [])
    assert found.events


def test_hosts_durations_and_order_of_ranks_do_not_count_and_ranks_of_one_alone_are_told(tmp_path):
    a = [Entry("init", fields={"system": {"host": "one"}}), loss(1, 0.5, phases={"began": 1}), Entry(rank=1, batch=1)]
    b = [Entry("init", fields={"system": {"host": "two"}}), Entry(rank=1, batch=1), loss(1, 0.5, phases={"began": 2})]
    assert compare(tmp_path, a, b).same
    a, b = ([Entry("eval_end", fields={"eval_timestamp": [0, 0, 3, 24, *[0] * 6, *[wct] * 4]})] for wct in (5, 6))
    assert compare(tmp_path, a, b).same
    assert compare(tmp_path, losses(math.nan, [math.nan, 1]), losses(math.nan, [math.nan, 1])).same
    a = [Entry(rank=rank, batch=1, context={"world_size": 2}) for rank in (0, 1)]
    found = compare(tmp_path, a, a[:1])
    assert (found.same, found.notes) == (True, ["rank 1 is in A alone"])


@quick
@given(data=st.data(), stream=entries())
def test_one_changed_value_is_found_where_it_is(tmp_path, data, stream):
    places = [place for place, entry in enumerate(stream) if not entry.name.startswith("$")]
    assume(places)
    place = data.draw(st.sampled_from(places))
    entry = stream[place]
    before, after = entry.fields["loss"], data.draw(st.floats())
    assume(before != after and not (math.isnan(before) and math.isnan(after)))
    changed = [*stream[:place], entry._replace(fields={"loss": after}), *stream[place + 1 :]]
    found = compare(tmp_path, stream, changed)
    assert found.differing == 1
    first = found.first
    assert (first.rank, first.event, first.batch) == (entry.rank, entry.name, entry.batch)
    assert first.a == first.b == sum(one.rank == entry.rank for one in stream[: place + 1])
    (field,) = first.fields
    assert (field.name, repr(field.a), repr(field.b)) == ("loss", repr(before), repr(after))


def test_the_tolerance_is_absolute_or_relative_and_not_for_what_is_counted(tmp_path):
    a, b = losses(1000.0, 0.0), losses(1000.9, 0.0009)
    assert compare(tmp_path, a, b, tolerance=1e-3).same
    assert not compare(tmp_path, a, b, tolerance=1e-4).same
    assert not compare(tmp_path, [loss(1, 0.5, batch_size=8)], [loss(1, 0.5, batch_size=7)], tolerance=10).same


def test_what_stands_beside_the_numbers_is_compared_too(tmp_path):
    (field,) = compare(tmp_path, [loss(1, 1.0, note="a")], [loss(1, 1.0, note="b")]).first.fields
    assert (field.name, field.a, field.b, field.only) == ("note", "a", "b", None)
    (field,) = compare(tmp_path, [loss(1, 1.0, note=None)], [loss(1, 1.0)]).first.fields
    assert (field.name, field.only) == ("note", "A")
    (field,) = compare(tmp_path, [loss(1, True)], [loss(1, 1)]).first.fields
    assert field.name == "loss"
    found = compare(tmp_path, [Entry(batch=1, epoch=1)], [Entry(batch=1)])
    assert [field.name for field in found.first.fields] == ["epoch"]
    a, b = ([loss(3, 0.5, logged=[[3, {"own": value}]])] for value in (1.0, 1.5))
    (field,) = compare(tmp_path, a, b).first.fields
    assert (field.name, field.a, field.b) == ("logged/own", 1.0, 1.5)
    assert compare(tmp_path, losses(1.0, math.inf), losses(math.nan, math.inf)).first.batch == 1


def test_events_without_a_batch_belong_to_the_one_before(tmp_path):
    a = [*losses(1.0, 2.0), Entry("epoch_end"), loss(3, 3.0), Entry("fit_end")]
    assert compare(tmp_path, a, a).same
    found = compare(tmp_path, a, [*a[:2], *a[3:]])
    assert (found.alone["A"], found.first.event, found.first.batch) == (1, "epoch_end", 2)


def test_the_shorter_run_ends_where_they_begin_to_differ(tmp_path):
    end = Entry("$end", fields={"status": "finished"})
    found = compare(tmp_path, [*losses(1.0, 2.0, 3.0), end], [*losses(1.0, 2.0), end])
    assert (found.first.event, found.first.batch, found.first.a, found.first.b) == ("$end", 2, None, 3)
    # The third batch, and the two ends.
    assert (found.events, found.alone) == (2, {"A": 2, "B": 1})


def test_a_command_to_one_of_them_and_another_ending_are_differences(tmp_path):
    command = Entry("$command", 0, 1, {"command": "set", "arguments": ["lr", 0.5], "id": "1", "event": "batch_end"})
    found = compare(tmp_path, [*losses(1.0), command, loss(2, 2.0)], losses(1.0, 2.0))
    assert (found.first.event, found.first.a, found.first.b) == ("$command", 2, None)
    again = command._replace(fields={**command.fields, "id": "2"})
    assert compare(tmp_path, [*losses(1.0), command], [*losses(1.0), again]).same
    a, b = ([*losses(1.0), Entry("$end", fields={"status": status})] for status in ("finished", "stopped"))
    (field,) = compare(tmp_path, a, b).first.fields
    assert (field.name, field.a, field.b) == ("status", "finished", "stopped")
    result = run(tmp_path / "a.mcap", tmp_path / "b.mcap")
    assert result.return_value == 1
    assert "events in both: 1, of which 1 differ\n" in result.output


def test_evaluators_of_the_same_batch_are_not_mixed_up(tmp_path):
    def evaluated(*labels: str) -> list[Entry]:
        return [
            Entry("eval_end", 0, 4, {"eval_metrics": {label: {"acc": len(label)}}}, {"dataloader_label": label})
            for label in labels
        ]

    assert compare(tmp_path, evaluated("a", "bb"), evaluated("bb", "a")).same
    found = compare(tmp_path, evaluated("a", "bb"), evaluated("bb"))
    assert (found.first.a, found.first.b, found.differing, found.alone) == (1, None, 0, {"A": 1, "B": 0})


def test_requested_fields_and_events_are_compared_where_both_have_them(tmp_path):
    both = [loss(1, 1.0, norm=1.0, on_demand=["norm"])]
    assert compare(tmp_path, both, [loss(1, 1.0)]).same
    found = compare(tmp_path, both, [loss(1, 1.0, norm=2.0, on_demand=["norm"])])
    assert [one.name for one in found.first.fields] == ["norm"]
    refused = [loss(1, 1.0, not_sent="phases: this batch began before the field was requested")]
    assert compare(tmp_path, refused, losses(1.0)).same
    a = [Entry("after_loss", batch=0, fields={"loss": 1.0}), *losses(1.0)]
    assert compare(tmp_path, a, losses(1.0)).same
    b = [Entry("after_loss", batch=0, fields={"loss": 2.0}), *losses(1.0)]
    assert compare(tmp_path, a, b).first.event == "after_loss"


def test_a_cut_is_the_same_as_what_it_was_cut_from(tmp_path):
    write_recording(tmp_path / "a.mcap", [*losses(*map(float, range(20))), Entry("$end")])
    # The end is compared too, and counted by neither.
    assert convert([tmp_path / "a.mcap"], tmp_path / "b.mcap", "5ba", "8ba").events == 4
    for one, other in (("a", "b"), ("b", "a")):
        found = diff(tmp_path / f"{one}.mcap", tmp_path / f"{other}.mcap")
        assert found.same
        assert found.events == 4
        assert [line.split(" ", 1)[1] for line in found.notes] == [
            "leaves out events 1 to 4 of rank 0",
            "leaves out events 9 to 20 of rank 0",
        ]


def test_what_is_missing_is_no_difference_and_is_named(tmp_path):
    whole = losses(*map(float, range(10)))
    write_recording(tmp_path / "whole.mcap", whole)
    write_recording(tmp_path / "holed.mcap", whole, missing=[0, 4, 5])
    paths = [tmp_path / "holed.mcap", tmp_path / "whole.mcap"]
    for side in "AB":
        found = diff(*(paths if side == "A" else paths[::-1]))
        assert found.same
        assert [line.partition(" of rank")[0] for line in found.incomplete] == [
            f"{side} lacks events {numbers}" for numbers in ("1 to 1", "5 to 6")
        ]


def test_the_command_shows_the_first_difference_and_everything_as_json(tmp_path):
    compare(tmp_path, losses(1.0, 2.0, 3.0), losses(1.0, 2.0, math.nan))
    result = run(tmp_path / "a.mcap", tmp_path / "b.mcap")
    assert result.return_value == 1
    assert (
        result.output
        == f"""\
A  {tmp_path / "a.mcap"}
B  {tmp_path / "b.mcap"}
first difference: batch_end at 0ep 3ba of rank 0 (event 3 in A, 3 in B)
  loss: 3.0 in A, NaN in B
events in both: 3, of which 1 differ
"""
    )
    told = json.loads(run(tmp_path / "a.mcap", tmp_path / "b.mcap", "--json").output, parse_constant=pytest.fail)
    assert (told["same"], told["events"], told["differing"], told["a"]) == (False, 3, 1, str(tmp_path / "a.mcap"))
    assert told["first"]["fields"] == [{"name": "loss", "a": 3.0, "b": "NaN", "only": None}]


def test_no_difference_in_what_is_left_of_a_damaged_one_is_not_the_same(tmp_path):
    whole = losses(*map(float, range(20)))
    compare(tmp_path, whole, whole)
    spoil(tmp_path / "a.mcap", 750)
    result = run(tmp_path / "a.mcap", tmp_path / "b.mcap")
    assert result.return_value == 3
    assert "is damaged at offset" in result.output
    assert "A lacks events " in result.output
    assert result.output.splitlines()[-1].startswith("no difference in ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.mcap", "nothing"], "no run 'nothing'"),
        (["a.mcap", "foreign"], "foreign is not a recording"),
        (["a.mcap", "a.mcap", "--tolerance", "nan"], "tolerance"),
        (["a.mcap", "b.mcap"], "no event in common"),
        (["a.mcap", "a.mcap", "a.mcap"], "--events"),
    ],
)
def test_trouble_is_neither_the_same_nor_different(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["compare", "--events", *arguments])
    write_recording(tmp_path / "a.mcap", [Entry()])
    write_recording(tmp_path / "b.mcap", [Entry(rank=1)])
    write_foreign(tmp_path / "foreign")
    with pytest.raises(SystemExit) as left:
        run_command(compare_runs)
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count(os.linesep) == 1
