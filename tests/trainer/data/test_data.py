"""Batches of any shape: counted, split and moved."""

import copy
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from gold import gold_data
from training import Act, gold_trainer

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer import DataSpec, Evaluator
from offloop.trainer.data.spec import count_samples, count_tokens, split_samples
from offloop.trainer.device.batch import batch_get, batch_set, map_tensors
from offloop.trainer.device.device import CpuDevice

Pair = namedtuple("Pair", "x y")
X, Y = torch.arange(12).view(6, 2), torch.arange(6)
USED = (Event.AFTER_DATALOADER, Event.EVAL_BATCH_START, Event.PREDICT_BATCH_START)


@pytest.mark.parametrize(
    "batch",
    [X, Pair(X, Y), [X, (Y, Y)], {"x": {"a": X}, "names": ["a"] * 6}, (X, None)],
    ids=["tensor", "namedtuple", "nested", "with text", "with none"],
)
def test_samples_are_counted_in_the_first_dimension(batch: Any) -> None:
    assert count_samples(batch) == 6


@pytest.mark.parametrize("batch", [(X, Y[:3]), ["a", "b"], "text"])
def test_batches_that_cannot_be_counted_are_refused(batch: Any) -> None:
    with pytest.raises(ConfigurationError, match="DataSpec"):
        count_samples(batch)


def test_tokens_are_those_of_input_ids() -> None:
    assert count_tokens({"input_ids": X}) == 12
    assert count_tokens({"x": X}) == count_tokens((X, Y)) == count_tokens(X) == 0


def test_batches_are_split_with_the_rest_last() -> None:
    parts = split_samples({"x": X, "pair": Pair(X, Y), "names": list("abcdef")}, 4)
    assert [count_samples(part["x"]) for part in parts] == [4, 2]
    assert [part["names"] for part in parts] == [list("abcd"), list("ef")]
    assert isinstance(parts[0]["pair"], Pair)
    assert torch.equal(torch.cat([part["pair"].y for part in parts]), Y)
    assert [part[1].tolist() for part in split_samples([X, Y], 4)] == [[0, 1, 2, 3], [4, 5]]


def test_every_tensor_of_a_batch_is_reached() -> None:
    doubled = map_tensors({"x": X, "pair": Pair(X, [Y, "text", None])}, lambda tensor: tensor * 2)
    assert torch.equal(doubled["x"], X * 2)
    assert isinstance(doubled["pair"], Pair)
    assert torch.equal(doubled["pair"].y[0], Y * 2)
    assert doubled["pair"].y[1:] == ["text", None]
    batch = {"x": X}
    assert CpuDevice().batch_to_device(batch) is batch


@pytest.mark.parametrize("dataloader", [3, (batch for batch in [X])])
def test_iterators_are_refused_as_dataloaders(dataloader: Any) -> None:
    with pytest.raises(ConfigurationError, match="train_dataloader"):
        gold_trainer(train_dataloader=dataloader)


@pytest.mark.parametrize("number", [None, 2.5, -1, True, Y])
def test_batches_are_counted_in_whole_numbers(number: Any) -> None:
    for argument in ("get_num_samples_in_batch", "get_num_tokens_in_batch"):
        with pytest.raises(ConfigurationError, match=argument):
            DataSpec([X], **{argument: 0})  # type: ignore[arg-type]
        data = DataSpec([gold_data("train", 6)], **{argument: lambda batch: number})  # type: ignore[arg-type]
        with gold_trainer(train_dataloader=data) as trainer, pytest.raises(ConfigurationError, match=argument):
            trainer.fit()


def test_counts_of_other_kinds_become_plain_numbers() -> None:
    data = DataSpec(
        [gold_data("train", 6)],
        get_num_samples_in_batch=lambda batch: torch.tensor(6),
        get_num_tokens_in_batch=lambda batch: np.int64(60),
    )
    with gold_trainer(train_dataloader=data, max_duration="2ep") as trainer:
        trainer.fit()
    values = trainer.state.timestamp.values
    assert values[3:5] == (12, 120)
    assert {type(value) for value in values} == {int}


@pytest.mark.parametrize("parts", [[], None, X])
def test_batches_are_split_into_a_list(parts: Any) -> None:
    data = DataSpec([gold_data("train", 6)], split_batch=lambda batch, size: parts)
    trainer = gold_trainer(train_dataloader=data, device_train_microbatch_size=2)
    with trainer, pytest.raises(ConfigurationError, match="split_batch"):
        trainer.fit()
    with pytest.raises(ConfigurationError, match="split_batch"):
        split_samples({"x": X, "n": 3}, 4)


def test_a_dataloader_that_does_not_know_its_length_is_trained_on() -> None:
    class Unmeasured(list[Any]):
        def __len__(self) -> int:
            raise NotImplementedError

    with gold_trainer(train_dataloader=Unmeasured([gold_data("train", 6)] * 3), max_duration="2ep") as trainer:
        trainer.fit()
    assert trainer.state.dataloader_len is None
    assert int(trainer.state.timestamp.batch) == 6


def test_batches_are_transformed_once_they_are_on_the_device_wherever_they_are_used() -> None:
    inputs, targets = gold_data("train", 6)
    seen: list[torch.Tensor] = []
    act = Act(lambda event, state, logger: seen.append(state.batch[0]), *USED)
    spec = DataSpec([(inputs, targets)], device_transforms=lambda batch: (batch[0] * 2, batch[1]))
    with gold_trainer(
        train_dataloader=spec, eval_dataloader=Evaluator("eval", spec), max_duration="1ep", algorithms=act
    ) as trainer:
        trainer.fit()
        trainer.predict(spec)
    assert len(seen) == 3
    assert all(torch.equal(one, inputs * 2) for one in seen)


PARTS: list[tuple[Any, Any]] = [
    ([1, 2], 1),
    (Pair(1, 2), 1),
    ({"x": 1, "y": 2}, "y"),
    ({"pair": (1, [0, 2])}, ["pair", 1, 1]),
    ({"y": 2}, (lambda batch: batch["y"], lambda batch, value: {"y": value})),
]


@pytest.mark.parametrize(("batch", "key"), PARTS)
def test_parts_of_a_batch_are_read_and_replaced_in_a_copy(batch: Any, key: Any) -> None:
    before = copy.deepcopy(batch)
    assert batch_get(batch, key) == 2
    changed = batch_set(batch, key, 5)
    assert batch_get(changed, key) == 5
    assert type(changed) is type(batch)
    assert batch == before


@pytest.mark.parametrize(("batch", "key"), [((1, 2), 2), ({"x": 1}, "y"), (3, 0)])
def test_parts_that_are_not_there_are_refused(batch: Any, key: Any) -> None:
    with pytest.raises(ConfigurationError):
        batch_get(batch, key)
    with pytest.raises(ConfigurationError):
        batch_set(batch, key, 1)
