"""The arguments of a trainer: and the options and the documentation that follow from them."""

import inspect
import re

import pytest
from training import gold_trainer

from offloop.bus.publisher.publisher import BACKLOG_BYTES
from offloop.trainer import Trainer
from offloop.trainer.arguments.config import CheckpointConfig, arguments_of
from offloop.trainer.cli.options import COMMON_OPTIONS
from offloop.trainer.config import GROUPS, TrainerArguments

ARGUMENTS = {one.name: one for one in arguments_of(TrainerArguments)}


def test_a_mistaken_name_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="save_foldr"):
        gold_trainer(save_foldr="x")
    with pytest.raises(TypeError, match="model"):
        Trainer()  # type: ignore[call-arg]


def test_the_signature_shows_all_arguments() -> None:
    parameters = inspect.signature(Trainer).parameters
    assert list(parameters)[:13] == [
        *("model", "train_dataloader", "eval_dataloader", "optimizers", "schedulers", "max_duration"),
        *("eval_interval", "algorithms", "callbacks", "loggers", "run_name", "seed", "device"),
    ]
    assert parameters.keys() == ARGUMENTS.keys()
    assert parameters["save_interval"].default == CheckpointConfig().save_interval


def test_an_argument_is_documented_once() -> None:
    pages = "\n".join(inspect.cleandoc(one.__doc__ or "") for one in (TrainerArguments, *GROUPS))
    for name, argument in ARGUMENTS.items():
        assert argument.help
        assert len(re.findall(rf"^    (?:\w+, )*{name}(?:, \w+)*: ", pages, re.MULTILINE)) == 1, name
    assert all(option.help for options in COMMON_OPTIONS.values() for option in options)


def test_the_documented_bound_of_memory_is_the_publisher_s() -> None:
    assert f"{BACKLOG_BYTES // 2**20} MiB" in ARGUMENTS["backlog_bytes"].help
