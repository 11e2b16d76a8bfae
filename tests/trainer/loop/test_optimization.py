"""How the weights are found: optimizers, schedulers, precision, microbatches that fit, compiling."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gold import GoldMLP, gold_data
from helpers import REFERENCE
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import Act, gold_trainer

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer import Classifier, State, Trainer
from offloop.trainer.schedulers import (
    LinearScheduler,
)

OPTIMIZED = json.loads((REFERENCE / "cb_optimizer_monitor.json").read_text())["runs"]

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD(lr=0.1)": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "SGD(lr=0.1), microbatch 4": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "Adam(lr=0.01)": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "SGD(lr=0.1), net.0.bias frozen": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    # Its weight decay is not multiplied by the rate, which torch's is.
    "DecoupledAdamW(lr=0.01)": lambda model: torch.optim.AdamW(
        model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=1e-5 / 0.01
    ),
    "SGD(lr=0.1), default batch_log_interval=10, 24ba": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZED)
def test_losses_and_weights_are_those_of_the_reference(name: str) -> None:
    expected, model, losses = OPTIMIZED[name], GoldMLP(), []
    model.net[0].bias.requires_grad_("frozen" not in name)

    def note(event: Event, state: State, logger: object) -> None:
        assert state.total_loss is not None
        losses.append([int(state.timestamp.batch) - 1, state.total_loss.item()])

    trainer = gold_trainer(
        model=model,
        max_duration="24ba" if "24ba" in name else "2ep",
        optimizers=OPTIMIZERS[name],
        device_train_microbatch_size=4 if "microbatch" in name else None,
        algorithms=Act(note, Event.BATCH_END),
    )
    with trainer:
        trainer.fit()
    assert losses == [[batch, pytest.approx(loss, abs=1e-6)] for batch, loss in expected["loss_per_batch"]]
    for parameter, values in expected["final_weights"].items():
        assert torch.allclose(model.state_dict()[parameter], torch.tensor(values), atol=1e-6, rtol=0)


def rates_of(**arguments: Any) -> tuple[list[list[float]], list[list[float]]]:
    """Return the rates of all parameter groups when each batch is trained on, and when it ends."""
    used: list[list[float]] = []
    shown: list[list[float]] = []

    def note(event: Event, state: State, logger: object) -> None:
        rates = [group["lr"] for one in state.optimizers for group in one.param_groups]
        (used if event is Event.BEFORE_TRAIN_BATCH else shown).append(rates)

    with gold_trainer(algorithms=Act(note, Event.BEFORE_TRAIN_BATCH, Event.BATCH_END), **arguments) as trainer:
        trainer.fit()
    return used, shown


def test_a_function_is_a_scheduler_and_works_on_every_optimizer() -> None:
    def halved(state: State, ssr: float) -> float:
        return float(0.5 ** int(state.timestamp.batch))

    def optimizers(model: GoldMLP) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model.net[0].parameters(), lr=0.4), torch.optim.Adam(model.net[2].parameters(), lr=0.2)]

    used, _ = rates_of(optimizers=optimizers, schedulers=halved, max_duration="4ba")
    assert used == [[0.4, 0.2], [0.4, 0.2], [0.2, 0.1], [0.1, 0.05]]


def test_scale_schedule_ratio_stretches_the_training_and_its_schedule() -> None:
    used, _ = rates_of(schedulers=LinearScheduler(), max_duration="4ba", scale_schedule_ratio=2.0)
    assert [rates[0] for rates in used] == pytest.approx([0.1] + [0.1 * (1 - batch / 8) for batch in range(7)])


def test_optimizers_are_made_after_the_model_was_changed() -> None:
    def widen(event: Event, state: State, logger: object) -> None:
        assert state.optimizers == []
        state.model.net[2] = nn.Linear(16, 4, bias=False)

    made_from: list[int] = []

    def optimizers(model: GoldMLP) -> torch.optim.Optimizer:
        made_from.append(len(list(model.parameters())))
        return torch.optim.SGD(model.parameters(), lr=0.1)

    with gold_trainer(optimizers=optimizers, algorithms=Act(widen, Event.INIT)) as trainer:
        before = trainer.state.model.net[2].weight.clone()
        trainer.fit()
    assert made_from == [3]
    assert not torch.equal(trainer.state.model.net[2].weight, before)


@pytest.mark.parametrize(("precision", "kind"), [("amp_bf16", torch.bfloat16), ("amp_fp16", torch.float16)])
def test_with_mixed_precision_layers_compute_in_16_bits_and_weights_stay_in_32(
    precision: str, kind: torch.dtype
) -> None:
    kinds: set[torch.dtype] = set()
    gradients: list[float] = []

    def note(event: Event, state: State, logger: object) -> None:
        if event is Event.AFTER_TRAIN_BATCH:
            # Unscaled already, whatever the loss was multiplied by.
            gradients.append(max(float(one.grad.abs().max()) for one in state.model.parameters()))
        else:
            kinds.add(state.outputs.dtype)

    act = Act(note, Event.AFTER_FORWARD, Event.EVAL_AFTER_FORWARD, Event.AFTER_TRAIN_BATCH)
    model = GoldMLP()
    data = [gold_data("eval_a", 5)]
    with gold_trainer(model=model, precision=precision, algorithms=act, eval_dataloader=data) as trainer:
        trainer.fit()
        (outputs,) = trainer.predict(data)
    assert kinds == {kind}
    assert outputs.dtype is kind
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert max(gradients) < 10
    expected = OPTIMIZED["SGD(lr=0.1)"]["final_weights"]
    for name, values in expected.items():
        assert torch.allclose(model.state_dict()[name], torch.tensor(values), atol=0.02)


class Greedy(GoldMLP):
    """Runs out of memory with more than so many rows."""

    def __init__(self, rows: int, where: str = "forward") -> None:
        super().__init__()
        self.rows = rows
        self.where = where
        self.sizes: list[int] = []

    def forward(self, batch: Any) -> Any:
        self.sizes.append(len(batch[0]))
        outputs = super().forward(batch)
        if self.training and len(batch[0]) > self.rows:
            if self.where == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            outputs.register_hook(self._fail)
        return outputs

    def _fail(self, gradient: Any) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried ...")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_automatic_microbatches_halve_until_they_fit_and_lose_no_batch(
    where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Greedy(2, where)
    with gold_trainer(model=model, device_train_microbatch_size="auto") as trainer:
        trainer.fit()
    # 6 does not fit, nor do 3; from then on 1 for good.
    assert model.sizes == [6, 3] + [1] * 6 * 8
    assert trainer.state.device_train_microbatch_size == 1
    assert int(trainer.state.timestamp.batch) == 8
    for name, values in OPTIMIZED["SGD(lr=0.1)"]["final_weights"].items():
        assert torch.allclose(model.state_dict()[name], torch.tensor(values), atol=1e-6, rtol=0)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_single_samples_out_of_memory_and_other_errors_are_raised_unchanged() -> None:
    with (
        pytest.raises(torch.OutOfMemoryError),
        gold_trainer(model=Greedy(0), device_train_microbatch_size="auto") as trainer,
    ):
        trainer.fit()

    class Broken(GoldMLP):
        def loss(self, outputs: Any, batch: Any) -> Any:
            raise RuntimeError("something else")

    with (
        pytest.raises(RuntimeError, match="something else"),
        gold_trainer(model=Broken(), device_train_microbatch_size="auto") as trainer,
    ):
        trainer.fit()


def test_a_microbatch_larger_than_the_batch_is_the_whole_batch() -> None:
    ends = []
    for size in (7, None):
        with gold_trainer(device_train_microbatch_size=size) as trainer:
            trainer.fit()
        ends.append(list(trainer.state.model.parameters()))
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))


def test_subsets_of_batches_make_an_epoch_and_an_evaluation() -> None:
    rows: list[tuple[str, int, int, int | None]] = []

    def note(event: Event, state: State, logger: object) -> None:
        rows.append((event.value, int(state.timestamp.epoch), int(state.timestamp.batch), state.dataloader_len))

    data = DataLoader(TensorDataset(*gold_data("eval_a", 12)), batch_size=3)
    trainer = gold_trainer(
        train_subset_num_batches=2,
        eval_subset_num_batches=3,
        eval_dataloader=data,
        algorithms=Act(note, Event.EPOCH_END, Event.EVAL_END),
    )
    with trainer:
        trainer.fit()
        assert int(trainer.state.eval_timestamp.batch) == 3
        trainer.eval(subset_num_batches=1)
        assert int(trainer.state.eval_timestamp.batch) == 1
    assert rows[:4] == [
        ("epoch_end", 1, 2, 2),
        ("eval_end", 1, 2, 3),
        ("epoch_end", 2, 4, 2),
        ("eval_end", 2, 4, 3),
    ]


class Endless:
    """Batches without a length or an end."""

    def __iter__(self) -> Any:
        while True:
            yield gold_data("train", 6)


def test_dataloaders_without_a_length_train_for_batches_or_subsets() -> None:
    with gold_trainer(train_dataloader=Endless(), max_duration="5ba") as trainer:
        trainer.fit()
    assert trainer.state.timestamp.values[:3] == (0, 0, 5)
    with gold_trainer(train_dataloader=Endless(), max_duration="2ep", train_subset_num_batches=3) as trainer:
        trainer.fit()
    assert trainer.state.timestamp.values[:3] == (0, 2, 6)


def test_a_trainer_of_evaluation_alone_needs_nothing_else() -> None:
    net = nn.Sequential(nn.Linear(8, 4))
    data = [gold_data("eval_a", 6)]
    with Trainer(Classifier(net), eval_dataloader=data, publish=False, progress_bar=False) as trainer:
        values = trainer.eval()
        with pytest.raises(ConfigurationError, match="needs a train_dataloader"):
            trainer.fit()
    share = (net(data[0][0]).argmax(dim=1) == data[0][1]).float().mean().item()
    assert values["eval"]["MulticlassAccuracy"] == pytest.approx(share)
    with (
        Trainer(Classifier(net), publish=False, progress_bar=False) as trainer,
        pytest.raises(ConfigurationError, match=r"eval\(\) needs something to evaluate on"),
    ):
        trainer.eval()
