"""The demo, with a training that needs no torch."""

import runpy
from pathlib import Path

import pytest
from paths import ROOT

TRAINING = """
import sys, time
from offloop.bus import Event, Publisher
with Publisher(sys.argv[2]) as publisher:
    for batch in range(1, 201):
        publisher.publish(Event.BATCH_END, batch=batch, sample=8 * batch, batch_size=8, lr={"SGD": [0.1]})
        time.sleep(0.001)
print("trained")
"""


def test_the_demo_shows_trainer_and_consumer_and_names_the_recording(
    runs_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    demo = runpy.run_path(str(ROOT / "examples" / "demo.py"))
    demo["TRAINER"][:] = ["python", "-c", TRAINING]
    assert demo["main"]() == 0
    shown, err = capfd.readouterr()
    assert err == ""
    lines = [line.strip() for line in shown.splitlines()]
    assert "trainer | trained" in lines
    for metric in ("batches_per_sec  ", "  lr  "):
        assert any(line.startswith("consumer | ") and metric in line for line in lines)
    [recording] = runs_dir.glob("*/recording-1.mcap")
    assert f"recorded in {recording}\n" in shown
    assert f"consumer --replay {recording.parent} " in shown
    assert f"offloop ui {recording.parent.name}\n" in shown
    assert "\033" not in shown
