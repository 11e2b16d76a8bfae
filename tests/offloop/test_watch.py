"""A loop of one's own, watched: what is published of it, what can be done to it, and that it is not changed by that."""

import copy
import pickle
import re
import threading
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from attached_runs import ending, events_of, logged_in, run_two_ranks, snapshots_of
from fake_gpu import FakeGpu, reads
from field_stream import Stream
from forked import Program, run_forked
from torch._dynamo.utils import counters

import offloop
from offloop.attached.training import ALWAYS
from offloop.bus import Event, Recording, Subscriber
from offloop.bus.errors import ConfigurationError
from offloop.bus.runs.directory import find_run, list_runs
from offloop.bus.types.commands import Command
from offloop.bus.types.demand import Demand, EventDemand
from offloop.trainer.stream.run_stream import TrainingStream

ROWS, SIZE = 80, 8


class Loop:
    """A training as people write it, with or without being watched."""

    def __init__(self, accumulate: int = 1, rows: int = ROWS, optimizer: Any = torch.optim.AdamW) -> None:
        torch.manual_seed(1)
        inputs = torch.randn(rows, 6)
        data = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
        self.loader = torch.utils.data.DataLoader(data, batch_size=SIZE, shuffle=True)
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))
        self.optimizer = optimizer(self.model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.accumulate = accumulate
        self.losses: list[float] = []
        self.rates: list[float] = []
        self.norms: list[float] = []
        self.after_batch: Any = lambda: None

    def step(self, index: int, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.model(rows), labels)
        (loss / self.accumulate).backward()
        if (index + 1) % self.accumulate == 0 or index + 1 == len(self.loader):
            self.norms.append(float(torch.nn.utils.get_total_norm([one.grad for one in self.model.parameters()])))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.losses.append(loss.item())
        return loss

    def plain(self, epochs: int = 2) -> "Loop":
        for _ in range(epochs):
            for index, batch in enumerate(self.loader):
                self.step(index, *batch)
        return self

    def watched(self, epochs: int = 2, **options: Any) -> "Loop":
        options.setdefault("gradient_accumulation_steps", self.accumulate)
        self.run = offloop.watch(self.model, self.optimizer, self.scheduler, **options)
        for _ in self.run.epochs(epochs):
            for index, batch in enumerate(self.run.batches(self.loader)):
                self.run.log(loss=self.step(index, *batch))
                self.after_batch()
        return self

    @property
    def weights(self) -> list[torch.Tensor]:
        return [one.detach().clone() for one in self.model.parameters()]


def same(one: Loop, other: Loop) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one.weights, other.weights, strict=True))


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOOP_RUNS_DIR", str(tmp_path / "runs"))


BATCH = ["before_dataloader", "after_dataloader", "batch_start", "before_forward", "after_forward", "before_backward"]
STEP = ["after_backward", "after_train_batch", "batch_end", "batch_checkpoint"]
MICROBATCH = [*BATCH[:2], *BATCH[3:], STEP[0]]


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_every_event_comes_at_its_place(accumulate: int) -> None:
    loop = Loop(accumulate).watched(epochs=1, run_name="w", record="all")
    batches: list[str] = []
    for count in [accumulate] * (10 // accumulate) + [10 % accumulate] * bool(10 % accumulate):
        batches += [*BATCH, STEP[0], *MICROBATCH * (count - 1), *STEP[1:]]
    end = ["before_dataloader", "epoch_end", "epoch_checkpoint", "fit_end"]
    seen = [one.event.value for one in snapshots_of("w")]
    assert seen == ["init", "fit_start", "epoch_start", *batches, *end]
    told = set(snapshots_of("w")[0].unavailable["events"])
    assert told == {event.value for event in Event} - set(seen) - {event.value for event in ALWAYS}
    assert loop.run.stop_requested is False


@pytest.mark.parametrize(("accumulate", "rows"), [(1, 80), (2, 80), (4, 77)])
def test_loss_rates_and_training_time_are_those_of_the_loop(accumulate: int, rows: int) -> None:
    loop = Loop(accumulate, rows).watched(run_name="w")
    ends = [one for one in snapshots_of("w") if one.event is Event.BATCH_END]
    per_epoch = -(-10 // accumulate)
    assert [one.timestamp.batch.value for one in ends] == list(range(1, 2 * per_epoch + 1))
    groups = [list(part) for _, part in groupby(range(20), lambda index: (index // 10, index % 10 // accumulate))]
    means = [sum(loop.losses[index] for index in group) / len(group) for group in groups]
    assert [one.loss for one in ends] == pytest.approx(means, abs=1e-6)
    assert [one.lr["AdamW"][0] for one in ends] == pytest.approx(loop.rates, abs=1e-12)
    assert ends[-1].timestamp.sample.value == 2 * rows
    assert ends[-1].timestamp.epoch.value == 1
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


def test_the_gradients_of_the_step_are_had_although_the_loop_forgets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("gradient_norm", "gradient_norms", "parameter_norm", "moment_norms", "update_norms", "phases")
    stream = Stream(Demand({Event.BATCH_END: EventDemand(1, dict.fromkeys(names, 1))}))
    stream.run_name, stream.answer, stream.poll = "w", None, None  # type: ignore[attr-defined]
    monkeypatch.setattr(TrainingStream, "_start_publisher", lambda *_: stream)
    loop = Loop(2).watched()
    sent = [fields for event, _, fields in stream.sent if event is Event.BATCH_END]
    assert [one["gradient_norm"] for one in sent] == pytest.approx(loop.norms, rel=1e-6)
    assert set(sent[1]["gradient_norms"]) == set(sent[1]["moment_norms"]) == set(sent[1]["update_norms"])
    assert min(sent[1]["update_norms"].values()) > 0
    phases = [name for name, _, _ in sent[2]["phases"]["spans"]]
    assert phases[:6] == ["data", "forward", "backward", "data", "forward", "backward"]
    assert {"optimizer", "publishing"} <= set(phases)


def test_a_watched_loop_never_waits_for_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr("offloop.attached.training.get_device", lambda _: gpu)
    loop = Loop()
    losses = []
    # AdamW on the host would read the number of its steps, which is a tensor.
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    run = offloop.watch(loop.model, optimizer, run_name="w", record="all")
    data = list(loop.loader)
    with reads() as found:
        for rows, labels in run.batches(data):
            loss = torch.nn.functional.cross_entropy(loop.model(rows), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss, half=loss.detach() / 2)
            losses.append(loss.detach())
    assert (found, gpu.waits) == ([], 0)
    gpu.run()
    run.close()
    assert gpu.waits == 0
    ends = [one for one in snapshots_of("w") if one.event is Event.BATCH_END]
    assert [one.loss for one in ends] == pytest.approx([float(one) for one in losses], abs=1e-6)
    assert [values["half"] for one in ends for _, values in one.logged] == pytest.approx(
        [float(one) / 2 for one in losses], abs=1e-6
    )


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


def test_the_losses_that_an_adapter_adds_up_may_lie_in_one_place() -> None:
    loop = Loop()
    run = offloop.watch(loop.model, loop.optimizer, run_name="w")
    training, memory = run._training, torch.zeros(())
    training.fit_start(microbatches=2)
    for number in (1.0, 2.0):
        training.batch_start()
        training.add_loss(memory.fill_(number))
    training.batch_end()
    run.close()
    [end] = [one for one in snapshots_of("w") if one.event is Event.BATCH_END]
    assert end.loss == 3.0


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


def commanding(loop: Loop, at: int, *commands: tuple[Any, ...]) -> list[str | None]:
    """Has commands come in a batch; what their senders hear is appended to the list."""
    answers: list[str | None] = []

    def send() -> None:
        if len(loop.losses) != at:
            return
        training = loop.run._training
        answer = training.publisher.answer

        def note(command: Command, event: Any, reached: Any, error: str | None, done: str | None) -> None:
            answers.append(error)
            answer(command, event, reached, error, done)

        training.publisher.answer = note  # type: ignore[method-assign]
        for name, *arguments in commands:
            training._control.take(Command(name, tuple(arguments), id=f"{name}{arguments}"))

    loop.after_batch = send
    return answers


def test_stop_ends_the_loop_after_the_batch() -> None:
    loop = Loop()
    answers = commanding(loop, 5, ("stop",))
    loop.watched(run_name="w")
    assert (len(loop.losses), answers) == (5, [None])
    assert "stop" in (loop.run.stop_reason or "")
    assert [one.event.value for one in snapshots_of("w")][-1] == "fit_end"
    assert ending("w").status == "stopped"


def test_what_can_be_set_is_set_and_what_cannot_be_done_is_refused_with_the_reason() -> None:
    loop, heat = Loop(), []
    answers = commanding(
        loop,
        5,
        *(("set", "lr", 0.5), ("set", "heat", 3), ("set", "heat", "hot"), ("set", "eval", "now"), ("checkpoint",)),
        ("set", "cold", 1),
    )

    def set_heat(value: Any) -> None:
        heat.append(float(value))

    loop.watched(run_name="w", on_set={"heat": set_heat})
    assert heat == [3.0]
    assert answers[:2] == [None, None]
    assert "could not convert" in str(answers[2])
    assert answers[3:5] == [
        "cannot evaluate on command: give watch() a function evaluate=",
        "cannot save a checkpoint on command: give watch() a function checkpoint=",
    ]
    assert "there is no setting 'cold'" in str(answers[5])
    assert loop.rates[5] == pytest.approx(0.5 * 0.9)


def test_evaluations_and_checkpoints_are_done_on_command_with_functions_for_them() -> None:
    loop, saved = Loop(), []
    answers = commanding(loop, 5, ("set", "eval", "now"), ("checkpoint",))

    def evaluate() -> None:
        with loop.run.evaluating("val") as metrics:
            metrics["accuracy"] = torch.tensor(0.75)

    def checkpoint() -> None:
        loop.run.checkpoint_saved()
        saved.append(loop.run.state_dict())

    loop.watched(run_name="w", evaluate=evaluate, checkpoint=checkpoint)
    assert answers == [None, None]
    (end,) = [one for one in snapshots_of("w") if one.event is Event.EVAL_END]
    assert (end.timestamp.batch.value, end.dataloader_label) == (5, "val")
    assert end.eval_metrics == {"val": {"accuracy": 0.75}}
    assert saved[0]["timestamp"][2] == 5


@pytest.mark.slow
def test_a_paused_loop_stands_still_until_somebody_resumes_it() -> None:
    loop = Loop()
    seen: list[Any] = []

    def command_from_outside() -> None:
        with Subscriber("w", events=[Event.BATCH_END]) as stream:
            seen.append(stream.command("pause").error)
            seen.append(len(loop.losses))
            stream.command("set", "lr", 0.01)
            seen.append(len(loop.losses))
            seen.append(stream.command("resume").error)
            seen.append(stream.command("stop").error)

    other = threading.Thread(target=command_from_outside)

    def begin() -> None:
        if len(loop.losses) == 1:
            other.start()

    loop.after_batch = begin
    loop.watched(epochs=10_000, run_name="w")
    other.join()
    assert seen[0] is None
    assert seen[1] == seen[2]
    assert seen[3:] == [None, None]


class Unreadable:
    def __float__(self) -> float:
        raise RuntimeError("not now")


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("not now")


WRONG: dict[Any, Any] = {
    "none": None,
    "text": "text",
    "vector": torch.ones(3),
    "complex": torch.tensor(1j),
    "huge": 10**400,
    "unreadable": Unreadable(),
    "nowhere": torch.ones((), device="meta"),
    "\ud800": 1.0,
    Unshowable(): 1.0,
    5: 1.0,
    "x" * 1001: 1.0,
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
        for nothing in (5, "text", [1]):
            loop.run.log(nothing)  # type: ignore[arg-type]

    loop.after_batch = log
    loop.watched(run_name="w")
    assert same(plain, loop)
    assert not loop.run.detached
    ends = [one for one in snapshots_of("w") if one.event is Event.BATCH_END]
    assert [one.loss for one in ends] == pytest.approx(loop.losses, abs=1e-6)
    logged = [values for one in snapshots_of("w") for _, values in one.fields.get("logged") or ()]
    assert logged == [{"good": 0.5}] * len(ends)
    assert ending("w").status == "finished"
    for name in ("none", "\\ud800", "x" * 100, "loss", "what log() was given"):
        assert caplog.text.count(f"run w: {name} is left out") == 1
    assert re.search(
        rf"run w: {len(ends) * (len(WRONG) + 7 + 3) + len(WRONG)} values were left out, among them of none, ",
        caplog.text,
    )


def test_a_loss_may_be_a_sparse_tensor() -> None:
    loop = Loop()
    loop.after_batch = lambda: loop.run.log(loss=torch.tensor([loop.losses[-1]]).to_sparse())
    loop.watched(run_name="w")
    assert not loop.run.detached
    ends = [one for one in snapshots_of("w") if one.event is Event.BATCH_END]
    assert [one.loss for one in ends] == pytest.approx(loop.losses, abs=1e-6)


def test_errors_of_the_loop_are_the_loops_own() -> None:
    loop = Loop()

    def fail() -> None:
        if len(loop.losses) == 3:
            raise ZeroDivisionError("the user's")

    loop.after_batch = fail
    with pytest.raises(ZeroDivisionError):
        loop.watched(run_name="w")
    loop.run.close(ZeroDivisionError("the user's"))
    end = ending("w")
    assert (end.status, end.error) == ("failed", "ZeroDivisionError: the user's")


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
        "if epoch == 1: raise KeyboardInterrupt": ("stopped", None),
    }
    run_forked("torch", tmp_path, [Program(SCRIPT.format(name=f"w{n}", there=one)) for n, one in enumerate(endings)])
    for number, (status, error) in enumerate(endings.values()):
        end = ending(f"w{number}")
        assert (end.status, end.error) == (status, error)
        assert (events_of(f"w{number}")[-1] == "fit_end") == (status == "finished")


@pytest.mark.slow
def test_a_program_that_ends_before_it_trains_has_no_run(runs_dir: Path, tmp_path: Path) -> None:
    beginning, _ = SCRIPT.format(name="w", there="").split("for epoch")
    run_forked("torch", tmp_path, [Program(f"{beginning}run.log(loss=1.0)")])
    assert not (runs_dir / "w").exists()


def test_a_run_that_cannot_be_started_is_shown_and_the_loop_goes_on(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    plain = Loop().plain()
    (file := tmp_path / "file").touch()
    loop = Loop().watched(run_name="w", runs_dir=file)
    assert same(plain, loop)
    assert loop.run.detached
    assert f"the training continues without it: the run directory {file}/w cannot be written" in caplog.text
    assert loop.run.stop_requested is False


@pytest.mark.slow
def test_ranks_agree_on_commands_and_one_alone_stalls_nobody(tmp_path: Path) -> None:
    found, said = run_two_ranks("watched_ranks", tmp_path)
    for one in found:
        commanded = one["commanded"]
        assert (len(commanded["losses"]), commanded["lr"]) == (8, 0.2)
        assert commanded["done"] == [["heat 2", 3], ["evaluate", 3], ["checkpoint", 3]]
        for part in ("watched", "failing", "alone"):
            assert (one[part]["losses"], one[part]["weights"]) == (one["plain"]["losses"], one["plain"]["weights"])

    ends = [one for one in Recording(tmp_path / "runs" / "watched") if one.event is Event.BATCH_END]
    assert sorted((one.rank, one.timestamp.sample.value) for one in ends) == [
        (rank, 6 * batch) for rank in range(2) for batch in range(1, 13)
    ]
    assert [one.loss for one in ends if one.rank == 1] == pytest.approx(found[1]["watched"]["losses"], abs=1e-6)
    assert "a defect of ours" in said[1]
    assert [text.count("offloop is not attached on every one of 2 ranks") for text in said] == [1, 0]


def test_a_loop_that_resumes_counts_on(capfd: pytest.CaptureFixture[str]) -> None:
    loop, kept = Loop(), {}

    def keep() -> None:
        if len(loop.losses) == 15:
            kept.update(loop.run.state_dict())

    loop.after_batch = keep
    loop.watched(run_name="w")
    second = Loop()
    run = offloop.watch(second.model, second.optimizer, run_name="w2")
    run.load_state_dict(kept)
    assert run.state_dict() == kept | {"run_name": "w2"}
    assert list(run.epochs(3)) == [1, 2]
    assert "run w2, attempt 1, resuming from batch 15: recording to" in capfd.readouterr().err
    first = next(one for one in snapshots_of("w2") if one.event is Event.FIT_START)
    assert (first.timestamp.batch.value, first.timestamp.sample.value) == (15, 15 * SIZE)


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
    assert events_of("w", attempt=2)[:5] == ["init", "fit_start", "epoch_end", "epoch_checkpoint", "epoch_start"]
    saved, loaded = (Recording(find_run("w").path, attempt).read_checkpoints()[0] for attempt in (1, 2))
    assert (saved.action, loaded.action, loaded.run) == ("save", "load", "w")
    assert saved.timestamp == loaded.timestamp


@pytest.mark.parametrize(
    ("autocast", "dtype", "precision"),
    [
        (None, torch.float32, "fp32"),
        (None, torch.bfloat16, "bf16"),
        (torch.bfloat16, torch.float32, "amp_bf16"),
        (torch.float16, torch.float32, "amp_fp16"),
    ],
)
def test_the_precision_is_the_one_that_the_model_computes_in(
    autocast: torch.dtype | None, dtype: torch.dtype, precision: str
) -> None:
    model = torch.nn.Linear(6, 2, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offloop.watch(model, optimizer, run_name="w") as run:
        for batch in run.batches([torch.ones(4, 6, dtype=dtype)] * 2):
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                loss = model(batch).sum()
            loss.backward()
            optimizer.step()
    found = [one for one in snapshots_of("w") if one.event in (Event.FIT_START, Event.BATCH_END, Event.FIT_END)]
    assert [one.fields["precision"] for one in found] == [None, *[precision] * 3]
    # What is known only in the first batch is not among the hyperparameters, which are published before it.
    assert "precision" not in found[0].hyperparameters


class CastsWithin(torch.nn.Module):
    """Computes in another precision than its weights and its output have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 2)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(batch).float()


@pytest.mark.parametrize(("casts_within", "precision"), [(True, None), (False, "amp_bf16")])
def test_a_precision_that_is_not_seen_is_left_out(casts_within: bool, precision: str | None) -> None:
    model = CastsWithin() if casts_within else torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offloop.watch(model, optimizer, run_name="w") as run:
        for batch in run.batches([torch.ones(4, 6)] * 2):
            with torch.no_grad():
                model(batch)
            with torch.autocast("cpu", torch.bfloat16, enabled=not casts_within):
                loss = model(batch).sum()
            loss.backward()
            optimizer.step()
    found = [one for one in snapshots_of("w") if one.event in (Event.BATCH_END, Event.FIT_END)]
    assert [one.fields["precision"] for one in found] == [precision] * 3


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
        assert run._training.state.timestamp.batch == 1
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


def test_a_watched_model_can_be_copied_and_pickled() -> None:
    loop = Loop()
    run = offloop.watch(loop.model, loop.optimizer, run_name="w")
    copies = [copy.deepcopy(loop.model), pickle.loads(pickle.dumps(loop.model))]
    for one in copies:
        one.train()
        one(torch.ones(2, 6)).sum().backward()
    run.close()
    assert not list_runs()


def test_values_and_nan_are_logged_for_the_batch_at_work() -> None:
    loop = Loop()
    run = offloop.watch(loop.model, loop.optimizer, run_name="w")
    for _ in run.epochs(1):
        for index, batch in enumerate(run.batches(loop.loader)):
            loss = loop.step(index, *batch)
            run.log({"share": torch.tensor(index / 10)}, loss=loss * float("nan") if index == 3 else loss)
    ends = [one for one in snapshots_of("w") if one.event is Event.BATCH_END]
    logged = [pair for one in ends for pair in one.logged]
    assert [step for step, _ in logged] == list(range(10))
    assert [values["share"] for _, values in logged] == pytest.approx([index / 10 for index in range(10)], abs=1e-6)
    assert [one.loss != one.loss for one in ends] == [index == 3 for index in range(10)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run_nam": "w"}, "there is no option 'run_nam': did you mean run_name"),
        ({"run_name": "a b/c"}, "a b/c"),
        ({"on_set": {"heat": 3}}, "on_set"),
        ({"callbacks": [object()]}, "offloop.consumers.Callback"),
    ],
)
def test_wrong_options_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    loop = Loop()
    with pytest.raises((ConfigurationError, ValueError), match=message):
        offloop.watch(loop.model, loop.optimizer, **options)


@pytest.mark.parametrize("enabled", [True, False])
def test_epochs_and_batches_have_lengths_for_progress_bars(enabled: bool) -> None:
    loop = Loop()
    run = offloop.watch(loop.model, loop.optimizer, run_name="w", enabled=enabled)
    epochs = run.epochs(3)
    assert len(epochs) == 3
    for _ in epochs:
        batches = run.batches(loop.loader)
        assert len(batches) == len(loop.loader)
        for index, batch in enumerate(batches):
            loop.step(index, *batch)
        with pytest.raises(TypeError, match="has no len"):
            len(run.batches(iter([])))
        saved = run.state_dict()
        run.close()
        break
    assert len(epochs) == 3
    resumed = offloop.watch(loop.model, loop.optimizer, run_name="w", enabled=enabled)
    resumed.load_state_dict(saved)
    assert len(resumed.epochs(3)) == len(list(resumed.epochs(3))) == 2


def test_nothing_is_left_of_an_epoch_whose_last_batch_was_trained() -> None:
    loop = Loop()
    run = offloop.watch(loop.model, loop.optimizer, run_name="w")
    for _ in run.epochs(2):
        for index, batch in enumerate(run.batches(loop.loader)):
            loop.step(index, *batch)
            saved = run.state_dict()
        break
    run.close()
    resumed = offloop.watch(loop.model, loop.optimizer, run_name="w")
    resumed.load_state_dict(saved)
    lengths = [(len(batches := resumed.batches(loop.loader)), len([*batches])) for _ in resumed.epochs(2)]
    assert lengths == [(0, 0), (10, 10)]


def test_values_are_logged_for_the_step_that_is_given(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop()
    with offloop.watch(loop.model, loop.optimizer, run_name="w") as run:
        for epoch in run.epochs(2):
            for index, batch in enumerate(run.batches(loop.loader)):
                run.log({"loss": loop.step(index, *batch), "seen": index}, step=10 * index)
            run.log({"accuracy": 0.5 + epoch}, step=epoch)
            run.log({"late": 1}, step="last")  # type: ignore[arg-type]
    logged = logged_in("w")
    assert logged.keys() == {"seen", "accuracy", "late"}
    assert logged["seen"] == {10 * index: index for index in range(10)}
    assert logged["accuracy"] == {0: 0.5, 1: 1.5}
    assert logged["late"] == {9: 1, 19: 1}
    ends = [one.loss for one in snapshots_of("w") if one.event is Event.BATCH_END]
    assert ends == pytest.approx(loop.losses, abs=1e-6)
    assert "step is 'last': use a whole number from 0 on" in caplog.text
