"""The quick starts of frameworks, with our line added: they train, are stopped and replayed. Completions of GRPO."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from attached_runs import snapshots_of
from helpers import wait_for
from paths import FOLDERS, ROOT

import offloop
from offloop.bus import Event
from offloop.bus.runs.directory import find_run, list_runs
from offloop.bus.subscriber.commands import send_command
from offloop.consumers import TrainerMetrics
from offloop.consumers.testing import replay

EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*_quickstart.py"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.needs("composer") if "composer" in one else ()) for one in EXAMPLES]
)
def test_a_quick_start_trains_is_stopped_and_replayed(
    name: str, runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    more = {"PYTHONPATH": str(FOLDERS["composer"])} if "composer" in name else {}
    script = tmp_path / f"{name}.py"
    shutil.copy(ROOT / "examples" / script.name, script)
    # Files of the user's with the names of our parts are in nobody's way.
    for part in ("bus", "consumers", "trainer"):
        (tmp_path / f"{part}.py").write_text("raise SystemExit('of the user')")
    with subprocess.Popen(
        [sys.executable, str(script), "100000"],
        env=os.environ | {"KERAS_BACKEND": "torch", "HF_HUB_OFFLINE": "1"} | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as training:
        try:
            run = wait_for(lambda: next((one for one in list_runs(runs_dir) if one.live), None), "a run", 150)
            send_command(run, "pause", wait=60)
            send_command(run, "resume", wait=60)
            assert send_command(run, "stop", wait=60).error is None
            shown, said = training.communicate(timeout=120)
        finally:
            training.kill()
    assert (training.returncode, "Traceback" in said) == (0, False), f"{shown}\n{said}"
    assert find_run(run.name).status == "stopped"
    losses = [one.loss for one in snapshots_of(run.name) if one.event is Event.BATCH_END]
    assert losses
    assert all(isinstance(one, float) for one in losses)
    logged = replay(TrainerMetrics(), find_run(run.name).path)
    assert [loss for _, loss in logged.metrics["loss/train/total"]] == losses


@pytest.mark.slow
def test_completions_rewards_and_phases_of_grpo_are_shown(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "grpo.py"), "11"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _, rows, _, rewards, spans, _ = done.stdout.split("Completions of")[1].split("\n\n")
    assert [line.split()[0] for line in rows.splitlines()] == ["step", *["0"] * 4, *["10"] * 4]
    assert [line.split()[0] for line in rewards.splitlines()] == ["repeats", "step", "0", "10"]
    assert all(name in spans for name in ("generate: ", "score: ", "train: "))


@pytest.mark.slow
def test_the_actors_learn_and_leave_one_run(runs_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "actors.py", "60"], capture_output=True, text=True, timeout=300, check=True
    )
    assert "reward" in done.stdout
    run = offloop.runs()["sums"]
    assert run.status == "finished"
    completions = run.table("completions", to="dict")
    assert len(completions["reward"]) >= 60 * 64
    # Which versions a worker meets is chance: it takes the newest.
    assert len(set(completions["version"])) > 2
    late, early = completions["reward"][-500:], completions["reward"][:500]
    assert sum(late) > sum(early)
    metrics = run.metrics(to="dict")
    # On a busy machine some actors join after the last batch.
    assert "rollout-0/reward" in metrics
    assert max(staleness for staleness in metrics["staleness"] if staleness is not None) > 0
