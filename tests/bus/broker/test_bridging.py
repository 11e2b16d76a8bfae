"""The processes that a broker starts to copy its runs."""

import psutil
import pytest
from helpers import wait_for

from bus.broker import bridging
from bus.broker.bridging import Bridges


@pytest.fixture
def bridges(tmp_path, monkeypatch):
    monkeypatch.setattr(bridging, "_AGAIN_SECONDS", 0.0)
    made = Bridges("nats://127.0.0.1:1")
    yield made
    wait_for(lambda: made.look({}) or not children(), "the end of all bridges")


def children():
    return psutil.Process().children()


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
