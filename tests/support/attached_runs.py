"""What the tests of all adapters share: a tiny training's data and model, commands to it, and what its run recorded."""

import json
import os
import signal
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from brokers import broker_pid, free_address
from forked import Program, run_forked
from helpers import wait_for
from torch import nn

from offloop.attached.training import AttachedTraining
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.publisher.publisher import Publisher
from offloop.bus.recording.recording import Recording
from offloop.bus.runs.directory import RunInfo, find_run
from offloop.bus.subscriber.commands import send_command
from offloop.bus.types.commands import Argument, Outcome
from offloop.bus.types.event import Event

RUN = "r"
"""The run's name, unless a test gives another."""


def make_rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of eight numbers each, and classes from 0 to 3: the same ones every time."""
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(5))
    return inputs, inputs[:, :4].argmax(1)


def make_network(seed: int = 3) -> nn.Sequential:
    """A network for :func:`make_rows`, with dropout: what draws a random number more or less changes its weights."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4))


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the weights, by name."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def are_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether weights are equal, bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def snapshots_of(run: str = RUN, attempt: int | None = None, rank: int = 0) -> list[Snapshot]:
    """What a run recorded, in order."""
    recording = Recording(find_run(run).path, attempt)
    found = [one for one in recording if one.rank == rank]
    assert recording.damage is None
    assert not recording.gaps
    return found


def events_of(run: str = RUN, attempt: int | None = None, rank: int = 0) -> list[str]:
    """The names of the events that a run recorded, in order."""
    return [one.event.value for one in snapshots_of(run, attempt, rank)]


def has_recorded(event: Event, run: str = RUN) -> bool:
    """Whether a run that is live has recorded such an event by now; the last record may be there in part."""
    return any(one.event is event for one in Recording(find_run(run).path))


def values_of(event: Event, field: str, run: str = RUN, attempt: int | None = None, rank: int = 0) -> list[Any]:
    """A field of each of these events, of those that have it."""
    found = [one for one in snapshots_of(run, attempt, rank) if one.event is event]
    return [one.fields[field] for one in found if field in one.fields]


def logged_in(run: str = RUN, attempt: int | None = None) -> dict[str, dict[int, float]]:
    """What was logged, by name and step."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for one in snapshots_of(run, attempt):
        for step, values in one.fields.get("logged", ()):
            for name, value in values.items():
                found[name][step] = value
    return found


def ending(run: str = RUN, attempt: int | None = None) -> Any:
    """How a run ended."""
    return Recording(find_run(run).path, attempt).read_endings()[-1]


def kill_broker(run: str = RUN) -> None:
    """Kills the broker of a live run."""
    os.kill(broker_pid(find_run(run).path), signal.SIGKILL)


def break_down(patching: pytest.MonkeyPatch, method: str = "batch_end") -> None:
    """Has a method of ours fail."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a defect of ours")

    patching.setattr(AttachedTraining, method, fail)


def run_two_ranks(job: str, folder: Path, **more: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Runs the ``main(folder)`` of a module of this folder on two ranks, as torchrun does; returns what each wrote to
    ``FOLDER/rank-N.json``, and what it said."""
    port = free_address().rpartition(":")[2]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", **more}
    code = f"import {job}, pathlib; {job}.main(pathlib.Path({str(folder)!r}))"
    ranks = [Program(code, {**address, "RANK": rank, "LOCAL_RANK": rank}) for rank in ("0", "1")]
    ended = run_forked(job, folder, ranks)
    said = [one.stderr for one in ended]
    assert [one.exit_code for one in ended] == [0, 0], "\n".join(said)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)], said


def note_marks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """A list to which the marks of checkpoints are appended: whether one is saved or loaded, and its batch."""
    marks: list[tuple[str, int]] = []
    mark = Publisher.mark_checkpoint

    def note(self: Publisher, action: str, timestamp: Any, run: str | None = None) -> None:
        marks.append((action, timestamp[2]))
        mark(self, action, timestamp, run)

    monkeypatch.setattr(Publisher, "mark_checkpoint", note)
    return marks


class Sender:
    """Sends commands to the run from another thread, one after the other, from a batch on::

    sender = Sender(("set", "lr", 0.5), ("stop",))
    ...
    sender.step(batch)   # after each batch, on one rank
    ...
    assert [one.error for one in sender.outcomes] == [None, None]
    """

    def __init__(self, *commands: tuple[Argument, ...], at: int = 3, run: str = RUN) -> None:
        self._commands, self._at, self._run = commands, at, run
        self._outcomes: list[Outcome] = []
        self._batch = 0
        self._thread = threading.Thread(target=self._send)

    def step(self, batch: int) -> None:
        """Begins at the batch that it waits for."""
        self._batch = batch
        if batch == self._at:
            self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether all have been answered."""
        return len(self._outcomes) == len(self._commands)

    @property
    def outcomes(self) -> list[Outcome]:
        """The answers, once all have come."""
        self._thread.join(60)
        assert self.is_done, f"{len(self._outcomes)} of {len(self._commands)} commands were answered"
        return self._outcomes

    def _send(self) -> None:
        def live() -> RunInfo | None:
            run = find_run(self._run)
            return run if run.live else None

        run = wait_for(live, f"run {self._run} to be live")
        for name, *arguments in self._commands:
            self._outcomes.append(send_command(run, str(name), *arguments, wait=60))
            if name == "resume":
                wait_for(lambda: self._batch > (self._outcomes[-1].batch or 0), "a batch after the pause")
