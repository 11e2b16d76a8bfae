"""The flight recorder: the last batches with all events, written when there is a reason, whatever the training does."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gold import GoldMLP
from helpers import wait_for
from paths import SUPPORT
from training import Act, gold_trainer

from offloop.bus import Event, Recording, Snapshot, find_run
from offloop.bus.errors import ConfigurationError
from offloop.bus.runs.alerts import read_alerts
from offloop.bus.runs.flight import list_dumps
from offloop.bus.subscriber.commands import send_command
from offloop.bus.types.demand import BASE_EVENTS
from offloop.trainer import State

SCRIPT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from training import Act, gold_trainer
from offloop.bus import Event

def hang(event, state, logger):
    if state.timestamp.batch == 30:
        print("hangs", flush=True)
        time.sleep(600)

gold_trainer(
    publish=True, run_name="r", runs_dir=sys.argv[2], max_duration="100ba", flight_recorder="20ba",
    algorithms=[Act(hang, Event.BEFORE_BACKWARD)],
).fit()
"""
OF_A_BATCH = [
    *("before_dataloader", "after_dataloader", "batch_start", "before_train_batch", "before_forward", "after_forward"),
    *("before_loss", "after_loss", "before_backward", "after_backward", "after_train_batch", "batch_end"),
    "batch_checkpoint",
]


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A training that stands still in the middle of its 31st batch, and where its runs are."""
    runs = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-c", SCRIPT, str(SUPPORT), str(runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "hangs\n"
        yield process, runs / "r"
        process.kill()


def about_of(dump: Path) -> tuple[str, str]:
    about = Recording(dump).flight
    assert about is not None
    return about


def assert_hangs_in_backward(dump: Path) -> None:
    snapshots = list(Recording(dump))
    names = [one.event.value for one in snapshots]
    # Twenty whole batches, and of the 31st what came before it hangs: what a callback in the loop was called for last.
    assert names[-8:] == OF_A_BATCH[:8]
    assert {one.timestamp.values.batch for one in snapshots[-8:]} == {30}
    assert Counter(names)["batch_end"] == 20
    assert [name for name in names if name in OF_A_BATCH][-8 - 13 :][:13] == OF_A_BATCH
    ends = [one for one in snapshots if one.event is Event.BATCH_END]
    assert [one.timestamp.values.batch for one in ends] == list(range(11, 31))
    assert all(one.fields["loss"] > 0 for one in ends)
    for one in ends:
        assert {"data", "forward", "backward", "optimizer"} <= {span[0] for span in one.fields["phases"]["spans"]}
    assert not Recording(dump).damage


def test_a_hung_loop_is_dumped_on_request_and_when_killed(hung: Any) -> None:
    process, run = hung
    outcome = send_command(find_run(str(run)), "dump", reason="it hangs")
    assert str(outcome).startswith("'dump' wrote flight-1-1.mcap: ")
    assert about_of(run / "flight-1-1.mcap") == ("asked", "it hangs")
    assert_hangs_in_backward(run / "flight-1-1.mcap")
    command = [sys.executable, "-m", "offloop.consumers", "--replay", str(run / "flight-1-1.mcap"), "--callbacks", "lr"]
    replayed = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "run r had not ended when its flight recorder wrote this: " in replayed.stderr + replayed.stdout
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: len(list_dumps(run)) == 2, "the dump of the dead training")
    assert about_of(run / "flight-1-2.mcap") == ("lost", "rank 0: the trainer's process died")
    assert_hangs_in_backward(run / "flight-1-2.mcap")
    # What it was killed with is in the recording as without.
    wait_for(lambda: not find_run(str(run)).live, "the broker to end")
    assert {one.event for one in Recording(run)} <= BASE_EVENTS


@pytest.fixture
def train(runs_dir: Path) -> Callable[..., State]:
    def train(name: str, *, do: Callable[..., object] | None = None, **arguments: Any) -> State:
        torch.manual_seed(0)
        algorithms = [] if do is None else [Act(do, Event.AFTER_LOSS)]
        settings = {"publish": True, "run_name": name, "runs_dir": runs_dir, "max_duration": "30ba", **arguments}
        with gold_trainer(model=GoldMLP(), algorithms=algorithms, **settings) as trainer:
            trainer.fit()
        wait_for(lambda: not find_run(name).live, "the run to end")
        return trainer.state

    return train


def described(one: Snapshot) -> tuple[Any, ...]:
    fields = {name: value for name, value in one.fields.items() if name not in ("system", "hyperparameters")}
    values = one.timestamp.values._replace(total_wct=0, iteration_wct=0, epoch_wct=0, batch_wct=0)
    return one.event, one.seq, values, fields


def test_stream_and_weights_are_equal_without_a_flight_recorder(runs_dir: Path, train: Callable[..., State]) -> None:
    without, recorded = train("without"), train("with", flight_recorder="5ba")
    for one, other in zip(without.model.parameters(), recorded.model.parameters(), strict=True):
        assert torch.equal(one, other)
    streams = [[described(one) for one in Recording(runs_dir / name)] for name in ("without", "with")]
    assert streams[0] == streams[1]
    # Nothing has happened, so nothing is written.
    assert not list_dumps(runs_dir / "with")


def test_nan_is_dumped_and_reported_once(runs_dir: Path, train: Callable[..., State]) -> None:
    def spoil(event: Event, state: State, logger: object) -> None:
        if state.timestamp.batch in (12, 14):
            state.loss = state.loss * float("nan")

    train("r", do=spoil, flight_recorder=3)
    (dump,) = wait_for(lambda: list_dumps(runs_dir / "r"), "the dump")
    assert about_of(dump) == ("nan", "the loss of rank 0 is nan at batch 13")
    assert [one.text for one in read_alerts(runs_dir / "r")] == ["the loss of rank 0 is nan at batch 13"]


@pytest.mark.parametrize("given", ["2ep", -1])
def test_an_invalid_number_of_batches_is_refused(given: Any) -> None:
    with pytest.raises(ConfigurationError, match="flight_recorder"):
        gold_trainer(publish=True, flight_recorder=given)
