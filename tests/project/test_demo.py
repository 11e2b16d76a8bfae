import subprocess
import sys

from paths import ROOT

DEMO = ROOT / "examples" / "demo.py"


def lines_of(name, output):
    prefix = f"{name} | "
    return [line.strip().removeprefix(prefix) for line in output.splitlines() if line.strip().startswith(prefix)]


def test_the_demo_shows_trainer_and_consumer_and_names_the_recording(runs_dir):
    command = [sys.executable, DEMO, "--max-duration", "3ep"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    trainer, consumer = lines_of("trainer", result.stdout), lines_of("consumer", result.stdout)
    assert any("epoch   2" in line and "MulticlassAccuracy" in line for line in trainer)
    for metric in ("batches_per_sec  ", "  lr  "):
        assert any(metric in line for line in consumer)
        assert not any(metric in line for line in trainer)
    (recording,) = runs_dir.glob("*/recording-1.mcap")
    assert f"recorded in {recording}\n" in result.stdout
    assert f"consumer --replay {recording.parent} " in result.stdout
    assert f"offloop ui {recording.parent.name}\n" in result.stdout
    assert "\033" not in result.stdout
