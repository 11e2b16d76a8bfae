"""The page on callbacks: what it says is there is there, and its code runs."""

import re
import subprocess
import sys
from pathlib import Path

from paths import ROOT

from offloop.bus.recording.recording import Recording
from offloop.consumers.cli.registry import CALLBACKS

PAGE = (ROOT / "docs" / "callbacks.md").read_text()
[TRAINING] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ROWS = {
    cells[0].split("`")[1]: cells
    for line in PAGE.split("## Those that come with")[1].split("### ")[0].splitlines()
    if line.startswith("| [`")
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}


def test_the_training_on_the_page_runs(runs_dir: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", TRAINING], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    [recording] = runs_dir.glob("*/recording-1.mcap")
    assert any(snapshot.timestamp.epoch == "1ep" for snapshot in Recording(recording))


def test_every_callback_is_on_the_page_with_its_class() -> None:
    reference = (ROOT / "docs" / "reference" / "callbacks.md").read_text()
    for entry in CALLBACKS.entries():
        name = CALLBACKS.find(entry.name).__name__
        assert f"`{name}`" in ROWS[entry.name], entry.name
        assert f"(reference/callbacks.md#offloop.consumers.{name})" in ROWS[entry.name][0], entry.name
        assert f"\n::: offloop.consumers.{name}\n" in reference, entry.name
    assert list(ROWS) == sorted(ROWS)
