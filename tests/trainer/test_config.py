"""The arguments of a trainer: one by one or in groups, and the options and the documentation that follow from them."""

import dataclasses
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
    ("arguments", "message"),
    [
        (
            {"checkpoints": CheckpointConfig(save_folder="a"), "save_folder": "b"},
            r"save_folder is given twice: as save_folder=\.\.\. and in checkpoints=CheckpointConfig\(\.\.\.\)",
        ),
        # Also with its default, and by its position.
        (
            {"checkpoints": CheckpointConfig(save_overwrite=True), "save_overwrite": False},
            r"save_overwrite is given twice",
        ),
        ({"stream": StreamConfig()}, r"publish is given twice: as publish=\.\.\. and in stream=StreamConfig"),
        (
            {"checkpoints": {"save_folder": "a"}},
            r"checkpoints is {.*}: give an offloop.trainer.CheckpointConfig\(\.\.\.\)",
        ),
        (
            {"compute": CheckpointConfig()},
            r"compute is CheckpointConfig\(.*\): give an offloop.trainer.ComputeConfig\(",
        ),
    ],
)
def test_an_argument_is_given_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        gold_trainer(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"stream_to": "http://x", "publish": True},
            "'http://x' is not the address of a NATS server: write nats://HOST:4222",
        ),
        ({"stream_to": " , ", "publish": True}, "no NATS server is named"),
        (
            {"stream_to": "nats://x", "publish": False},
            "stream_to needs the stream: leave out publish=False, or stream_to",
        ),
    ],
)
def test_where_a_run_is_copied_to_is_checked_at_the_start(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        gold_trainer(**arguments)


def test_an_argument_given_by_its_position_counts_too() -> None:
    with pytest.raises(ConfigurationError, match=r"eval_interval is given twice: .* evaluation=EvalConfig"):
        Trainer(GoldMLP(), None, None, None, None, "1ep", 0, evaluation=EvalConfig(), publish=False)


def test_a_group_refuses_a_value_when_it_is_made() -> None:
    with pytest.raises(ConfigurationError, match="save_overwrite is 'yes': use True or False") as caught:
        CheckpointConfig(save_overwrite="yes")  # type: ignore[arg-type]
    assert (caught.value.name, caught.value.value) == ("save_overwrite", "yes")
    with pytest.raises(ConfigurationError, match="eval_interval '-1ep' is not allowed"):
        EvalConfig(eval_interval="-1ep")
    with pytest.raises(InvalidTimeError, match="'soon'"):
        CheckpointConfig(save_interval="soon")
    with pytest.raises(ConfigurationError, match="precision 'fp8' is not allowed: use fp32, amp_bf16, amp_fp16"):
        ComputeConfig(precision="fp8")
    assert CheckpointConfig(save_latest_filename=None).save_latest_filename is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        CheckpointConfig().save_folder = "x"  # type: ignore[misc]


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


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_is_documented_once(name: str) -> None:
    assert ARGUMENTS[name].help
    pages = "\n".join(inspect.cleandoc(one.__doc__ or "") for one in (TrainerArguments, *GROUPS.values()))
    assert len(re.findall(rf"^    (?:\w+, )*{name}(?:, \w+)*: ", pages, re.MULTILINE)) == 1


def test_an_option_says_what_the_documentation_says() -> None:
    [option] = [option for option in COMMON_OPTIONS["Checkpoints"] if option.name == "save_overwrite"]
    text = ARGUMENTS["save_overwrite"].help
    assert option.help == text[0].upper() + text[1:]
    # The command refuses -1, which Python takes.
    [keep] = [option for option in COMMON_OPTIONS["Checkpoints"] if option.name == "keep"]
    assert (keep.help, "-1 for all" in ARGUMENTS["save_num_checkpoints_to_keep"].help) == (
        "How many checkpoints to keep, the newest ones; by default all.",
        True,
    )
    assert all(option.help for options in COMMON_OPTIONS.values() for option in options)


def test_the_documented_bound_of_memory_is_the_publisher_s() -> None:
    assert f"{BACKLOG_BYTES // 2**20} MiB" in ARGUMENTS["backlog_bytes"].help
