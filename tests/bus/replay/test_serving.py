"""``offloop replay``: recordings served as if they were live, by real processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from helpers import wait_for
from replay_streams import SECOND, ended, record, records_of, serving

from offloop.bus import Publisher, find_run
from offloop.bus.cli.describe import describe_run, lines
from offloop.bus.cli.main import bus
from offloop.bus.cli.recordings import replay
from offloop.bus.recording.recording import Recording
from offloop.bus.subscriber.commands import send_command
from offloop.bus.subscriber.subscriber import Subscriber
from offloop.bus.terminal import run_command
from offloop.bus.tools.convert import convert
from offloop.bus.types.event import Event
from offloop.consumers.runner.places import FolderRuns, find_or_wait, live_or_wait

SLOW = 0.001
"""A rate at which nothing more comes during a test."""


def bus_replay(*arguments: object) -> Result:
    return CliRunner().invoke(bus, ["replay", *map(str, arguments)], catch_exceptions=False)


class Consumer:
    """The command ``consumer``, logging to a file."""

    def __init__(self, path: Path, *arguments: object) -> None:
        self._path = path
        command = [sys.executable, "-m", "offloop.consumers", "--callbacks", "metrics,speed,lr", "--log", "jsonl"]
        self._process = subprocess.Popen(
            [*command, "-o", f"jsonl.path={path}", *map(str, arguments)], stderr=subprocess.PIPE, text=True
        )

    def rows(self) -> str:
        return self._path.read_text() if self._path.exists() else ""

    def ended(self) -> tuple[int, str, str]:
        """Return its exit code, what it logged, and the last line of its errors."""
        _, err = self._process.communicate(timeout=100)
        return self._process.returncode, self._path.read_text(), err.splitlines()[-1]


def is_recorded(run: str, event: str, ranks: int = 1) -> bool:
    """Whether all of the ranks have come to such an event."""
    try:
        return len({one.rank for one in records_of(find_run(run).recording) if one.name == event}) >= ranks
    except Exception:  # noqa: BLE001  not there yet
        return False


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 2, "inner": True, "status": "failed", "without": [5, 6, 13], "padding": 40_000},
        {"epochs": 40, "batches": 50},
    ],
    ids=["odd", "long"],
)
def test_a_served_run_equals_its_recording(runs_dir: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    path = record(tmp_path / "r.mcap", **options)
    done = bus_replay(path, "--rate", "max", "--run-name", "served")
    assert (done.exit_code, done.stderr) == (0, "")
    run = find_run("served")
    assert records_of(run.recording) == records_of(path)
    assert run.status == options.get("status", "finished")
    count = sum(not one.name.startswith("$") for one in records_of(path))
    first, *_, last = done.output.splitlines()
    assert "(run r, attempt 1) as run served; attach with: consumer --run served" in first
    assert last.startswith(f"run served {run.status}")
    assert last.endswith(f": {count} events served")


def test_consumers_of_a_served_run_log_the_same_as_one_of_the_file(runs_dir: Path, tmp_path: Path) -> None:
    path = record(tmp_path / "r.mcap", batches=8)
    early = Consumer(tmp_path / "early", "--run", "served", "--wait")
    with serving(path, "--run-name", "served", "--rate", "2") as server:
        wait_for(lambda: is_recorded("served", "epoch_end"), "a third of it")
        # Two thirds of it are to come, whatever holds this process up.
        server.send_signal(signal.SIGSTOP)
        during = Consumer(tmp_path / "during", "--run", "served")
        wait_for(lambda: "loss" in during.rows(), "its first rows")
        server.send_signal(signal.SIGCONT)
        assert ended(server)[0] == 0
    late = Consumer(tmp_path / "late", "--run", "served")
    code, rows, last = Consumer(tmp_path / "file", "--replay", path).ended()
    assert (code, last) == (0, "run r finished: 36 events handled")
    assert len(rows.splitlines()) > 24
    for consumer in (early, during, late):
        assert consumer.ended() == (0, rows, "run served finished: 36 events handled")


def test_a_served_run_names_its_recording_refuses_commands_and_stops_on_a_signal(
    runs_dir: Path, tmp_path: Path
) -> None:
    path = record(tmp_path / "r.mcap", ranks=2)
    said: list[str] = []
    with serving(path, "--run-name", "served", "--rate", SLOW) as server:
        live_or_wait(FolderRuns(runs_dir), said.append)
        found = find_or_wait(FolderRuns(runs_dir), "served", wait=False, say=said.append)
        assert ("replay of", f"run r, attempt 1 ({path})") in list(lines(describe_run(found.info)))
        wait_for(lambda: is_recorded("served", "epoch_start", ranks=2), "the first events")
        outcome = send_command(find_run("served"), "stop", wait=10)
        assert "this is a replay" in str(outcome.error)
        with Subscriber("served") as attached:
            server.send_signal(signal.SIGTERM)
            assert [one.rank for one in attached] == [0, 1] * 3
            assert str(attached.ending).startswith("stopped")
        code, out, err = ended(server)
    assert said == [f"run served is a replay of run r, attempt 1 ({path})"] * 2
    assert (code, out, err) == (0, "run served stopped: 6 events served\n", "")
    assert find_run("served").status == "stopped"


def test_a_recording_without_an_end_is_served_as_a_lost_run(runs_dir: Path, tmp_path: Path) -> None:
    path = record(tmp_path / "r.mcap", ranks=2, status=None)
    # In a process of its own: while that lives, the run may go on.
    with serving(path, "--run-name", "served", "--rate", "max") as server:
        code, out, _ = ended(server)
    reason = "the recording has no ending of the run"
    assert (code, out) == (0, f"run served lost: {reason}: 48 events served\n")
    run = find_run("served")
    assert (run.status, run.last.error) == ("lost", reason)
    assert records_of(run.recording)[:-2] == records_of(path)


def test_a_served_part_has_no_gaps_and_skips_the_rest_without_waiting(runs_dir: Path, tmp_path: Path) -> None:
    path = record(tmp_path / "r.mcap", ranks=2, inner=True, step=100 * SECOND)
    for number, (start, until) in enumerate((("12ba", "2h"), ("2ep", "8ba"), ("+0s", "0ba"))):
        name = f"served-{number}"
        done = bus_replay(path, "--rate", "1", "--run-name", name, "--start", start, "--until", until)
        assert done.exit_code == 0, done.output
        kept = list(Recording(convert([path], tmp_path / f"{number}.mcap", start, until).path))
        served = Recording(find_run(name).recording)
        expected = [(one.event, one.rank, one.time_ns) for one in kept]
        assert [(one.event, one.rank, one.time_ns) for one in served] == expected
        base = [time for event, _, time in expected if event in (Event.INIT, Event.BATCH_END)]
        assert [one.time_ns for one in served.snapshots([Event.INIT, Event.BATCH_END])] == base
        assert (served.gaps, find_run(name).status) == ((), "finished")


def test_in_a_loop_each_pass_is_an_attempt(runs_dir: Path, tmp_path: Path) -> None:
    path = record(tmp_path / "r.mcap")
    with serving(path, "--run-name", "served", "--rate", "max", "--loop") as server:
        wait_for(lambda: find_run("served").last.number > 1, "a second attempt", timeout=20)
        server.send_signal(signal.SIGINT)
        code, out, _ = ended(server)
    assert code == 0
    assert "again from the start, as the next attempt of served" in out
    first = find_run("served").attempts[0]
    assert (first.status, records_of(first.recording)) == ("finished", records_of(path))


@pytest.mark.slow
def test_a_killed_broker_is_restarted_and_nothing_is_lost(runs_dir: Path, tmp_path: Path) -> None:
    path = record(tmp_path / "r.mcap", ranks=2, without=[7])
    with serving(path, "--run-name", "served", "--rate", "1") as server:
        wait_for(lambda: is_recorded("served", "epoch_end", ranks=2), "a third of it")
        os.kill(_broker_of("served"), signal.SIGKILL)
        code, out, err = ended(server)
    assert code == 0, err
    assert out.startswith("run served finished: ")
    # Each rank sends again what the broker that died had not kept: how their records alternate can change.
    served, original = records_of(find_run("served").recording), records_of(path)
    for rank in range(2):
        assert [one for one in served if one.rank == rank] == [one for one in original if one.rank == rank]
    assert len(served) == len(original)


def _broker_of(run: str) -> int:
    pid = json.loads((find_run(run).path / "broker.json").read_text())["pid"]
    assert isinstance(pid, int)
    return pid


def test_mistakes_are_reported_in_one_line(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Publisher("trained").close()
    record(tmp_path / "r.mcap")
    record(tmp_path / "empty.mcap", without=range(100))
    mistakes = [("r.mcap --rate fast", 2), ("r.mcap --run-name a/b", 1), ("r.mcap --run-name trained", 1)]
    for arguments, code in (*mistakes, ("nowhere.mcap", 1), ("empty.mcap", 1)):
        monkeypatch.setattr(sys, "argv", ["offloop replay", *arguments.split()])
        with pytest.raises(SystemExit) as ended:
            run_command(replay)
        assert (ended.value.code, len(capsys.readouterr().err.splitlines())) == (code, 1)
