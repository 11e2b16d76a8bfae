"""A training that is killed and resumed ends as one that was not: bitwise the same weights, on a CPU."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attached_runs import note_marks
from fake_gpu import reads
from forked import Program, run_forked
from gold import GoldMLP
from resumed import Augmented, Momentum, make, same, train, weights
from safetensors.torch import save, save_file
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.utils.data import DataLoader
from training import Act, fitted, gold_trainer

from offloop.bus.errors import CheckpointError, ConfigurationError
from offloop.bus.recording.recording import Recording
from offloop.bus.runs.directory import find_run
from offloop.bus.types.event import Event
from offloop.trainer import Classifier, State, Trainer


def test_resumed_from_any_batch_it_ends_with_the_same_weights(tmp_path: Path) -> None:
    expected = train(tmp_path)
    assert same(train(None), expected), "saving changes nothing"
    checkpoints = sorted(tmp_path.glob("ep*"), key=lambda path: int(path.name.split("ba")[1].split("-")[0]))
    assert len(checkpoints) == 15
    for checkpoint in checkpoints[:-1]:
        assert same(train(None, load_path=checkpoint), expected), checkpoint.name
    with make(None, load_path=checkpoints[-1]) as trainer:
        assert same(weights(trainer), expected)


def test_the_scaler_of_amp_fp16_is_saved_without_waiting_for_it_and_resumed(tmp_path: Path) -> None:
    gathered: list[list[str]] = []

    def gather(event: Event, state: State, logger: object) -> None:
        with reads() as found:
            assert state.gather_checkpoint is not None
            state.gather_checkpoint()
        gathered.append(found)

    # Too large at first, as often: it has been halved, and counts the batches since then.
    class Explosive(GoldMLP):
        def loss(self, outputs: Any, batch: Any) -> Any:
            return super().loss(outputs, batch) * (float("inf") if trainer.state.timestamp.values.batch == 1 else 1)

    algorithms = [Act(gather, Event.BATCH_CHECKPOINT)]
    with gold_trainer(
        model=Explosive(), precision="amp_fp16", max_duration="1ep", algorithms=algorithms, save_folder=tmp_path
    ) as trainer:
        trainer.fit()
    scaler: Any = trainer.state.scaler
    assert len(gathered) == 4
    assert not any("item" in found or "_local_scalar_dense" in found for found in gathered)
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (2.0**15, 2)
    with gold_trainer(precision="amp_fp16", load_path=tmp_path) as resumed:
        assert resumed.state.scaler is not None
        assert resumed.state.scaler.state_dict() == scaler.state_dict()


def test_with_workers_it_resumes_to_the_same_weights(tmp_path: Path) -> None:
    expected = train(tmp_path, workers=2, max_duration="2ep")
    assert same(train(None, workers=2, max_duration="2ep", load_path=tmp_path / "ep1-ba7-rank0.safetensors"), expected)


def test_a_training_in_parts_is_the_same_as_in_one_piece() -> None:
    # Evaluations draw random numbers, and the end of a part is one.
    arguments: dict[str, Any] = {"schedulers": None, "eval_dataloader": None}
    expected = train(None, **arguments)
    with make(None, **arguments) as trainer:
        for duration in ("3ba", "1ba", "6ba"):
            trainer.fit(duration=duration)
        trainer.fit()
    assert trainer.state.timestamp.values[:3] == (0, 3, 15)
    assert same(weights(trainer), expected)


@pytest.mark.parametrize("kind", ["step", "one cycle"])
def test_torch_schedulers_and_several_optimizers_resume(kind: str, tmp_path: Path) -> None:
    def run(folder: Path | None, load_path: Path | None = None) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9)]
        optimizers.append(torch.optim.Adam(net[2].parameters(), lr=0.01))
        schedulers: Any = [StepLR(one, step_size=1, gamma=0.5) for one in optimizers]
        if kind == "one cycle":
            schedulers = [OneCycleLR(one, max_lr=0.1, total_steps=20) for one in optimizers]
        trainer = fitted(
            model=Classifier(net),
            train_dataloader=DataLoader(Augmented(26), batch_size=6, shuffle=True),
            optimizers=optimizers,
            schedulers=schedulers,
            step_schedulers_every_batch=kind == "one cycle",
            max_duration="3ep",
            save_folder=folder,
            save_interval="1ba",
            load_path=load_path,
        )
        return weights(trainer)

    expected = run(tmp_path)
    for name in ("ep1-ba7", "ep1-ba10"):
        assert same(run(None, tmp_path / f"{name}-rank0.safetensors"), expected)


def test_the_last_evaluation_is_in_the_last_checkpoint(tmp_path: Path) -> None:
    with make(tmp_path, max_duration="7ba") as trainer:
        trainer.fit()
    values = trainer.state.eval_metric_values
    with make(None, load_path=tmp_path, max_duration="8ba", eval_interval=0) as resumed:
        assert int(resumed.state.timestamp.batch) == 7
        assert resumed.state.eval_metric_values == values
        assert values["eval"].keys() == {"MulticlassAccuracy", "CrossEntropy"}


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from resumed import make
from training import Act
from offloop.bus.types.event import Event
torch.set_num_threads(1)
folder, runs_dir = {folder!r}, {runs_dir!r}
def attempt(last):
    def die(event, state, logger):
        if state.timestamp.batch == last:
            os.kill(os.getpid(), signal.SIGKILL)
    with make(Path(folder), publish=True, run_name="killed", runs_dir=runs_dir, autoresume=True) as trainer:
        trainer.state.algorithms.append(Act(die, Event.BATCH_END))
        trainer.fit()
    torch.save(trainer.state.model.state_dict(), folder + ".pt")
for last in (3, 9):
    if (pid := os.fork()) == 0:
        attempt(last)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
attempt(-1)
"""


@pytest.mark.slow
def test_a_training_killed_twice_and_resumed_ends_with_the_same_weights(tmp_path: Path, runs_dir: Path) -> None:
    code = KILLED.format(folder=str(tmp_path / "saved"), runs_dir=str(runs_dir))
    [ended] = run_forked("resumed", tmp_path, [Program(code)])
    assert ended.exit_code == 0, ended.stderr
    assert same(torch.load(tmp_path / "saved.pt"), train(None))
    # A resumed run is a new attempt of the same run, whose training time goes on.
    recordings = sorted(find_run("killed", runs_dir).path.glob("recording-*.mcap"))
    assert len(recordings) == 3
    first = next(iter(Recording(recordings[2]).snapshots({Event.FIT_START})))
    assert int(first.timestamp.batch) > 0
    assert first.attempt == 3


def test_resuming_a_finished_run_only_repeats_its_last_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, run_name="done", max_duration="7ba", eval_interval=0)
    marks, latest = note_marks(monkeypatch), tmp_path / "latest-rank0.safetensors"
    before = latest.read_bytes()
    with make(
        tmp_path, run_name="done", autoresume=True, max_duration="7ba", publish=True, runs_dir=tmp_path / "runs"
    ) as trainer:
        trainer.fit()
    assert int(trainer.state.timestamp.batch) == 7
    assert trainer.state.eval_metric_values["eval"]
    # It writes no checkpoint, and says of none that it was saved.
    assert marks == [("load", 7)]
    assert latest.read_bytes() == before


def test_the_last_checkpoint_resumes_after_the_epoch_that_it_ended_with(tmp_path: Path) -> None:
    ends: list[int] = []
    note = Act(lambda event, state, logger: ends.append(int(state.timestamp.epoch)), Event.EPOCH_END)
    train(tmp_path, max_duration="10ba")
    with make(None, max_duration="3ep", load_path=tmp_path / "ep1-ba10-rank0.safetensors") as trainer:
        assert trainer.state.timestamp.values[:3] == (0, 2, 10)
        trainer.state.algorithms.append(note)
        trainer.fit()
    assert ends == [3]


def test_weights_alone_can_be_taken_from_checkpoints_and_other_safetensors_files(tmp_path: Path) -> None:
    expected = train(tmp_path / "saved", save_interval="1ep")
    theirs = tmp_path / "theirs.safetensors"
    save_file(expected, theirs)
    for path in (tmp_path / "saved" / "ep3-ba15-rank0.safetensors", tmp_path / "saved", theirs):
        with make(None, load_path=path, load_weights_only=True) as trainer:
            assert same(weights(trainer), expected)
            assert int(trainer.state.timestamp.batch) == 0


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    train(tmp_path, max_duration="1ep", algorithms=None)
    path = tmp_path / "ep0-ba5-rank0.safetensors"

    def load(wrong: Path = path, **arguments: Any) -> None:
        make(None, load_path=wrong, **({"algorithms": None} | arguments))

    def load_into(net: nn.Module, optimizer: type[torch.optim.Optimizer]) -> None:
        data = DataLoader(Augmented(26), batch_size=6)
        optimizers = optimizer(net.parameters(), lr=0.1)  # type: ignore[call-arg]
        Trainer(Classifier(net), data, None, optimizers, load_path=path, publish=False, progress_bar=False)

    with pytest.raises(CheckpointError, match="AdamW"):
        load_into(make(None).state.model.module, torch.optim.SGD)
    with pytest.raises(CheckpointError, match=r"\(16, 8\).*\(5, 8\)"):
        load_into(nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 4)), torch.optim.AdamW)
    with pytest.raises(CheckpointError, match="TimeAwareScheduler"):
        load(schedulers=None)
    with pytest.raises(CheckpointError, match="Momentum"):
        load(algorithms=Momentum())
    torch.save({}, tmp_path / "theirs.pt")
    for wrong in (tmp_path / "nothing.safetensors", tmp_path / "theirs.pt"):
        with pytest.raises(CheckpointError):
            load(wrong)


@pytest.mark.parametrize(
    "arguments",
    [
        {"autoresume": True, "run_name": "r"},
        {"autoresume": True, "folder": "saved"},
        {"folder": "saved", "save_filename": "always.safetensors"},
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        make(**({"folder": None} | arguments))


def of_version_2() -> bytes:
    text = '{"version": 2}'
    return save({}, {"offloop": text, "offloop_crc32": f"{zlib.crc32(text.encode()):08x}"})


def flip(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place:][1:]


@pytest.mark.parametrize(
    "damage",
    [lambda content: flip(content, len(content) - 1), lambda content: of_version_2()],
    ids=["tensor", "version"],
)
def test_a_training_does_not_start_where_no_checkpoint_can_be_read(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    arguments: dict[str, Any] = {"run_name": "r", "autoresume": True, "save_num_checkpoints_to_keep": 2}
    train(tmp_path, max_duration="8ba", **arguments)
    damaged = {path.name: damage(path.read_bytes()) for path in tmp_path.glob("ep*")}
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
    assert len(damaged) == 2

    with pytest.raises(CheckpointError, match=r"ep1-ba8-rank0\.safetensors"):
        make(tmp_path, **arguments)
    with pytest.raises(CheckpointError):
        make(None, load_path=tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("ep*")} == damaged

    anew = train(tmp_path, max_duration="9ba", from_scratch=True, **arguments)
    assert same(anew, train(None, max_duration="9ba"))
    assert {name: (tmp_path / f"{name}.unreadable").read_bytes() for name in damaged} == damaged
    # The same command, after a preemption.
    with make(tmp_path, from_scratch=True, **arguments) as trainer:
        assert int(trainer.state.timestamp.batch) == 9


@pytest.mark.parametrize(
    ("called", "more"), [("saved", {"load_weights_only": True, "save_overwrite": True}), ("linked", {})]
)
def test_unreadable_checkpoints_of_a_folder_to_load_are_kept(
    tmp_path: Path, called: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved = tmp_path / "saved"
    train(saved, max_duration="8ba")
    path = saved / "ep1-ba8-rank0.safetensors"
    path.write_bytes(damaged := flip(path.read_bytes(), path.stat().st_size - 1))
    Path("linked").symlink_to("saved")
    train(saved, max_duration="9ba", load_path=called, **more)
    assert Path(f"{path}.unreadable").read_bytes() == damaged
    assert (saved / "ep1-ba9-rank0.safetensors").exists()


@pytest.mark.slow
def test_trainings_that_branch_from_the_checkpoint_of_another_run_are_runs_of_their_own(
    tmp_path: Path, runs_dir: Path
) -> None:
    def train_as(run_name: str, **more: Any) -> tuple[str, int]:
        trainer = fitted(run_name=run_name, publish=True, save_folder=tmp_path / "{run_name}", **more)
        run = find_run(trainer.state.run_name)
        return run.name, run.last.number

    assert train_as("base", max_duration="1ep") == ("base", 1)
    base = tmp_path / "base"
    assert [train_as("branch", max_duration="2ep", load_path=base) for _ in range(2)] == [
        ("branch", 1),
        ("branch-2", 1),
    ]
    branched = tmp_path / "branch-2"
    assert train_as("branch", max_duration="3ep", load_path=branched) == ("branch-2", 2)
    assert train_as("other", max_duration="2ep", load_path=base, autoresume=True) == ("other", 1)
    assert train_as("other", max_duration="3ep", load_path=base, autoresume=True) == ("other", 2)
