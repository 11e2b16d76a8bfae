"""What consumers alert about, as it is kept in a run's directory."""

import json
import os
from dataclasses import asdict

from offloop.bus.runs import alerts as run_alerts
from offloop.bus.runs.alerts import ALERTS, FIRING, RESOLVED, RunAlert, firing, note_alert, read_alerts


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


def test_a_file_that_is_something_else_shows_none_and_stays(tmp_path):
    for odd in ({"id": 1}, {**asdict(alert(2)), "status": "odd"}, {**asdict(alert(2)), "time": "now"}):
        content = json.dumps([asdict(alert(1)), odd])
        (tmp_path / ALERTS.name).write_text(content)
        note_alert(tmp_path, alert(3))
        assert (read_alerts(tmp_path), (tmp_path / ALERTS.name).read_text()) == ([], content)


def test_the_newest_are_kept_and_nothing_else_is_written_in_their_place(tmp_path, monkeypatch):
    monkeypatch.setattr(run_alerts, "MOST", 20)
    for number in range(30):
        note_alert(tmp_path, alert(number, text="x\udcff" * 5000))
    assert [one.batch for one in read_alerts(tmp_path)] == list(range(10, 30))
    assert os.path.getsize(tmp_path / ALERTS.name) < 40_000
    (tmp_path / ALERTS.name).unlink()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("")
    (tmp_path / ALERTS.name).symlink_to(elsewhere)
    note_alert(tmp_path, alert(1))
    assert (elsewhere.read_text(), read_alerts(tmp_path)) == ("", [])
