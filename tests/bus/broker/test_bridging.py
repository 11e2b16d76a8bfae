"""The process that a broker starts to copy its run."""

import pytest

from offloop.bus.broker import companions
from offloop.bus.broker.companions import BridgeProcess
from offloop.bus.runs.bridged import BridgeStatus


@pytest.fixture
def bridge(tmp_path, monkeypatch):
    monkeypatch.setattr(companions, "_BRIDGE_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(companions, "_REPORT_SECONDS", 0.0)
    made = BridgeProcess(tmp_path, "nats://127.0.0.1:1")
    yield made
    if made._process is not None:
        made._process.kill()
        made._process.wait()


def started(bridge):
    bridge.tend()
    return bridge._process


def test_a_failed_bridge_is_not_restarted(bridge):
    first = started(bridge)
    assert first.wait(60) > 0
    assert started(bridge) is first


def test_a_bridge_that_does_not_copy_is_reported_once(bridge, tmp_path):
    status = BridgeStatus.of_this_process("nats://127.0.0.1:1", "host")
    status.state, status.reason = "waiting", "no server answers"
    status.write(tmp_path)
    # A moment without servers is not worth a line.
    assert bridge.report() is None
    status.state = "copying"
    status.write(tmp_path)
    assert bridge.report() is None
    status.state = "waiting"
    status.write(tmp_path)
    assert bridge.report() is None
    assert "(no server answers)" in bridge.report()
    assert bridge.report() is None
