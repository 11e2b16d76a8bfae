"""The arguments of a trainer: one by one or in groups, and the options and the documentation that follow from them."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from gold import GoldMLP, gold_loader, gold_optimizer
from training import gold_trainer

from offloop.bus.errors import ConfigurationError, InvalidTimeError
from offloop.bus.publisher.publisher import BACKLOG_BYTES
from offloop.bus.recording.recording import Recording
from offloop.trainer import CheckpointConfig, ComputeConfig, EvalConfig, StreamConfig, Trainer
from offloop.trainer.arguments.config import arguments_of
from offloop.trainer.cli.options import COMMON_OPTIONS
from offloop.trainer.config import GROUPS, TrainerArguments

ARGUMENTS = {one.name: one for one in arguments_of(TrainerArguments)}


def test_a_group_stands_for_its_arguments(tmp_path: Path, runs_dir: Path) -> None:
    model = GoldMLP()
    with Trainer(
        model,
        gold_loader("train", 24, 6),
        gold_loader("eval_a", 12, 5),
        gold_optimizer(model),
        max_duration="1ep",
        device="cpu",
        progress_bar=False,
        run_name="grouped",
        evaluation=EvalConfig("2ba", eval_subset_num_batches=1),
        compute=ComputeConfig(device_train_microbatch_size=3),
        checkpoints=CheckpointConfig(save_folder=tmp_path / "saved", save_interval="2ba"),
        stream=StreamConfig(record="all"),
    ) as trainer:
        trainer.fit()
    assert {path.name for path in (tmp_path / "saved").glob("ep*")} == {
        "ep0-ba2-rank0.safetensors",
        "ep0-ba4-rank0.safetensors",
    }
    assert trainer.state.device_train_microbatch_size == 3
    states = [state for state in Recording(runs_dir / "grouped") if state.event.value == "eval_end"]
    assert [(int(one.timestamp.batch), int(one.eval_timestamp.batch)) for one in states] == [(2, 1), (4, 1)]
    assert any(state.event.value == "after_loss" for state in Recording(runs_dir / "grouped"))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        # Also with its default.
        ({"checkpoints": CheckpointConfig(save_overwrite=True), "save_overwrite": False}, "save_overwrite"),
        ({"stream": StreamConfig()}, "publish"),
        ({"checkpoints": {"save_folder": "a"}}, "checkpoints"),
        ({"compute": CheckpointConfig()}, "compute"),
    ],
)
def test_an_argument_is_given_once(arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        gold_trainer(**arguments)
    with pytest.raises(ConfigurationError, match="eval_interval"):
        Trainer(GoldMLP(), None, None, None, None, "1ep", 0, evaluation=EvalConfig(), publish=False)


def test_a_group_refuses_a_value_when_it_is_made() -> None:
    with pytest.raises(ConfigurationError) as caught:
        CheckpointConfig(save_overwrite="yes")  # type: ignore[arg-type]
    assert (caught.value.name, caught.value.value) == ("save_overwrite", "yes")
    with pytest.raises(InvalidTimeError):
        CheckpointConfig(save_interval="soon")
    with pytest.raises(ConfigurationError):
        ComputeConfig(precision="fp8")
    assert CheckpointConfig(save_latest_filename=None).save_latest_filename is None


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
    assert GROUPS.keys() < parameters.keys()
    assert parameters["save_interval"].default == CheckpointConfig().save_interval


def test_an_argument_is_documented_once() -> None:
    pages = "\n".join(inspect.cleandoc(one.__doc__ or "") for one in (TrainerArguments, *GROUPS.values()))
    for name, argument in ARGUMENTS.items():
        assert argument.help
        assert len(re.findall(rf"^    (?:\w+, )*{name}(?:, \w+)*: ", pages, re.MULTILINE)) == 1, name
    assert all(option.help for options in COMMON_OPTIONS.values() for option in options)


def test_the_documented_bound_of_memory_is_the_publisher_s() -> None:
    assert f"{BACKLOG_BYTES // 2**20} MiB" in ARGUMENTS["backlog_bytes"].help
