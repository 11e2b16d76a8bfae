"""A profile of a few batches of a running training: whole, bounded, and without an effect on the weights."""

import contextlib
import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import wait_for
from training import Act, gold_trainer
from watched_loop import Loop

from offloop.bus import Event, Recording, find_run
from offloop.bus.errors import ConfigurationError
from offloop.bus.types.commands import Command, check_command
from offloop.trainer import AlgorithmLogger, State


def commands(control: Any, at: Mapping[int, tuple[str, ...]], batch: int) -> None:
    if batch in at:
        control.take(Command("profile", at[batch], id=f"at {batch}"))


def train(name: str, runs_dir: Path, at: Mapping[int, tuple[str, ...]]) -> dict[str, torch.Tensor]:
    """Trains 20 batches, with a command for a profile after some of them; returns the weights."""

    def send(event: Event, state: State, logger: AlgorithmLogger) -> None:
        commands(trainer._control, at, int(state.timestamp.batch))

    act = Act(send, Event.BATCH_END)
    settings: dict[str, Any] = {"publish": True, "run_name": name, "runs_dir": runs_dir, "max_duration": "20ba"}
    with gold_trainer(algorithms=[act], **settings) as trainer:
        trainer.fit()
    wait_for(lambda: not find_run(name).live, "the run to end")
    return trainer.state.model.state_dict()


def outcomes(run: Path) -> list[Any]:
    return [(one.batch, one.error, one.done) for one in Recording(run).read_commands()]


def operators(path: Path, kind: str = "cpu_op") -> list[str]:
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return [one["name"] for one in events if one.get("cat") == kind]


def batches_in(path: Path) -> list[str]:
    return [name for name in operators(path, "user_annotation") if name.startswith("ProfilerStep#")]


def test_a_profile_has_the_batches_that_were_asked_for_and_changes_no_weights(runs_dir: Path) -> None:
    plain = train("plain", runs_dir, {})
    profiled = train("r", runs_dir, {5: ("3ba",), 6: ("1ba",), 15: ("2ba",), 19: ("5ba",)})
    assert all(torch.equal(plain[name], profiled[name]) for name in plain)
    paths = [runs_dir / "r" / f"profile-1-0-{batch}.json.gz" for batch in (5, 15)]
    assert outcomes(runs_dir / "r") == [
        (6, "a profile is being made, until batch 8: send it later", None),
        (8, None, str(paths[0])),
        (17, None, str(paths[1])),
        (20, "the training has finished", None),
    ]
    assert set(runs_dir.glob("*/profile*")) == set(paths)
    assert batches_in(paths[0]) == ["ProfilerStep#5", "ProfilerStep#6", "ProfilerStep#7"]
    # Two linear layers, forward: of three batches, and of two.
    assert [operators(path).count("aten::addmm") for path in paths] == [6, 4]
    assert not torch.autograd.profiler._is_profiler_enabled, "the last one ended with the training"


def test_a_loop_of_ones_own_is_profiled_unless_it_does_that_itself(runs_dir: Path) -> None:
    weights = Loop().plain().weights
    for name, profiler in (("free", contextlib.nullcontext()), ("busy", torch.profiler.profile())):
        loop = Loop()
        loop.after_batch = lambda loop=loop: commands(loop.run._training._control, {3: ("3ba", "0")}, len(loop.losses))
        with profiler:
            loop.watched(run_name=name, runs_dir=runs_dir)
        loop.run.close()
        assert all(map(torch.equal, weights, loop.weights))
    path = runs_dir / "free" / "profile-1-0-3.json.gz"
    assert outcomes(runs_dir / "free") == [(6, None, str(path))]
    assert batches_in(path) == ["ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"]
    assert operators(path).count("aten::dropout") == 3
    assert outcomes(runs_dir / "busy") == [(3, "rank 0 has an active profiler of its own: end that one first", None)]


@pytest.mark.parametrize("given", [(), ("51ba",), ("0ba",), ("3ep",), ("3",), ("3ba", "-1"), ("3ba", "0", "1")])
def test_what_is_no_profile_is_refused(given: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="use 'profile 5ba', or 'profile 5ba --ranks 0,1'"):
        check_command("profile", given)
