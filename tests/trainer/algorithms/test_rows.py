"""Sequences that grow, and rows that are left out."""

from typing import Any

import pytest
import torch
from algorithm_runs import note, row_batches, seen_batches, train
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from training import Act

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer import Classifier, DataSpec, LanguageModel
from offloop.trainer.algorithms import SelectiveBackprop, SequenceLengthWarmup


def language_model() -> LanguageModel:
    return LanguageModel(nn.Sequential(nn.Embedding(200, 4), nn.Linear(4, 200)))


class Named(nn.Module):
    """A model of token numbers in a mapping, which predicts the tokens themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(200, 4), nn.Linear(4, 200))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        outputs: Tensor = self.net(batch["input_ids"])
        return outputs

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(outputs.flatten(0, -2), batch["input_ids"].flatten())


def text(rows: int = 3, length: int = 32) -> Tensor:
    """Tokens that tell where they stand."""
    return torch.arange(rows * length).reshape(rows, length)


def lengths(algorithm: Any, batches: Any, **arguments: Any) -> list[int]:
    return [inputs.shape[1] for inputs, _ in seen_batches(algorithm, batches, language_model, **arguments)]


def test_sequences_grow_in_even_steps_until_the_end_of_the_warmup() -> None:
    warmup = SequenceLengthWarmup(duration=0.6, min_seq_length=8, max_seq_length=20, step_size=4)
    assert lengths(warmup, [(text(), text())] * 10) == [8, 8, 12, 12, 16, 16, 20, 20, 20, 20]


def test_time_in_epochs_counts_in_batches() -> None:
    warmup = SequenceLengthWarmup(duration=0.5, max_seq_length=32)
    assert lengths(warmup, [(text(), text())] * 4, max_duration="2ep") == [8, 8, 16, 24, 32, 32, 32, 32]


def test_truncation_keeps_the_beginning_of_every_tensor() -> None:
    warmup = SequenceLengthWarmup()
    inputs, targets = text(), text() + 100
    first = seen_batches(warmup, [(inputs, targets)], language_model)[0]
    assert isinstance(first, tuple)
    assert torch.equal(first[0], inputs[:, :8])
    assert torch.equal(first[1], targets[:, :8])
    mapping = seen_batches(warmup, [{"input_ids": inputs, "type": targets.float()}], Named)[0]
    assert torch.equal(mapping["input_ids"], inputs[:, :8])
    assert torch.equal(mapping["type"], targets[:, :8].float())


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 4), length=st.integers(1, 20), expected=st.integers(1, 20))
def test_without_truncation_all_tokens_that_fill_a_row_are_kept_in_order(rows: int, length: int, expected: int) -> None:
    warmup = SequenceLengthWarmup(min_seq_length=expected, max_seq_length=expected, truncate=False)
    tokens = text(rows, length)
    inputs, targets = seen_batches(warmup, [(tokens, tokens)], language_model)[0]
    assert torch.equal(inputs, targets)
    if expected >= length:
        assert torch.equal(inputs, tokens)
    else:
        assert inputs.shape == (rows * length // expected, expected)
        assert torch.equal(inputs.flatten(), torch.arange(inputs.numel()))


def test_the_last_token_that_counts_is_kept_at_the_end() -> None:
    tokens = text(4, 16)
    mask = torch.zeros(4, 16, dtype=torch.long)
    for row, count in enumerate((16, 9, 8, 3)):
        mask[row, :count] = 1
    batch = {"input_ids": tokens, "attention_mask": mask}
    before = {name: values.clone() for name, values in batch.items()}
    seen = seen_batches(SequenceLengthWarmup(preserve_end_of_sequence=True), [batch], Named)[0]
    expected = tokens[:, :8].clone()
    expected[0, 7], expected[1, 7] = tokens[0, 15], tokens[1, 8]
    assert torch.equal(seen["input_ids"], expected)
    assert torch.equal(seen["attention_mask"], mask[:, :8])
    assert all(torch.equal(batch[name], before[name]) for name in batch)


def test_length_and_rows_are_logged() -> None:
    logged: list[Any] = []
    collect = Act(lambda event, state, logger: logged.extend(logger.take()), Event.BATCH_START)
    warmup = SequenceLengthWarmup(duration=0.5, max_seq_length=16, truncate=False)
    train([(text(), text())] * 2, [warmup, collect], language_model)
    assert logged == [
        [0, {"seq_length_warmup/curr_seq_len": 8, "seq_length_warmup/curr_bs": 12}],
        [1, {"seq_length_warmup/curr_seq_len": 16, "seq_length_warmup/curr_bs": 6}],
    ]


@pytest.mark.parametrize(
    ("arguments", "batch"),
    [
        ({}, (text(), torch.zeros(3))),
        ({"truncate": False}, (text(), text(3, 16))),
        ({"preserve_end_of_sequence": True}, (text(), text())),
    ],
)
def test_batches_that_are_no_sequences_are_refused(arguments: Any, batch: Any) -> None:
    with pytest.raises(ConfigurationError):
        train([batch], SequenceLengthWarmup(**arguments), language_model)


def counts(algorithm: SelectiveBackprop, batches: Any, **arguments: Any) -> list[int]:
    return [len(batch[1]) for batch in seen_batches(algorithm, batches, small_model, **arguments)]


def small_model() -> Classifier:
    return Classifier(nn.Linear(8, 4))


def test_rows_are_left_out_between_start_and_end_but_not_of_every_second_batch() -> None:
    selective = SelectiveBackprop(start=0.2, end=0.8, keep=0.5)
    assert counts(selective, row_batches(10, 6)) == [6, 6, 3, 6, 3, 6, 3, 6, 6, 6]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"interrupt": 3}, [3, 3, 7, 3, 3, 7]),
        ({"interrupt": 0, "keep": 1.0}, [7] * 6),
        ({"interrupt": 0, "keep": 1e-5}, [1] * 6),
    ],
)
def test_how_many_rows_are_kept_and_which_batches_stay_whole(arguments: Any, expected: list[int]) -> None:
    assert counts(SelectiveBackprop(**({"start": 0.0, "end": 1.0} | arguments)), row_batches(6, 7)) == expected


def test_the_training_time_counts_what_was_fetched() -> None:
    state = train(row_batches(4, 6), SelectiveBackprop(0.0, 1.0, interrupt=0), device_train_microbatch_size=2)
    assert state.timestamp.sample == 24


def test_the_gradient_is_that_of_the_rows_that_are_left() -> None:
    gradients: list[Tensor] = []
    batches = row_batches(1)
    look = note(gradients, lambda state: state.model.module.weight.grad.clone(), Event.AFTER_TRAIN_BATCH)
    left: list[Any] = []
    selective = SelectiveBackprop(0.0, 1.0, interrupt=0)
    note_left = note(left, lambda state: state.batch, Event.BATCH_START)
    for size in (None, 2):
        train(batches, [selective, note_left, look], small_model, device_train_microbatch_size=size)
    torch.manual_seed(3)
    model = small_model()
    cross_entropy(model(left[0]), left[0][1]).backward()
    for gradient in gradients:
        torch.testing.assert_close(gradient, model.module.weight.grad)


def test_rows_with_a_high_loss_are_kept_more_often() -> None:
    losses, numbers = torch.tensor([3.0, 1.0, 4.0, 2.0]), torch.arange(4)
    model = Classifier(nn.Linear(1, 1), loss_fn=lambda outputs, targets: 0 * outputs.sum())
    selective = SelectiveBackprop(0.0, 1.0, keep=0.25, interrupt=0, loss_fn=lambda outputs, targets: losses[targets])
    kept = torch.zeros(4)
    for inputs, targets in seen_batches(selective, [(losses[:, None], numbers)] * 800, lambda: model):
        assert torch.equal(inputs[:, 0], losses[targets])
        kept[targets] += 1
    weights = torch.tensor([5.0, 1.0, 7.0, 3.0]) ** 3
    torch.testing.assert_close(kept / 800, weights / weights.sum(), atol=0.05, rtol=0)


def test_every_tensor_with_a_place_for_each_row_loses_the_same_rows() -> None:
    tokens = torch.arange(6)[:, None].repeat(1, 4)
    batch = {"input_ids": tokens, "more": [torch.arange(6)], "weights": torch.ones(3), "scale": torch.tensor(2.0)}
    data = DataSpec([batch], get_num_samples_in_batch=lambda batch: len(batch["input_ids"]))
    selective = SelectiveBackprop(0.0, 1.0, interrupt=0, input_key="input_ids", target_key="input_ids")
    (seen,) = seen_batches(selective, data, Named, max_duration="1ba")
    assert seen["input_ids"].shape == (3, 4)
    assert torch.equal(seen["more"][0], seen["input_ids"][:, 0])
    assert seen["weights"].shape == (3,)
    assert seen["scale"] == 2


@pytest.mark.parametrize("shape", [(6, 2, 8), (6, 2, 4, 4, 4)])
def test_the_losses_are_computed_on_smaller_inputs_and_the_training_on_full_ones(shape: tuple[int, ...]) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 3)
            self.shapes: list[tuple[tuple[int, ...], bool]] = []

        def forward(self, batch: Any) -> Tensor:
            self.shapes.append((tuple(batch[0].shape), torch.is_grad_enabled()))
            outputs: Tensor = self.linear(batch[0].flatten(2).mean(dim=2))
            return outputs

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return cross_entropy(outputs, batch[1])

    selective = SelectiveBackprop(0.0, 1.0, interrupt=0, scale_factor=0.5)
    model = Pooled()
    train([(torch.rand(shape), torch.arange(6) % 3)], selective, lambda: model)
    half = (*shape[:2], *(size // 2 for size in shape[2:]))
    assert model.shapes == [(half, False), ((3, *shape[1:]), True)]


def test_the_pass_for_the_losses_has_the_precision_of_the_training_and_leaves_no_gradient() -> None:
    dtypes: list[torch.dtype] = []
    grads: list[Any] = []

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        dtypes.append(outputs.dtype)
        return cross_entropy(outputs, targets, reduction="none")

    look = note(grads, lambda state: state.model.module.weight.grad, Event.BATCH_START)
    selective = SelectiveBackprop(0.0, 1.0, interrupt=0, loss_fn=losses)
    train(row_batches(1), [selective, look], small_model, precision="amp_bf16")
    assert (dtypes, grads) == ([torch.bfloat16], [None])


@pytest.mark.parametrize(
    ("arguments", "batch"),
    [
        ({"loss_fn": cross_entropy}, row_batches()[0]),
        ({"loss_fn": lambda outputs, targets: 1.0}, row_batches()[0]),
        ({"scale_factor": 0.5}, row_batches()[0]),
        ({"target_key": (torch.clone, torch.add)}, torch.zeros(6, 8)),
    ],
)
def test_batches_whose_rows_cannot_be_selected_are_refused(arguments: Any, batch: Any) -> None:
    with pytest.raises(ConfigurationError):
        train([batch], SelectiveBackprop(0.0, 1.0, interrupt=0, **arguments))
