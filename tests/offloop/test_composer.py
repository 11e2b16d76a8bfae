"""Composer, attached to: what is published of ``fit()``, what can be done to it, and that it is not changed by that.

Composer trains in processes of their own, see ``composer_jobs.py``."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attached_runs import RUN, ending, events_of, logged_in, snapshots_of, values_of
from paths import FOLDERS, ROOT

from offloop.bus.recording.recording import Recording
from offloop.bus.runs.directory import find_run
from offloop.bus.types.event import Event

JOBS = ("events", "kept", "same", "commands", "resuming", "fields", "failing")

pytestmark = [pytest.mark.needs("composer"), pytest.mark.slow]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the jobs that run in one process have left what they did."""
    folder = tmp_path_factory.mktemp("composer")
    support = ROOT / "tests" / "support"
    path = os.pathsep.join([str(FOLDERS["composer"]), str(support)])
    process = subprocess.run(
        [sys.executable, "-W", "ignore", str(support / "composer_jobs.py"), str(folder), *JOBS],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OFFLOOP_TEST": "composer"},
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )
    assert process.returncode == 1, process.stdout + process.stderr
    assert "the user's" in process.stderr
    return folder


@pytest.fixture
def result_of(done: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    def read(job: str) -> Any:
        monkeypatch.setenv("OFFLOOP_RUNS_DIR", str(done / job / "runs"))
        return json.loads((done / job / "result.json").read_text())

    return read


def test_events_loss_rates_metrics_and_training_time_are_composers_own(result_of: Callable[[str], Any]) -> None:
    for run, (events, losses, rates, times, metrics, evaluated) in result_of("events").items():
        assert events_of(run) == events
        assert snapshots_of(run)[0].unavailable["events"] == []
        assert values_of(Event.BATCH_END, "loss", run) == pytest.approx(losses, abs=1e-6)
        assert [one["AdamW"][0] for one in values_of(Event.BATCH_END, "lr", run)] == pytest.approx(rates, abs=1e-12)
        ends = [one.timestamp.values for one in snapshots_of(run) if one.event is Event.BATCH_END]
        assert [[one.epoch, one.batch, one.sample, one.total_wct] for one in ends] == times
        logged = logged_in(run)["metrics/train/MulticlassAccuracy"]
        assert list(logged.values()) == pytest.approx(metrics, abs=1e-6)
        found = [one["eval"]["MulticlassAccuracy"] for one in values_of(Event.EVAL_END, "eval_metrics", run)]
        assert found == pytest.approx(evaluated, abs=1e-6)


def test_batches_that_are_kept_are_published_in_their_place_as_they_were(result_of: Callable[[str], Any]) -> None:
    counts, events, losses, rates, times = result_of("kept")
    assert counts == [5, 5]
    assert events_of("kept") == events
    assert values_of(Event.BATCH_END, "loss", "kept") == losses
    assert [one["AdamW"][0] for one in values_of(Event.BATCH_END, "lr", "kept")] == pytest.approx(rates, abs=1e-12)
    ends = [one for one in snapshots_of("kept") if one.event is Event.BATCH_END]
    assert [[*one.timestamp.values[1:4], one.timestamp.values.total_wct] for one in ends] == times


def test_weights_are_the_same_with_and_without_even_if_the_broker_is_killed(result_of: Callable[[str], Any]) -> None:
    (plain, watched), has_outputs = result_of("same")
    assert plain == watched
    assert has_outputs
    assert len(values_of(Event.BATCH_END, "loss")) == 10


def test_commands_are_done_and_what_cannot_be_done_is_refused_with_the_reason(result_of: Callable[[str], Any]) -> None:
    found = result_of("commands")
    assert [one is None for one in found["errors"]] == [True, True, True, False, True, True, True, True]
    at = found["batches"][1]
    assert found["rates"][at] == pytest.approx(0.5 * 0.9)
    assert found["heat"] == [3.0]
    assert found["evaluated"][0] == at
    assert found["intervals"] == [False]
    assert any(f"ba{at}-" in name for name in found["saved"])
    assert found["done"] == found["batches"][-1] < 500_000
    assert find_run(RUN).status == "stopped"
    assert found["refused"] == [
        "cannot evaluate on command: the Trainer has no eval_dataloader",
        "cannot save a checkpoint on command: give the Trainer a save_folder",
        None,
    ]


def test_a_training_that_is_resumed_counts_on_and_a_second_fit_belongs_to_the_run(
    result_of: Callable[[str], Any],
) -> None:
    result_of("resuming")
    (begin,) = [one for one in snapshots_of(attempt=2) if one.event is Event.FIT_START]
    assert begin.timestamp.values[1:4] == (1, 5, 40)
    assert snapshots_of(attempt=2)[-1].timestamp.values[1:4] == (3, 15, 120)
    assert [one.action for one in Recording(find_run(RUN).path, 2).read_checkpoints()] == ["load"]
    assert [one for one in events_of("again") if one.startswith("fit")] == ["fit_start", "fit_end"] * 2
    assert find_run("again").status == "finished"


def test_fields_are_what_the_model_has(result_of: Callable[[str], Any]) -> None:
    found, sent = result_of("fields")
    for name in ("gradient_norm", "parameter_norm"):
        assert [one[name] for one in sent[1:]] == pytest.approx([one[name] for one in found[1:]], rel=1e-5)
    for field, name in (("moment_norms", "moment"), ("update_norms", "update")):
        totals = [np.linalg.norm(list(one[field].values())) for one in sent[1:]]
        assert totals == pytest.approx([one[name] for one in found[1:]], rel=1e-4)
    assert {"data", "forward", "loss", "backward", "optimizer"} <= {name for name, _, _ in sent[2]["phases"]["spans"]}
    assert "memory_stats" in sent[2]["not_sent"]


def test_errors_of_ours_detach_and_those_of_the_user_end_the_run(result_of: Callable[[str], Any]) -> None:
    is_same, lines, detached = result_of("failing")
    assert (is_same, detached, len(lines), "a defect of ours" in lines[0]) == (True, True, 1, True)
    assert "a defect of ours" in str(ending("defect").error)
    # The next trainer with the same callback has a run again.
    assert find_run("defect-2").status == "finished"
    assert (ending().status, ending().error) == ("failed", "ZeroDivisionError: the user's")
