"""What consumers alert about, as it is kept in a run's directory."""

import json
import math
import os
from dataclasses import asdict

import pytest

from offloop.bus.runs import alerts as run_alerts
from offloop.bus.runs.alerts import ALERTS_FILE, FIRING, RESOLVED, RunAlert, firing, note_alert, read_alerts


def alert(number, status=FIRING, about="rule", attempt=1, text="loss is nan"):
    return RunAlert(f"{attempt}-{number}", status, about, text, 100.0 + number, attempt, number)


def test_alerts_are_there_once_in_the_order_of_their_time(tmp_path):
    for number in (2, 1, 2, 3):
        note_alert(tmp_path, alert(number))
    assert read_alerts(tmp_path) == [alert(1), alert(2), alert(3)]
    assert read_alerts(tmp_path / "other") == []


def test_what_was_not_resolved_fires(tmp_path):
    given = [alert(1), alert(2, RESOLVED), alert(3, about="other"), alert(4), alert(1, attempt=2), alert(5, RESOLVED)]
    assert [one.id for one in firing(given)] == ["1-3", "2-1"]


def test_lines_that_are_something_else_are_left_out(tmp_path):
    note_alert(tmp_path, alert(1))
    with open(tmp_path / ALERTS_FILE, "ab") as file:
        for odd in (
            [1],
            {"id": 1},
            {**asdict(alert(2)), "time": "now"},
            {**asdict(alert(2)), "status": "odd"},
            {**asdict(alert(2)), "time": math.inf},
        ):
            file.write(json.dumps(odd).encode() + b"\n")
        file.write(b'\xff\n{"id": "cut')
    assert read_alerts(tmp_path) == [alert(1)]


@pytest.mark.timeout(30)
def test_the_file_is_bounded_and_nothing_else_is_written_in_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(run_alerts, "_MAX_BYTES", 2000)
    for number in range(100):
        note_alert(tmp_path, alert(number, text="x" * 5000))
    assert os.path.getsize(tmp_path / ALERTS_FILE) <= 2000
    assert len(read_alerts(tmp_path)) == 1
    (tmp_path / ALERTS_FILE).unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("")
    (tmp_path / ALERTS_FILE).symlink_to(elsewhere)
    note_alert(tmp_path, alert(1))
    assert (elsewhere.read_text(), read_alerts(tmp_path)) == ("", [])
