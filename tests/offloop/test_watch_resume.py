"""A watched loop that is killed and resumed ends as one that was not, with a run and without one."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import watched_loop
from field_stream import Stream

import offloop
from offloop.attached.training import AttachedTraining
from offloop.bus.errors import ConfigurationError
from offloop.bus.runs.directory import list_runs
from offloop.bus.types.demand import Demand
from offloop.bus.types.event import Event
from offloop.own_loop import WatchedRun
from offloop.trainer.stream.run_stream import TrainingStream

pytestmark = pytest.mark.usefixtures("runs_dir")
EPOCHS, BATCHES = 3, 10


class Rest:
    """A dataloader that resumes in the middle of an epoch, as torchdata's."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.order, self.place = loader, [], 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if not self.order:
            self.order = list(self.loader)
        while self.place < len(self.order):
            self.place += 1
            yield self.order[self.place - 1]
        self.order, self.place = [], 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.place = state["order"], state["place"]


class Unsized:
    """A dataloader that does not know its length."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


class Killed(Exception):
    pass


class Loop(watched_loop.Loop):
    """Calls ``save`` wherever a state can be saved."""

    def __init__(self, kind: str = "plain", accumulate: int = 1, limit: int = BATCHES) -> None:
        super().__init__(accumulate, rows=77)
        loader = self.loader
        self.loader = {"plain": lambda: loader, "rest": lambda: Rest(loader), "unsized": lambda: Unsized(loader)}[
            kind
        ]()
        self.limit = limit
        self.epochs: list[int] = []
        self.fetched = 0
        self.saves: list[str] = []
        self.kill_at: int | None = None
        self.saved: dict[str, Any] = {}

    def step(self, index: int, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.fetched += 1
        return super().step(index, rows, labels)

    def parts(self) -> list[Any]:
        return [self.model, self.optimizer, self.scheduler, *([self.loader] if isinstance(self.loader, Rest) else [])]

    def save(self, place: str) -> None:
        if self.kill_at == len(self.saves):
            states = [part.state_dict() for part in self.parts()]
            random = torch.get_rng_state()
            self.saved = copy.deepcopy({"parts": states, "random": random, "run": self.run.state_dict()})
            raise Killed
        self.saves.append(place)

    def resume(self, saved: dict[str, Any]) -> "Loop":
        for part, state in zip(self.parts(), saved["parts"], strict=True):
            part.load_state_dict(state)
        return self

    def train(self, saved: dict[str, Any] | None = None) -> "Loop":
        self.run = run = offloop.watch(self.model, self.optimizer, gradient_accumulation_steps=self.accumulate)
        torch.manual_seed(2)
        if saved is not None:
            run.load_state_dict(saved["run"])
            torch.set_rng_state(saved["random"])
        self.save("before the first epoch")
        for epoch in run.epochs(EPOCHS):
            self.epochs.append(epoch)
            self.save("before the first batch")
            for index, batch in enumerate(run.batches(self.loader), getattr(self.loader, "place", 0)):
                run.log(loss=self.step(index, *batch))
                if (index + 1) % self.accumulate == 0 or index + 1 == BATCHES:
                    self.save("last batch" if index + 1 == BATCHES else "batch")
                if index + 1 == self.limit < BATCHES:
                    break
            self.save("end of the epoch")
        self.save("after everything")
        return self

    def trained(self) -> tuple[list[torch.Tensor], list[int]]:
        return self.weights, self.run.state_dict()["timestamp"][:10]


class Noting(Loop):
    def save(self, place: str) -> None:
        state = self.run.state_dict()
        self.found = [*getattr(self, "found", ()), (place, state["timestamp"][:10], state["epoch"])]


def same(one: Any, other: Any) -> bool:
    return one[1] == other[1] and all(torch.equal(left, right) for left, right in zip(one[0], other[0], strict=True))


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("a defect of ours")


def attached(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any) -> Any:
        stream: Any = Stream(Demand({}))
        stream.run_name, stream.answer, stream.poll = "w", None, None
        stream.mark_checkpoint = stream.close = lambda *_, **__: None
        return stream

    monkeypatch.setattr(TrainingStream, "_start_publisher", start)


def not_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingStream, "_start_publisher", fail)


def detached_in(method: str) -> Callable[[pytest.MonkeyPatch], None]:
    def prepare(monkeypatch: pytest.MonkeyPatch) -> None:
        attached(monkeypatch)
        original, calls = getattr(AttachedTraining, method), []

        def fail_later(training: Any, *given: Any, **more: Any) -> Any:
            calls.append(method)
            found = original(training, *given, **more)
            return fail() if len(calls) % 9 == 0 or method == "epoch_end" else found

        monkeypatch.setattr(AttachedTraining, method, fail_later)

    return prepare


WAYS = {
    "attached": attached,
    "not attached": not_attached,
    **{f"detached in {name}": detached_in(name) for name in ("batch_start", "batch_end", "save_place", "epoch_end")},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "accumulate", "limit", "way"),
    [
        ("plain", 1, 5, "attached"),
        ("unsized", 1, 10, "attached"),
        ("rest", 4, 10, "attached"),
        ("rest", 1, 10, "detached in batch_end"),
    ],
)
def test_killed_anywhere_and_resumed_it_ends_as_if_it_had_not_been(
    kind: str, accumulate: int, limit: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    WAYS[way](monkeypatch)
    whole = Loop(kind, accumulate, limit).train()
    expected = whole.trained()
    assert (whole.epochs, whole.fetched) == ([0, 1, 2], EPOCHS * limit)
    assert expected[1][1:3] == [EPOCHS, EPOCHS * -(-limit // accumulate)]
    for number, place in enumerate(whole.saves):
        # A dataloader that begins anew begins its epoch anew, and without a length it hides which batch is the last.
        if (place == "batch" and kind != "rest") or (place == "last batch" and kind == "unsized"):
            continue
        first = Loop(kind, accumulate, limit)
        first.kill_at = number
        with pytest.raises(Killed):
            first.train()
        second = Loop(kind, accumulate, limit).resume(first.saved).train(first.saved)
        assert same(second.trained(), expected), (number, place)
        assert first.fetched + second.fetched == whole.fetched, (number, place)


def test_what_a_state_says_is_the_same_with_a_run_and_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for prepare in WAYS.values():
        with monkeypatch.context() as patch:
            prepare(patch)
            found.append(Noting(accumulate=3).train().found)  # type: ignore[attr-defined]
    assert len(found[0]) == 2 + EPOCHS * 6
    assert all(one == found[0] for one in found)
    assert found[0][6] == ("end of the epoch", [0, 0, 4, 77, 0, 0, 0, 4, 77, 0], "ended")


def broken_off(run: WatchedRun, loop: Loop, inside: bool) -> Iterator[str]:
    """How a training resumes after a Ctrl-C, as its handler says and afterwards."""
    try:
        for _ in run.epochs(2):
            try:
                for index, batch in enumerate(run.batches(loader := loop.loader)):
                    loop.step(index, *batch)
                    if index == 4 or loader is None:
                        raise KeyboardInterrupt
            except KeyboardInterrupt:
                yield run.state_dict()["epoch"]
                if not inside:
                    raise
                break
    except KeyboardInterrupt:
        yield run.state_dict()["epoch"]
    yield run.state_dict()["epoch"]


@pytest.mark.parametrize("inside", [False, True])
def test_an_epoch_that_is_broken_off_has_not_ended(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    attached(monkeypatch)
    loop = Loop()
    found = list(broken_off(offloop.watch(loop.model, loop.optimizer), loop, inside))
    assert found == ["open"] * (2 if inside else 3)


@pytest.mark.parametrize(("at", "state"), [(14, "open"), (20, "ended")])
def test_a_stop_ends_the_epoch_only_after_its_last_batch(at: int, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(Loop):
        def save(self, place: str) -> None:
            if self.fetched == at and "batch" in place:
                self.run._training.state.stop_training()

    attached(monkeypatch)
    loop = Stopped().train()
    assert (loop.epochs, loop.fetched, loop.run.state_dict()["epoch"]) == ([0, 1], at, state)
    resumed = offloop.watch(loop.model, loop.optimizer)
    resumed.load_state_dict(loop.run.state_dict())
    assert list(resumed.epochs(3)) == ([1, 2] if state == "open" else [2])


def test_passes_that_are_epochs_count_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    attached(monkeypatch)

    def run(loop: Loop, saved: Any, *passes: int) -> dict[str, Any]:
        run = offloop.watch(loop.model, loop.optimizer)
        if saved:
            run.load_state_dict(saved)
        for batches in passes:
            for index, batch in enumerate(run.batches(loop.loader)):
                loop.step(index, *batch)
                if index + 1 == batches:
                    return run.state_dict()
        return run.state_dict()

    assert run(Loop(), None, 11, 11)["timestamp"][1:3] == [2, 20]
    for passes, epoch in (((11,), 2), ((10,), 2), ((11, 10), 3)):
        state = run(Loop(), None, *passes)
        assert run(Loop(), state, 11)["timestamp"][1:3] == [epoch, 10 * epoch]


def test_an_error_of_ours_within_the_step_is_not_the_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    not_attached(monkeypatch)
    expected = Loop().train().trained()
    attached(monkeypatch)
    loop = Loop()

    def break_steps(place: str) -> None:
        training = loop.run._training
        training.fire = fail_at_step
        training.requested_events = training.requested_events | {Event.AFTER_TRAIN_BATCH}

    loop.save = break_steps  # type: ignore[method-assign]

    def fail_at_step(event: Event) -> None:
        if event is Event.AFTER_TRAIN_BATCH:
            fail()

    assert same(loop.train().trained(), expected)
    assert loop.run.detached


def test_a_state_of_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attached(monkeypatch)
    loop = Loop()
    run = offloop.watch(loop.model, loop.optimizer)
    with pytest.raises(ConfigurationError):
        run.load_state_dict({"run_name": "r", "timestamp": [0], "epoch": "open"})
    assert list(run.epochs(1)) == [0]


def test_loops_that_branch_from_the_state_of_another_run_are_runs_of_their_own() -> None:
    def train(run_name: str, saved: Any = None) -> Any:
        loop = Loop()
        with offloop.watch(loop.model, loop.optimizer, run_name=run_name) as run:
            if saved is not None:
                run.load_state_dict(saved)
            for _ in run.epochs(1 if saved is None else 2):
                for index, batch in enumerate(run.batches(loop.loader)):
                    loop.step(index, *batch)
            return run.state_dict()

    base = train("base")
    found = [train("branch", base)["run_name"] for _ in range(2)] + [train("base", base)["run_name"]]
    assert found == ["branch", "branch-2", "base"]
    assert {run.name: len(run.attempts) for run in list_runs()} == {"base": 2, "branch": 1, "branch-2": 1}
