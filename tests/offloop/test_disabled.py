"""Trainings with offloop disabled: they are what they are without a line of it."""

import importlib
import os
import subprocess
import sys
import threading
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from training import gold_trainer

import offloop
from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp

DATA = [(torch.ones(4, 6) * number, torch.zeros(4, dtype=torch.long)) for number in range(5)]


@pytest.fixture(params=["variable", "argument"])
def options(request: pytest.FixtureRequest, runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if request.param == "variable":
        monkeypatch.setenv("OFFLOOP_DISABLED", "1")
        return {}
    return {"enabled": False}


def train(model: torch.nn.Module, optimizer: Any, epochs: Any, batches: Any, log: Any = lambda **_: None) -> list[Any]:
    seen = []
    for epoch in epochs:
        for index, (rows, labels) in enumerate(batches(DATA)):
            loss = torch.nn.functional.cross_entropy(model(rows), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            log(loss=loss)
            seen.append((epoch, index, loss.item()))
    return seen


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def hooks_of(one: Any) -> list[Any]:
    return [value for name, value in vars(one).items() if "hook" in name and isinstance(value, dict) and value]


def traces() -> tuple[Any, ...]:
    me = psutil.Process()
    return set(me.children()), set(me.net_connections()), me.num_fds(), threading.active_count()


def test_a_loop_is_left_as_it_is(options: dict[str, Any], runs_dir: Path) -> None:
    model, optimizer = make()
    plain = train(model, optimizer, range(3), iter)
    model, optimizer = make()
    hooks, before = (hooks_of(model), hooks_of(optimizer)), traces()
    with offloop.watch(model, optimizer, run_name="r", callbacks=["speed"], loggers=["wandb"], **options) as run:
        assert train(model, optimizer, run.epochs(3), run.batches, run.log) == plain
        with run.evaluating("eval") as metrics:
            metrics["accuracy"] = 1.0
        run.checkpoint_saved()
        run.event("done", value=1)
        with run.span("think"):
            run.log_table("samples", [{"text": "a"}])
        assert (run.run_name, run.stop_requested, run.stop_reason, run.detached) == (None, False, None, True)
        assert (hooks_of(model), hooks_of(optimizer)) == hooks
        # What other tests left may go meanwhile.
        assert all(now <= then for now, then in zip(traces(), before, strict=True))
        with pytest.raises(AttributeError):
            run.logg(loss=1)  # type: ignore[attr-defined]
    assert not list(runs_dir.iterdir())


def test_a_disabled_loop_counts_batches(options: dict[str, Any]) -> None:
    model, optimizer = make()
    run = offloop.watch(model, optimizer, gradient_accumulation_steps=2, **options)
    for epoch in run.epochs(4):
        for index, _ in enumerate(run.batches(DATA)):
            if (epoch, index) == (1, 2):
                break
        if epoch == 1:
            saved = run.state_dict()
            break
    assert Timestamp.from_values(saved["timestamp"]).values.batch == 4
    assert saved["epoch"] == "ended"


def test_a_callback_of_composer_starts_no_run(
    options: dict[str, Any], runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake: Any = ModuleType("composer")
    fake.Event, fake.Callback = Enum("Event", {event.name: event.value for event in Event}), object
    monkeypatch.setitem(sys.modules, "composer", fake)
    monkeypatch.setitem(sys.modules, "offloop.composer", ModuleType("offloop.composer"))  # restored after the test
    del sys.modules["offloop.composer"]
    module = importlib.import_module("offloop.composer")
    callback = module.OffloopCallback(run_name="r", callbacks=["speed"], **options)
    for event in fake.Event:
        callback.run_event(event, None, None)
    callback.load_state_dict(callback.state_dict())
    callback.close(None, None)
    assert callback.detached
    assert not list(runs_dir.iterdir())


def test_mistakes_are_found_and_what_only_a_run_needs_may_be_missing(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make()
    with pytest.raises(ConfigurationError, match="no option 'runname'"):
        offloop.watch(model, optimizer, runname="r", **options)  # type: ignore[call-arg]
    offloop.watch(model, optimizer, stream_to="http://no-server", **options)


def test_words_switch_it_off_and_on_and_unknown_values_are_refused(
    runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOOP_DISABLED", " YES ")
    assert offloop.watch(*make()).detached
    monkeypatch.setenv("OFFLOOP_DISABLED", "2")
    with pytest.raises(ConfigurationError):
        offloop.watch(*make())
    monkeypatch.setenv("OFFLOOP_DISABLED", "No")
    with offloop.watch(*make(), run_name="r") as run:
        assert not run.detached
        assert list(run.epochs(1)) == [0]
    assert (runs_dir / "r").is_dir()


def test_a_trainer_trains_without_a_stream(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOOP_DISABLED", "1")
    before = set(psutil.Process().children())  # of other tests
    trainer = gold_trainer(
        publish=True,
        callbacks=["speed"],
        flight_recorder="10ba",
        wait_for="all",
        stream_to="http://no-server",
    )
    trainer.fit()
    trainer.close()
    assert int(trainer.state.timestamp.batch) == 8
    assert not list(runs_dir.iterdir())
    assert set(psutil.Process().children()) <= before


def test_offloop_run_runs_the_command_as_it_is(runs_dir: Path, tmp_path: Path) -> None:
    script = "import os, sys; print(os.environ.get('OFFLOOP_RUN'), 'offloop' in sys.modules); sys.exit(3)"
    command = [sys.executable, "-m", "offloop", "run", "--log", "wandb", "--", sys.executable, "-c", script]
    environment = {**os.environ, "OFFLOOP_DISABLED": "1"}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (3, "None False\n")
    assert found.stderr == "offloop attaches to nothing: OFFLOOP_DISABLED is set\n"
