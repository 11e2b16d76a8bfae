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


GUIDE = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(GUIDE)))
def test_the_guide_to_training_runs(number, runs_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = run(GUIDE[number], tmp_path)
    if "token" in GUIDE[number]:
        assert printed == "1600tok\n"
    if "autoresume" in GUIDE[number]:
        names = {path.name for path in (tmp_path / "checkpoints" / "mine").iterdir()}
        assert names == {f"{name}-rank0.safetensors" for name in ("ep1-ba15", "ep2-ba16", "latest")}
        assert len(list((runs_dir / "mine").glob("recording-*.mcap"))) == 2


DOCUMENTS = [
    "README.md",
    *(
        f"docs/{name}.md"
        for name in ("algorithms", "callbacks", "checkpoints", "design", "loggers", "protocol", "training")
    ),
]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / document).parent / target).exists(), target


def test_the_protocol_names_exactly_the_inner_events():
    paragraph = (ROOT / "docs" / "protocol.md").read_text().split("**Base events**")[1].split("\n\n")[0]
    named = {Event(name) for name in re.findall(r"`([a-z_]+)`", paragraph) if name in {event.value for event in Event}}
    assert named - {Event.BATCH_END, Event.EPOCH_END} == set(Event) - BASE_EVENTS
