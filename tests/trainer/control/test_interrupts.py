"""Ctrl-C and SIGTERM while training: the first ends it after the batch at hand and saves, the second at once."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from gold import gold_data, gold_loader
from helpers import wait_for
from resumed import make, same, train, weights
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from training import Act, fitted, gold_trainer

from offloop.bus.runs.directory import find_run
from offloop.bus.types.event import Event
from offloop.trainer import State, Trainer


@pytest.fixture
def handlers() -> Iterator[None]:
    """Undo what a test does to the handlers of signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("event", [Event.EVAL_BATCH_START, Event.EPOCH_CHECKPOINT])
def test_between_two_epochs_no_further_batch_is_trained_on(event: Event, tmp_path: Path) -> None:
    def interrupt(event: Event, state: State, logger: object) -> None:
        # Once only: a second signal would end it at once.
        if int(state.timestamp.batch) == 5 and not state.stop_requested:
            os.kill(os.getpid(), signal.SIGINT)

    arguments: dict[str, Any] = {"save_interval": "9ep", "eval_interval": "1ep"}
    trainer = make(tmp_path, **arguments)
    trainer.state.algorithms.append(Act(interrupt, event))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert [path.name for path in tmp_path.glob("ep*")] == ["ep1-ba5-rank0.safetensors"]
    assert same(train(None, load_path=tmp_path, **arguments), train(None, **arguments))


def test_a_second_interrupt_ends_at_once(tmp_path: Path, handlers: None) -> None:
    def interrupt(event: Event, state: State, logger: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    # Not that of the event loop that other tests of this process have.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    trainer = make(tmp_path)
    trainer.state.algorithms.append(Act(interrupt, Event.BEFORE_LOSS))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert int(trainer.state.timestamp.batch) == 0
    assert not list(tmp_path.glob("ep*"))


def test_a_signal_that_was_ignored_stays_ignored(tmp_path: Path, handlers: None, capfd: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupt = Act(lambda *_: os.kill(os.getpid(), signal.SIGINT), Event.BATCH_START)
    trainer = fitted(save_folder=tmp_path, algorithms=interrupt)
    assert int(trainer.state.timestamp.batch) == 8
    assert not trainer.state.stopped
    assert "SIGINT" not in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_stop_that_comes_too_late_neither_marks_the_run_nor_stops_the_next_fit(runs_dir: Path) -> None:
    def stop(event: Event, state: State, logger: object) -> None:
        if event is Event.FIT_END or not state.fitting:
            state.stop_training()
            state.request_stop()

    with gold_trainer(
        publish=True,
        run_name="late",
        max_duration="1ep",
        eval_dataloader=gold_loader("eval_a", 12, 5),
        eval_interval="9ep",
        algorithms=Act(stop, Event.FIT_END, Event.EVAL_END),
    ) as trainer:
        trainer.fit()
        assert trainer.state.eval_metric_values
        trainer.fit(duration="1ep")
        assert trainer.state.timestamp.values[:3] == (0, 2, 8)
        assert not trainer.state.stopped
    assert find_run("late").status == "finished"


def make_with_worker(workers: int = 0, **arguments: Any) -> Trainer:
    """Return a training with a random order, an evaluation after each batch, and workers that stay over epochs."""

    def load(part: str, rows: int, workers: int = 0, **more: Any) -> "DataLoader[Any]":
        data = TensorDataset(*gold_data(part, rows))
        if workers:
            # torch looks whether a worker is still there only so many seconds after it last heard of one.
            more |= {"num_workers": workers, "persistent_workers": True, "timeout": 5}
        return DataLoader(data, batch_size=6, **more)

    # torch takes other numbers from its own generator when workers stay.
    order = RandomSampler(range(24), generator=torch.Generator().manual_seed(3))
    return gold_trainer(
        train_dataloader=load("train", 24, workers, sampler=order),
        eval_dataloader=load("eval_a", 6),
        eval_interval="1ba",
        **arguments,
    )


def run_in_group(do: Callable[..., object], path: Path, *arguments: Any) -> str:
    """Run a function in a process group of its own, as a terminal's, and return the group's standard error."""

    def lead() -> None:
        os.setsid()
        sys.stderr = path.open("a", buffering=1)
        do(*arguments)

    process = multiprocessing.get_context("fork").Process(target=lead)
    process.start()
    process.join()
    return path.read_text()


def await_sleep(pid: int) -> None:
    """Wait until the main thread of a process has slept for a moment."""
    process = psutil.Process(pid)
    seen = last = None

    def sleeps() -> bool:
        nonlocal seen, last
        before, last = last, (process.status(), process.num_ctx_switches().voluntary)
        if last != before or last[0] != psutil.STATUS_SLEEPING:
            seen = time.monotonic()
        return seen is not None and time.monotonic() - seen > 0.2

    wait_for(sleeps, "the worker to wait")


def fit_until_all_are_signalled(folder: Path, number: int, batch: int) -> None:
    """Trains, and sends a signal to all of the group."""

    def interrupt(event: Event, state: State, logger: object) -> None:
        # Also after the last batch of an epoch there is a BEFORE_DATALOADER.
        if state.timestamp.values[2] == batch and state.timestamp.values[7] == batch % 4 and not state.stop_requested:
            (worker,) = multiprocessing.active_children()
            assert worker.pid
            # At work it may be interrupted with a lock taken, for which it and torch then wait for ever.
            await_sleep(worker.pid)
            # From another process: one that its parent ends has done well, for torch.
            subprocess.run(["sh", "-c", f"kill -{number} -{os.getpgrp()}"], check=False)
            if number == signal.SIGTERM:
                # It is left for torch to find.
                os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)

    trainer = make_with_worker(
        1,
        save_folder=folder,
        save_interval="9ep",
        algorithms=Act(interrupt, Event.BEFORE_DATALOADER),
    )
    trainer.fit()


@pytest.mark.parametrize(
    ("name", "batch", "expected"),
    [
        # A worker that is forked by the training goes on through Ctrl-C.
        ("SIGINT", 5, "ep1-ba6"),
        # SIGTERM ends it, while the training waits for a batch, which may be the first one of an epoch.
        ("SIGTERM", 5, "ep1-ba5"),
        ("SIGTERM", 4, "ep1-ba4"),
    ],
)
def test_a_signal_to_the_workers_as_well_ends_the_training_with_a_checkpoint(
    name: str, batch: int, expected: str, tmp_path: Path
) -> None:
    number = signal.Signals[name]
    said = run_in_group(
        fit_until_all_are_signalled, tmp_path / "stderr", tmp_path / "saved", number, batch
    ).splitlines()
    assert said[-1] == f"KeyboardInterrupt: signal {name}"
    assert [line for line in said if line.startswith("SIG")] == [
        f"{name}: stopping after this batch, with a checkpoint; again to stop at once"
    ]
    assert [path.name for path in tmp_path.glob("saved/ep*")] == [f"{expected}-rank0.safetensors"]
    with make_with_worker() as whole:
        whole.fit()
    with make_with_worker(load_path=tmp_path / "saved") as resumed:
        resumed.fit()
    assert same(weights(resumed), weights(whole))
