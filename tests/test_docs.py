"""The docs: code in them runs, and what is generated is not stale."""

import re
import subprocess
import sys
from pathlib import Path

import commands_page
import pytest
from helpers import wait_for

from bus import Event, Recording, find_run
from bus.demand import BASE_EVENTS

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_page_of_commands_is_what_the_commands_say():
    assert commands_page.PAGE.read_text() == commands_page.page(), "stale: run python tests/commands_page.py"


def run(code, tmp_path, *arguments):
    (tmp_path / "example.py").write_text(code)
    done = subprocess.run(
        [sys.executable, tmp_path / "example.py", *arguments], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_trains_a_model(runs_dir, tmp_path):
    run(BLOCKS[0], tmp_path)
    assert find_run("mine").status == "finished"
    rows = (runs_dir / "mine" / "metrics.jsonl").read_text()
    assert "throughput/samples_per_sec" in rows
    assert "lr-SGD/group0" in rows


def test_the_readmes_callback_watches_the_readmes_loop(runs_dir, tmp_path):
    run(BLOCKS[2], tmp_path)
    assert len(list(Recording(runs_dir / "my-run"))) == 100
    (tmp_path / "explosion.py").write_text(BLOCKS[1])
    command = [sys.executable, "-m", "consumers", "--callbacks", "explosion.py:Explosion", "--run", "my-run"]
    option = "explosion.py:Explosion.limit=0.4"
    done = subprocess.run(
        [*command, "-o", option], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("loss")] == [
        "loss 1.0 at batch 1",
        "loss 0.5 at batch 2",
    ]


def test_the_plain_loop_example_can_be_followed(runs_dir):
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "plain_loop.py", "300"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "recorded in" in done.stdout
    *_, last = Recording(runs_dir / "my-run").snapshots([Event.BATCH_END])
    assert last.loss < 0.01
    wait_for(lambda: not find_run("my-run").live, "the broker to end")


@pytest.mark.parametrize("document", ["README.md", "docs/design.md", "docs/protocol.md"])
def test_links_lead_somewhere(document):
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / document).parent / target).exists(), target


def test_the_protocol_names_exactly_the_inner_events():
    paragraph = (ROOT / "docs" / "protocol.md").read_text().split("**Base events**")[1].split("\n\n")[0]
    named = {Event(name) for name in re.findall(r"`([a-z_]+)`", paragraph) if name in {event.value for event in Event}}
    assert named - {Event.BATCH_END, Event.EPOCH_END} == set(Event) - BASE_EVENTS
