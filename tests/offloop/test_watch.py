"""A loop of one's own, watched: what is published of it, what can be done to it, and that it is not changed by that."""

import copy
import gc
import pickle
import threading
import time
import weakref
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from attached_runs import (
    Sender,
    break_down,
    ending,
    events_of,
    has_recorded,
    logged_in,
    run_two_ranks,
    snapshots_of,
    values_of,
)
from fake_gpu import FakeGpu
from field_stream import Stream
from forked import Program, run_forked
from torch._dynamo.utils import counters
from watched_loop import ROWS, SIZE, Loop

import offloop
from offloop.attached.training import ALWAYS
from offloop.bus import ConfigurationError, Event, Recording, Subscriber
from offloop.bus.runs.directory import find_run, list_runs
from offloop.bus.types.commands import Command
from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.source import Source
from offloop.trainer.stream.run_stream import TrainingStream

pytestmark = pytest.mark.usefixtures("runs_dir")


def same(one: Loop, other: Loop) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one.weights, other.weights, strict=True))


BATCH = ["before_dataloader", "after_dataloader", "batch_start", "before_forward", "after_forward", "before_backward"]
STEP = ["after_backward", "after_train_batch", "batch_end", "batch_checkpoint"]
MICROBATCH = [*BATCH[:2], *BATCH[3:], STEP[0]]


@pytest.mark.parametrize(("accumulate", "rows"), [(1, 80), (4, 77)])
def test_events_loss_rates_and_training_time_are_those_of_the_loop(accumulate: int, rows: int) -> None:
    loop = Loop(accumulate, rows).watched(run_name="w", record="all")
    batches: list[str] = []
    for count in [accumulate] * (10 // accumulate) + [10 % accumulate] * bool(10 % accumulate):
        batches += [*BATCH, STEP[0], *MICROBATCH * (count - 1), *STEP[1:]]
    epoch = ["epoch_start", *batches, "before_dataloader", "epoch_end", "epoch_checkpoint"]
    seen = events_of("w")
    assert seen == ["init", "fit_start", *epoch * 2, "fit_end"]
    info, first = find_run("w").last.info, snapshots_of("w")[0]
    assert Source.of(info) == Source.of(first.fields)
    assert info["framework"] == {"name": "your own loop", "version": None}
    assert set(first.unavailable["events"]) == {event.value for event in Event} - set(seen) - {
        event.value for event in ALWAYS
    }
    assert loop.run.stop_requested is False

    ends = [one for one in snapshots_of("w") if one.event is Event.BATCH_END]
    per_epoch = -(-10 // accumulate)
    assert [one.timestamp.batch.value for one in ends] == list(range(1, 2 * per_epoch + 1))
    groups = [list(part) for _, part in groupby(range(20), lambda index: (index // 10, index % 10 // accumulate))]
    means = [sum(loop.losses[index] for index in group) / len(group) for group in groups]
    assert [one.loss for one in ends] == pytest.approx(means, abs=1e-6)
    assert [one.lr["AdamW"][0] for one in ends] == pytest.approx(loop.rates, abs=1e-12)
    assert (ends[-1].timestamp.sample.value, ends[-1].timestamp.epoch.value) == (2 * rows, 1)
    assert {one.dataloader_len for one in ends} == {per_epoch}
    last = snapshots_of("w")[-1]
    assert (last.event, last.timestamp.epoch.value, str(last.max_duration)) == (Event.FIT_END, 2, "2ep")


class ScaledLoop(Loop):
    """A training in mixed precision, whose third step overflows."""

    def step(self, index: int, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if index == 0:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        loss = torch.nn.functional.cross_entropy(self.model(rows), labels)
        self.scaler.scale(loss).backward()
        if index == 2:
            self.model[0].weight.grad.fill_(float("inf"))
        self.scaler.unscale_(self.optimizer)
        self.norms.append(float(torch.nn.utils.get_total_norm([one.grad for one in self.model.parameters()])))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        return loss


def test_a_step_that_a_scaler_skips_counts_into_the_next_batch_and_norms_are_unscaled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Stream(Demand({Event.BATCH_END: EventDemand(1, {"gradient_norm": 1})}))
    stream.run_name, stream.answer, stream.poll = "w", None, None  # type: ignore[attr-defined]
    monkeypatch.setattr(TrainingStream, "_start_publisher", lambda *_: stream)
    loop = ScaledLoop().watched(epochs=1)
    sent = [fields for event, _, fields in stream.sent if event is Event.BATCH_END]
    assert [one["gradient_norm"] for one in sent] == pytest.approx(loop.norms[:2] + loop.norms[3:], rel=1e-6)
    third = (loop.losses[2] + loop.losses[3]) / 2
    assert [one["loss"] for one in sent] == pytest.approx([*loop.losses[:2], third, *loop.losses[4:]], abs=1e-6)


def test_losses_of_microbatches_that_a_compiled_model_keeps_in_one_place_are_all_counted() -> None:
    loop = Loop()
    memory = torch.zeros(())
    run = offloop.watch(loop.model, loop.optimizer, run_name="w", gradient_accumulation_steps=2)
    for number, (rows, labels) in enumerate(run.batches([*loop.loader][:4])):
        torch.nn.functional.cross_entropy(loop.model(rows), labels).backward()
        run.log(loss=memory.fill_(number))
        if number % 2:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    run.close()
    ends = [one for one in snapshots_of("w") if one.event is Event.BATCH_END]
    assert [one.loss for one in ends] == [0.5, 2.5]


def test_the_gpu_is_the_one_that_the_model_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnOther(torch.Tensor):
        is_cuda = True
        device = torch.device("cuda", 1)

    found: list[torch.device] = []

    def make(device: torch.device) -> FakeGpu:
        found.append(device)
        return FakeGpu()

    monkeypatch.setattr("offloop.attached.training.GpuDevice", make)
    loop = Loop()
    loop.model.register_parameter("more", torch.nn.Parameter(torch.ones(1).as_subclass(OnOther)))
    offloop.watch(loop.model, loop.optimizer, run_name="w").close()
    assert found == [torch.device("cuda", 1)]


def test_what_needs_a_function_is_refused_without_one() -> None:
    loop = Loop()
    sender = Sender(("set", "eval", "now"), ("checkpoint",), ("stop",), run="w")
    loop.after_batch = lambda: sender.step(len(loop.losses))
    loop.watched(epochs=100_000, run_name="w")
    assert [one.error is None for one in sender.outcomes] == [False, False, True]
    assert (len(loop.losses), "stop" in (loop.run.stop_reason or "")) == (sender.outcomes[-1].batch, True)


class Unreadable:
    def __float__(self) -> float:
        raise RuntimeError("not now")


WRONG: dict[Any, Any] = {
    "vector": torch.ones(3),
    "unreadable": Unreadable(),
    "\ud800": 1.0,
}


def test_values_that_cannot_be_logged_are_left_out_named_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    plain, loop = Loop().plain(), Loop()

    def log() -> None:
        if len(loop.losses) == 1:
            with loop.run.evaluating("\ud800") as metrics:
                metrics.update(WRONG)
        loop.run.log({**WRONG, "good": 0.5})
        for value in WRONG.values():
            if not isinstance(value, float):
                loop.run.log(loss=value)
        loop.run.log(5)  # type: ignore[arg-type]

    loop.after_batch = log
    loop.watched(run_name="w")
    assert same(plain, loop)
    assert not loop.run.detached
    ends = [one for one in snapshots_of("w") if one.event is Event.BATCH_END]
    assert [one.loss for one in ends] == pytest.approx(loop.losses, abs=1e-6)
    logged = [values for one in snapshots_of("w") for _, values in one.fields.get("logged") or ()]
    assert logged == [{"good": 0.5}] * len(ends)
    assert ending("w").status == "finished"
    for name in ("vector", "\\ud800", "loss", "what log() was given"):
        assert caplog.text.count(f"run w: {name} is left out") == 1
    assert f"run w: {6 * len(ends) + 3} values were left out, among them of vector, " in caplog.text


SCRIPT = """
import sys, torch, offloop
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = offloop.watch(model, optimizer, run_name={name!r})
for epoch in run.epochs(3):
    for batch in run.batches([torch.ones(2, 4)] * 5):
        loss = model(batch).mean()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
        {there}
"""


@pytest.mark.slow
def test_a_program_that_ends_ends_its_run(tmp_path: Path) -> None:
    endings = {
        "pass": ("finished", None),
        "if epoch == 1: sys.exit(0)": ("stopped", None),
        "if epoch == 1: raise ValueError('wrong')": ("failed", "ValueError: wrong"),
    }
    programs = [Program(SCRIPT.format(name=f"w{number}", there=one)) for number, one in enumerate(endings)]
    untrained, _ = SCRIPT.format(name="untrained", there="").split("for epoch")
    run_forked("offloop.own_loop", tmp_path, [*programs, Program(f"{untrained}run.log(loss=1.0)")])
    assert "untrained" not in {run.name for run in list_runs()}
    for number, (status, error) in enumerate(endings.values()):
        end = ending(f"w{number}")
        assert (end.status, end.error) == (status, error)
        assert (events_of(f"w{number}")[-1] == "fit_end") == (status == "finished")
        # With the last one before the end, and its loss.
        losses = values_of(Event.BATCH_END, "loss", f"w{number}")
        assert len(losses) == (15 if status == "finished" else 6)
        assert None not in losses


@pytest.mark.parametrize("fetches", [True, False])
@pytest.mark.parametrize("where", ["forward", "backward", "step", "end"])
@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()])
def test_the_last_batch_before_an_error_is_published_if_the_optimizer_has_stepped(
    fetches: bool, where: str, error: BaseException
) -> None:
    loop = Loop()
    evaluated: list[int] = []
    run = offloop.watch(loop.model, loop.optimizer, run_name="w", evaluate=lambda: evaluated.append(1))

    def fail(*_: Any) -> None:
        raise error

    def train() -> None:
        for index, batch in enumerate(run.batches(loop.loader) if fetches else loop.loader):
            if index == 3:
                if where == "forward":
                    loop.model.register_forward_pre_hook(fail)
                elif where == "backward":
                    loop.model[0].weight.register_hook(fail)
                elif where == "step":
                    loop.optimizer.register_step_pre_hook(fail)
            run.log({"late": index}, loss=loop.step(index, *batch))
            if index == 3:
                run._training._control.take(Command("set", ("eval", "now")))
                fail()

    with pytest.raises(type(error)), run:
        train()
    done = 4 if where == "end" else 3
    assert values_of(Event.BATCH_END, "loss", "w") == pytest.approx(loop.losses[:done], abs=1e-6)
    assert logged_in("w")["late"] == {index: index for index in range(done)}
    assert events_of("w")[-1] == "batch_end"
    assert run.state_dict()["timestamp"][2:4] == [done, done * SIZE]
    assert ending("w").status == ("stopped" if isinstance(error, KeyboardInterrupt) else "failed")
    assert not evaluated


def test_a_batch_that_cannot_be_ended_does_not_hide_the_error_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()

    def fail() -> None:
        if len(loop.losses) == 2:
            break_down(monkeypatch, "add_loss")
            raise ZeroDivisionError("the user's")

    loop.after_batch = fail
    with pytest.raises(ZeroDivisionError) as raised:
        loop.watched(run_name="w")
    loop.run.close(raised.value)
    assert ending("w").error == "ZeroDivisionError: the user's"
    assert values_of(Event.BATCH_END, "loss", "w") == loop.losses[:1]


@pytest.mark.slow
def test_ranks_agree_on_commands_and_one_alone_stalls_nobody(tmp_path: Path) -> None:
    found, said = run_two_ranks("watched_ranks", tmp_path)
    for one in found:
        commanded = one["commanded"]
        assert (len(commanded["losses"]), commanded["lr"]) == (8, 0.2)
        assert commanded["done"] == [["heat 2", 3], ["evaluate", 3], ["checkpoint", 3]]
        for part in ("watched", "failing", "alone"):
            assert (one[part]["losses"], one[part]["weights"]) == (one["plain"]["losses"], one["plain"]["weights"])
    folder = tmp_path / "runs" / "commanded"
    profiles = [one for one in Recording(folder).read_commands() if one.command.name == "profile"]
    assert [one.error or one.done for one in profiles] == [
        "a profile is being made, until batch 5: send it later",
        str(folder / "profile-1-1-4.json.gz"),
    ]
    assert [one.name for one in folder.glob("profile*")] == ["profile-1-1-4.json.gz"]

    ends = [one for one in Recording(tmp_path / "runs" / "watched") if one.event is Event.BATCH_END]
    assert sorted((one.rank, one.timestamp.sample.value) for one in ends) == [
        (rank, 6 * batch) for rank in range(2) for batch in range(1, 13)
    ]
    assert [one.loss for one in ends if one.rank == 1] == pytest.approx(found[1]["watched"]["losses"], abs=1e-6)
    # Nobody waits for a rank that has left with an error.
    for rank in range(2):
        left = [one for one in Recording(tmp_path / "runs" / "left") if one.rank == rank]
        assert [one.timestamp.sample for one in left if one.event is Event.BATCH_END] == [6, 12, 18]
    assert [one["uneven"] for one in found] == [[3, 3], [5, 5]]
    uneven = Recording(tmp_path / "runs" / "uneven")
    assert {(one.rank, one.timestamp.batch.value) for one in uneven if one.event is Event.BATCH_END} == {
        (rank, batch) for rank in range(2) for batch in range(1, 4)
    }
    assert "1 of 2 ranks came to the end of their epoch" in str(uneven.read_endings()[-1].error)
    assert "a defect of ours" in said[1]
    assert [text.count("offloop is not attached on all 2 ranks") for text in said] == [1, 0]


def test_an_epoch_that_had_ended_when_its_state_was_saved_ends_in_the_run_that_resumes() -> None:
    marked, loop = [], Loop()
    run = offloop.watch(loop.model, loop.optimizer, run_name="w")
    for _ in run.epochs(2):
        for index, batch in enumerate(run.batches(loop.loader)):
            loop.step(index, *batch)
        run.checkpoint_saved()
        marked.append(run.state_dict())
    resumed = offloop.watch(loop.model, loop.optimizer, run_name="w")
    resumed.load_state_dict(marked[0])
    assert list(resumed.epochs(2)) == [1]
    began = next(one.timestamp for one in snapshots_of("w", 2) if one.event is Event.FIT_START)
    assert (began.batch.value, began.sample.value) == (10, 10 * SIZE)
    assert events_of("w", attempt=2)[:5] == ["init", "fit_start", "epoch_end", "epoch_checkpoint", "epoch_start"]
    saved, loaded = (Recording(find_run("w").path, attempt).read_checkpoints()[0] for attempt in (1, 2))
    assert (saved.action, loaded.action, loaded.run) == ("save", "load", "w")
    assert saved.timestamp == loaded.timestamp


@pytest.mark.parametrize(
    ("model", "autocast", "dtype", "precision"),
    [
        (torch.nn.Linear(6, 2, dtype=torch.bfloat16), None, torch.bfloat16, "bf16"),
        (torch.nn.Linear(6, 2), torch.float16, torch.float32, "amp_fp16"),
    ],
)
def test_the_precision_is_the_one_that_the_model_is_seen_to_compute_in(
    model: torch.nn.Module, autocast: torch.dtype | None, dtype: torch.dtype, precision: str | None
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offloop.watch(model, optimizer, run_name="w") as run:
        for batch in run.batches([torch.ones(4, 6, dtype=dtype)] * 2):
            with torch.no_grad():
                model(batch)
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                loss = model(batch).sum()
            loss.backward()
            optimizer.step()
    found = [one for one in snapshots_of("w") if one.event in (Event.FIT_START, Event.BATCH_END, Event.FIT_END)]
    assert [one.fields["precision"] for one in found] == [None, *[precision] * 3]
    # What is known only in the first batch is not among the hyperparameters, which are published before it.
    assert "precision" not in found[0].hyperparameters


def test_without_the_iterators_the_hooks_alone_tell_where_batches_are() -> None:
    loop = Loop(2)
    run = offloop.watch(loop.model, loop.optimizer, run_name="w", max_duration="5ba")
    for index, batch in enumerate(loop.loader):
        run.log(loss=loop.step(index, *batch))
        if run.stop_requested:
            break
    run.close()
    ends = [one for one in snapshots_of("w") if one.event is Event.BATCH_END]
    assert [one.timestamp.sample.value for one in ends] == [16, 32, 48, 64, 80]
    assert ends[0].loss == pytest.approx(sum(loop.losses[:2]) / 2, abs=1e-6)


def test_a_batch_ends_before_an_evaluation_and_counts_what_the_model_is_given_by_name() -> None:
    class Named(torch.nn.Linear):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # as Transformers call it
            return super().forward(input_ids.float())

    model = Named(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offloop.watch(model, optimizer, run_name="w") as run:
        model(input_ids=torch.ones(4, 3)).sum().backward()
        optimizer.step()
        model.eval()
        assert run._training.state.timestamp.batch == 0
        model(input_ids=torch.ones(4, 3))
        assert run.state_dict()["timestamp"][2] == 1
    (end,) = [one for one in snapshots_of("w") if one.event is Event.BATCH_END]
    assert (end.timestamp.sample.value, end.timestamp.token.value) == (4, 12)


def test_the_cell_of_a_notebook_that_is_run_again_begins_another_run() -> None:
    for name in ("w", "w-2"):
        loop = Loop()
        run = offloop.watch(loop.model, loop.optimizer, run_name="w")
        next(run.epochs(2))
        for index, batch in zip(range(3), run.batches(loop.loader), strict=False):
            loop.step(index, *batch)
        assert not run.detached
        assert run.run_name == name
    run.close()
    found = [find_run(name) for name in ("w", "w-2")]
    assert [(len(one.attempts), one.status) for one in found] == [(1, "stopped"), (1, "finished")]


def test_a_compiled_model_is_compiled_as_without_a_run() -> None:
    loop = Loop()
    loop.model = torch.compile(loop.model, backend="eager")  # type: ignore[assignment]
    counters.clear()
    loop.watched(epochs=1, run_name="w", record="all")
    # torch compiles the functions of hooks, too, that it comes upon; and warns, which fails a test.
    assert counters["frames"]["total"] == 1
    assert not counters["graph_break"]
    assert events_of("w").count("after_forward") == 10


def test_a_model_has_hooks_while_a_consumer_requests_what_they_give() -> None:
    loop, followers = Loop(), list[Subscriber]()
    has_hooks: list[bool] = []

    def attach_and_leave() -> None:
        has_hooks.append(bool(loop.model._forward_hooks))
        seen = [kind for kind, _ in groupby(has_hooks)]
        if len(has_hooks) == 5:
            followers.append(Subscriber("w", events=[Event.AFTER_FORWARD]))
        elif len(seen) == 3 and has_recorded(Event.AFTER_FORWARD, "w"):
            followers[0].close()
        elif len(seen) == 4:
            loop.run._training.state.stop_training()

    loop.after_batch = attach_and_leave
    loop.watched(epochs=100_000, run_name="w")
    assert [kind for kind, _ in groupby(has_hooks)] == [True, False, True, False]
    assert "after_forward" in events_of("w")


def stop_once_some_were_kept(loop: Loop, kept: list[int]) -> None:
    """Train on until batches were published together, however busy the machine is."""
    kept.append(len(loop.run._training.kept))
    if len(kept) >= 30 and max(kept) > 1:
        loop.run._training.state.stop_training()


def test_batches_that_are_published_together_have_their_own_times_losses_and_rates() -> None:
    loop, times = Loop(), [time.time_ns()]
    kept: list[int] = []

    def note() -> None:
        times.append(time.time_ns())
        time.sleep(0.002)
        stop_once_some_were_kept(loop, kept)

    loop.after_batch = note
    loop.watched(epochs=1000, run_name="w")
    ends = [one for one in snapshots_of("w") if one.event is Event.BATCH_END]
    assert [one.loss for one in ends] == loop.losses
    assert [one.lr for one in ends] == [{"AdamW": [rate]} for rate in loop.rates]
    assert [one.timestamp.batch.value for one in ends] == list(range(1, len(loop.losses) + 1))
    # A batch ends when the next one is fetched. Between two readings of clocks a busy machine may do something else:
    # then the run's is slow by that, never fast.
    slow, fast = 10**10, 10**6
    for index, end in enumerate(ends[:-1]):
        assert times[index + 1] - slow < end.time_ns < times[index + 2] + fast
    assert len({end.time_ns for end in ends}) == len(ends)


def test_losses_of_batches_that_are_published_together_are_copied_from_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr("offloop.attached.training.get_device", lambda name: gpu)
    loop = Loop()
    kept: list[int] = []

    def note() -> None:
        gpu.run()
        stop_once_some_were_kept(loop, kept)

    loop.after_batch = note
    loop.watched(epochs=1000, run_name="w")
    assert [one.loss for one in snapshots_of("w") if one.event is Event.BATCH_END] == pytest.approx(loop.losses)
    assert gpu.waits == 1  # for the last loss, at the end


def test_a_loss_is_not_kept_without_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOOP_DISABLED", "1")
    loop = Loop()
    run = offloop.watch(loop.model, loop.optimizer)
    loss = loop.step(0, *next(iter(loop.loader)))
    kept = weakref.ref(loss)
    run.log(loss=loss)
    del loss
    assert kept() is None


@pytest.mark.parametrize("method", ["batch_end", "publish_kept"])
def test_an_error_of_ours_while_batches_are_held_loses_no_count_and_leaves_no_hooks(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    break_down(monkeypatch, method)
    loop = Loop().watched(epochs=3, run_name="w")
    assert loop.run.detached
    assert loop.run.state_dict()["timestamp"][:4] == [0, 3, len(loop.losses), 3 * ROWS]
    assert not loop.model._forward_hooks
    assert not loop.model._forward_pre_hooks


def test_batches_before_an_error_of_ours_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    break_down(monkeypatch, "eval_start")
    loop = Loop()
    with offloop.watch(loop.model, loop.optimizer, run_name="w") as run:
        for _ in run.epochs(1):
            for index, batch in enumerate(run.batches(loop.loader)):
                run.log(loss=loop.step(index, *batch))
            with run.evaluating():
                assert run.detached
    assert events_of("w").count("batch_end") == len(loop.loader)


def test_a_watched_model_can_be_copied_and_pickled() -> None:
    loop = Loop()
    run = offloop.watch(loop.model, loop.optimizer, run_name="w")
    copies = [copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))]
    for one in copies:
        one.train()
        one(torch.ones(2, 6)).sum().backward()
    run.close()
    assert not list_runs()


def test_a_model_and_an_optimizer_in_the_wrong_order_are_refused() -> None:
    loop = Loop()
    swapped: Any = (loop.optimizer, loop.model)
    with pytest.raises(ConfigurationError, match="model is an AdamW: give a torch"):
        offloop.watch(*swapped)


@pytest.mark.parametrize("enabled", [True, False])
def test_epochs_and_batches_have_lengths_of_what_is_left_for_progress_bars(enabled: bool) -> None:
    loop = Loop()
    run = offloop.watch(loop.model, loop.optimizer, run_name="w", enabled=enabled)
    epochs = run.epochs(3)
    assert len(epochs) == 3
    for _ in epochs:
        batches = run.batches(loop.loader)
        assert len(batches) == len(loop.loader)
        for index, batch in enumerate(batches):
            loop.step(index, *batch)
            within = run.state_dict()
        with pytest.raises(TypeError, match="has no len"):
            len(run.batches(iter([])))
        saved = run.state_dict()
        run.close()
        break
    assert len(epochs) == 3
    resumed = offloop.watch(loop.model, loop.optimizer, run_name="w", enabled=enabled)
    resumed.load_state_dict(saved)
    assert len(resumed.epochs(3)) == len(list(resumed.epochs(3))) == 2
    resumed.close()
    if enabled:
        # Its epoch had not ended, and has no batches left.
        resumed = offloop.watch(loop.model, loop.optimizer, run_name="w")
        resumed.load_state_dict(within)
        lengths = [(len(batches := resumed.batches(loop.loader)), len([*batches])) for _ in resumed.epochs(2)]
        assert lengths == [(0, 0), (10, 10)]


def test_values_are_logged_for_the_batch_at_work_or_the_step_that_is_given(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    with offloop.watch(loop.model, loop.optimizer, run_name="w") as run:
        for epoch in run.epochs(2):
            for index, batch in enumerate(run.batches(loop.loader)):
                loss = loop.step(index, *batch)
                at = 10 * epoch + index
                run.log({"loss": loss.detach()[None].to_sparse(), "seen": index}, step=10 * at)
                run.log({"share": torch.tensor(index / 10)}, **({"loss": loss * float("nan")} if at == 3 else {}))
            run.log({"accuracy": 0.5 + epoch}, step=epoch)
            run.log({"late": 1}, step="last")  # type: ignore[arg-type]
    logged = logged_in("w")
    assert logged.keys() == {"seen", "share", "accuracy", "late"}
    assert logged["seen"] == {10 * at: at % 10 for at in range(20)}
    assert logged["share"] == pytest.approx({at: at % 10 / 10 for at in range(20)}, abs=1e-6)
    assert logged["accuracy"] == {0: 0.5, 1: 1.5}
    assert logged["late"] == {9: 1, 19: 1}
    losses = [one.loss for one in snapshots_of("w") if one.event is Event.BATCH_END]
    assert [loss != loss for loss in losses] == [at == 3 for at in range(20)]
    assert losses[4:] == pytest.approx(loop.losses[4:], abs=1e-6)
    assert "step is 'last'" in caplog.text


def test_a_loop_that_a_function_leaves_loses_no_batch() -> None:
    def train() -> None:
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = offloop.watch(model, optimizer, run_name="w")
        for _ in run.epochs(2):
            for batch in run.batches(range(300)):
                loss = model(torch.ones(3, 4)).sum()
                loss.backward()
                optimizer.step()
                run.log(loss=loss)
                if batch == 249:
                    return

    train()
    gc.collect()
    assert events_of("w").count("batch_end") == 250
    assert ending("w").status == "stopped"


def test_trainings_of_one_name_in_several_threads_are_runs_of_their_own() -> None:
    all_begun = threading.Barrier(2)

    def train() -> None:
        loop = Loop()
        loop.after_batch = lambda: all_begun.wait(60) if len(loop.losses) == 1 else None
        loop.watched(epochs=1, run_name="w")

    threads = [threading.Thread(target=train) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(100)
    assert sorted((run.name, run.status) for run in list_runs()) == [("w", "finished"), ("w-2", "finished")]
    assert [events_of(name).count("batch_end") for name in ("w", "w-2")] == [10, 10]
