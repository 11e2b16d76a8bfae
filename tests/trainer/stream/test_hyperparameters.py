"""What describes a training as a whole: collected by the trainer, logged everywhere without being asked, shown."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from consumers_stream import batch_end
from gold import GoldMLP, gold_loader
from recorded_runs import Entry, write_recording
from torchmetrics.classification import MulticlassAccuracy
from training import Act, gold_trainer

from offloop.bus import Event, Recording, Snapshot, find_run
from offloop.bus.publisher.description import describe_process
from offloop.bus.types.hyperparameters import hyperparameters_in
from offloop.consumers import Callback, JsonlLogger, Logger, LoggerDestination, Runner
from offloop.consumers.runner.runner import run_session
from offloop.consumers.runner.state_file import StateFile
from offloop.trainer import Trainer
from offloop.trainer.algorithms import LabelSmoothing
from offloop.trainer.schedulers import LinearWithWarmupScheduler
from offloop.trainer.stream.description import describe_hyperparameters, plain_value

SYSTEM = {"host": "trainer", "cpu_cores": 2, "python": "3.12.1", "torch": "2.13"}
INFO = {
    "command": ["train.py", "--lr", "0.1", "--api-key", "s3cret"],
    "git_commit": "abc",
    "git_dirty": True,
    "versions": {"torch": "2.13+cpu", "numpy": "2.4"},
    "config": {"task": "gold", "wandb_token": "s3cret", "sizes": {"hidden": [8, 16]}},
}


def described(trainer: Trainer, info: dict[str, Any] | None = None) -> dict[str, Any]:
    with trainer:
        trainer.fit()
        return describe_hyperparameters(trainer.state, SYSTEM, info or {})


# -- what is collected ------------------------------------------------------------------------------------------------


def test_metrics_have_a_goal_where_their_names_imply_none(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = {"Mine": MulticlassAccuracy(4), "Accuracy": MulticlassAccuracy(4)}
    monkeypatch.setattr(GoldMLP, "get_metrics", lambda *_, **more: metrics)
    found = described(gold_trainer(eval_dataloader=gold_loader("eval_a", 8, 4), max_duration="1ep"))
    assert {name: found[name] for name in found if "goals" in name} == {
        "metric.goals/metrics/train/Mine": "max",
        "metric.goals/metrics/eval/Mine": "max",
    }


def test_hyperparameters_describe_model_data_optimizer_and_machine() -> None:
    model = GoldMLP()
    groups = [{"params": [*model.parameters()][:1]}, {"params": [*model.parameters()][1:], "weight_decay": 0.0}]
    trainer = gold_trainer(
        model=model,
        optimizers=torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
        schedulers=LinearWithWarmupScheduler("2ba", alpha_f=0.5),
        algorithms=[LabelSmoothing(0.2), Act(print, Event.INIT)],
        eval_dataloader=gold_loader("eval_a", 8, 4),
        device_train_microbatch_size=3,
        max_duration="1ep",
    )
    found = described(trainer, INFO)
    assert found["model/name"] == "GoldMLP"
    assert (
        found["model/parameters"] == found["model/trainable_parameters"] == sum(p.numel() for p in model.parameters())
    )
    assert found == found | {
        "optimizer/name": "AdamW",
        # What was given, and not where the schedule has taken it.
        "optimizer/lr": 0.01,
        "optimizer/betas": [0.9, 0.999],
        "optimizer/weight_decay": 0.1,
        "optimizer/groups": 2,
        "optimizer/group1/weight_decay": 0.0,
    }
    assert "optimizer/group1/lr" not in found
    assert found["scheduler/name"] == "LinearWithWarmupScheduler"
    assert (found["scheduler/t_warmup"], found["scheduler/alpha_f"], found["scheduler/t_max"]) == ("2ba", 0.5, "1.0dur")
    assert found["algorithms"] == ["LabelSmoothing", "Act"]
    assert found["algorithm/LabelSmoothing/smoothing"] == 0.2
    sizes = (
        "global_train_batch_size",
        "device_train_microbatch_size",
        "train_samples",
        "train_batches",
        "eval_samples",
    )
    assert [found[name] for name in sizes] == [6, 3, 24, 4, 8]
    assert (found["seed"], found["precision"], found["max_duration"], found["device"]) == (17, "fp32", "1ep", "cpu")
    assert found["command"] == "train.py --lr 0.1 --api-key '***'"
    assert (found["git/commit"], found["git/dirty"]) == ("abc", True)
    assert (found["version/torch"], found["version/numpy"], found["version/python"]) == ("2.13", "2.4", "3.12.1")
    assert (found["machine/host"], found["machine/cpu_cores"]) == ("trainer", 2)
    assert (found["config/task"], found["config/wandb_token"], found["config/sizes/hidden"]) == (
        *("gold", "***", [8, 16]),
    )
    assert "s3cret" not in json.dumps(found)


def test_the_commit_of_git_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=n", "-c", "user.email=e")
        return subprocess.run(["git", *who, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert (describe_process()["git_commit"], describe_process()["git_dirty"]) == (None, None)
    git("init", "-q")
    (tmp_path / "train.py").write_text("1")
    git("add", "train.py")
    git("commit", "-qm", "one")
    (tmp_path / "untracked").touch()
    commit = git("rev-parse", "HEAD")
    assert (describe_process()["git_commit"], describe_process()["git_dirty"]) == (commit, False)
    (tmp_path / "train.py").write_text("2")
    assert (describe_process()["git_commit"], describe_process()["git_dirty"]) == (commit, True)
    monkeypatch.setenv("PATH", "")
    assert (describe_process()["git_commit"], describe_process()["git_dirty"]) == (None, None)


def test_a_command_line_with_invalid_utf_8_or_secrets_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--name", "\udcff", "--password", "s3cret"])
    assert describe_process()["command"] == ["train.py", "--name", "\\xff", "--password", "***"]


def test_shortened_values_contain_no_part_of_a_secret() -> None:
    given = {"note": f"{'x' * 990} hf_abcdefghIJKLMNOPqrst", "model": {"api_keys": ["s3cret"] * 40}}
    assert plain_value(given) == {"note": f"{'x' * 990} ***", "model": {"api_keys": "***"}}
    assert plain_value(2**64 - 1) == "18446744073709551615"  # a seed of torch that a reader could not keep as a number


# -- what is published ------------------------------------------------------------------------------------------------


def hyperparameters_of(run: str, attempt: int | None = None) -> list[tuple[str, dict[str, Any]]]:
    recording = Recording(find_run(run).path, attempt)
    found = [(one.event.value, hyperparameters_in(one.fields)) for one in recording]
    return [one for one in found if one[1]]


def test_hyperparameters_are_published_once_and_again_where_changed(runs_dir: Path) -> None:
    with gold_trainer(publish=True, run_name="r", max_duration="1ba") as trainer:
        trainer.fit()
        trainer.fit("1ba")
        trainer.fit("1ba", reset_time=True)
    (first, all_of_them), *later = hyperparameters_of("r")
    assert first == "fit_start"
    assert {"model/name", "optimizer/lr", "machine/host", "version/torch", "command"} <= all_of_them.keys()
    assert later == [("fit_start", {"max_duration": "2ba"}), ("fit_start", {"max_duration": "1ba"})]


def test_unreadable_hyperparameters_do_not_end_the_training(runs_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Bad(dict[str, Any]):
        def items(self) -> Any:
            raise RuntimeError("not today")

    trainer = gold_trainer(publish=True, run_name="r", max_duration="1ba")
    trainer.state.optimizers[0].param_groups[0] = Bad(trainer.state.optimizers[0].param_groups[0])
    trainer.state.algorithms.append(_Hostile(print))
    with trainer:
        trainer.fit()
    assert hyperparameters_of("r") == []
    assert "the hyperparameters of run r are not published" in caplog.text
    assert find_run("r").status == "finished"


class _Hostile(Act):
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("not today")


# -- what consumers do with them --------------------------------------------------------------------------------------


class Calls(LoggerDestination):
    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def log_hyperparameters(self, hyperparameters: Any, state: Snapshot) -> None:
        self.calls.append(dict(hyperparameters))


class Own(Callback):
    """Logs hyperparameters of its own, at the beginning."""

    def init(self, state: Snapshot, logger: Logger) -> None:
        logger.log_hyperparameters({"seed": "mine", "depth": 3})


TOLD = [
    Entry("init"),
    Entry("fit_start", fields={"hyperparameters": {"seed": 17, "optimizer": {"lr": 0.1}}}),
    Entry("fit_start", rank=1, fields={"hyperparameters": {"rank": 1}}),
    Entry(batch=1),
    Entry("$end", batch=1, fields={"status": "finished"}),
    Entry("$end", rank=1, batch=1, fields={"status": "finished"}),
]


def test_hyperparameters_are_logged_once_and_those_of_callbacks_take_precedence(tmp_path: Path) -> None:
    path = tmp_path / "r.mcap"
    write_recording(path, TOLD)
    for callbacks, expected in (
        ([], [{"seed": 17, "optimizer/lr": 0.1}]),
        ([Own()], [{"seed": "mine", "depth": 3}, {"optimizer/lr": 0.1}]),
    ):
        calls = Calls()
        run_session(lambda callbacks, after: Recording(path), callbacks, [calls])
        assert calls.calls == expected


def test_a_resumed_consumer_knows_which_names_a_callback_has_logged(tmp_path: Path) -> None:
    path = tmp_path / "r.mcap"
    write_recording(path, TOLD)
    stream = Recording(path)
    first, rest = Calls(), Calls()

    class Interrupted(Own):
        def init(self, state: Snapshot, logger: Logger) -> None:
            super().init(state, logger)
            runner.stop()

    Interrupted.__name__ = "Own"
    with StateFile(tmp_path, "mine", "r", 1) as progress:
        runner = Runner(stream, [Interrupted()], [first], progress=progress)
        runner.run()
    with StateFile(tmp_path, "mine", "r", 1) as progress:
        Runner(Recording(path), [Own()], [rest], progress=progress).run()
    assert first.calls == [{"seed": "mine", "depth": 3}]
    assert rest.calls == [{"optimizer/lr": 0.1}]


class Anything(Callback):
    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        odd = {"path": Path("x"), "np": np.float32(0.5), "int": np.int64(3), "big": 10**400, "bad": "\udc80"}
        logger.log_hyperparameters({**odd, "map": {(1, 2): {1}}, "type": int, 5: None, "list": (1, [Path("y")])})


def test_a_hyperparameter_of_any_type_breaks_no_file(tmp_path: Path) -> None:
    logger = JsonlLogger(str(tmp_path / "x.jsonl"))
    assert Runner([batch_end(1)], [Anything()], [logger]).run().problems == []
    logged = json.loads((tmp_path / "x.jsonl").read_text())["hyperparameters"]
    assert logged == {"path": "x", "np": 0.5, "int": 3, "big": hex(10**400), "bad": "\\udc80"} | {
        "map": {"(1, 2)": "{1}"},
        "type": "<class 'int'>",
        "5": None,
        "list": [1, ["y"]],
    }
