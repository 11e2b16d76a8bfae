"""The processes that a broker starts to copy its runs."""

import psutil
import pytest
from helpers import wait_for

from offloop.bus.broker import bridging
from offloop.bus.broker.bridging import Bridges
from offloop.bus.runs.bridged import BridgeStatus


@pytest.fixture
def bridges(tmp_path, monkeypatch):
    monkeypatch.setattr(bridging, "_AGAIN_SECONDS", 0.0)
    _of_others.update(one.pid for one in psutil.Process().children())
    made = Bridges("nats://127.0.0.1:1")
    yield made
    wait_for(lambda: made.look({}) or not children(), "the end of all bridges")


_of_others: set[int] = set()
"""Processes that tests before these have started."""


def children():
    return [one for one in psutil.Process().children() if one.pid not in _of_others]


def begin_one_that_fails(bridges, path, attempt=1):
    """Of a folder without a run."""
    path.mkdir(exist_ok=True)
    bridges.look({path: attempt})
    (process,) = children()
    wait_for(lambda: process.status() == psutil.STATUS_ZOMBIE, "the end of the bridge")
    return process


def test_bridges_of_runs_that_have_ended_are_reaped(bridges, tmp_path):
    begin_one_that_fails(bridges, tmp_path / "r")
    bridges.look({})
    assert children() == []


def test_a_bridge_that_failed_is_not_started_again_before_the_next_attempt(bridges, tmp_path):
    begin_one_that_fails(bridges, tmp_path / "r")
    bridges.look({tmp_path / "r": 1})
    assert children() == []
    begin_one_that_fails(bridges, tmp_path / "r", attempt=2)


def test_a_bridge_that_was_killed_is_started_again(bridges, tmp_path):
    (tmp_path / "r").mkdir()
    bridges.look({tmp_path / "r": 1})
    (killed,) = children()
    killed.kill()
    wait_for(lambda: killed.status() == psutil.STATUS_ZOMBIE, "the end of the bridge")
    bridges.look({tmp_path / "r": 1})
    (again,) = children()
    assert again.pid != killed.pid


def test_a_bridge_that_does_not_copy_is_reported_once(bridges, tmp_path, monkeypatch):
    monkeypatch.setattr(bridging, "_REPORT_SECONDS", 0.0)
    live = {tmp_path / name: 1 for name in ("copied", "waiting", "starting")}
    for path in live:
        path.mkdir()
    status = BridgeStatus.of_this_process("nats://127.0.0.1:1", "host")
    status.state, status.reason = "copying", ""
    status.write(tmp_path / "copied")
    status.state, status.reason = "waiting", "no server answers"
    status.write(tmp_path / "waiting")
    # A moment without servers is not worth a line.
    assert bridges.report(live) == {}
    status.state = "copying"
    status.write(tmp_path / "starting")
    assert bridges.report(live) == {
        tmp_path
        / "waiting": "it is not copied to NATS at nats://127.0.0.1:1 at the moment (no server answers); if its "
        f"bridge ends before all is there, "
        f"'offloop server bridge {tmp_path}/waiting --stream nats://127.0.0.1:1' sends the rest"
    }
    assert bridges.report(live) == {}
