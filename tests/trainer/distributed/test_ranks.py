"""Training on several ranks, in processes that torchrun starts."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import fill_once, run_ranks
from gold import gold_data
from helpers import wait_for
from hypothesis import given
from hypothesis import strategies as st
from paths import SUPPORT
from ranks_jobs import BATCHES_BEFORE_THE_END, same_result, train_on
from torch.utils.data import DataLoader, TensorDataset
from training import Act, fitted

from offloop.bus.errors import ConfigurationError
from offloop.bus.recording.recording import Recording
from offloop.bus.runs.directory import find_run
from offloop.bus.types.demand import BASE_EVENTS
from offloop.bus.types.event import Event
from offloop.trainer import RankBatchSampler, Trainer
from offloop.trainer.distributed.ranks import local_world_size, rank_and_world_size
from offloop.trainer.tasks import find_task


def torchrun(*command: str | Path) -> "subprocess.CompletedProcess[str]":
    """Start two ranks and waits for them."""
    # The processes of this one are told their place, not that of a rank in which the tests might run.
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=150,
        env=environment,
    )


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


def close_to(expected: Any) -> Any:
    """Compare with whatever is nested in lists and maps, within the error of float32 sums in another order."""
    if isinstance(expected, dict):
        return {name: close_to(value) for name, value in expected.items()}
    if isinstance(expected, list) and expected and isinstance(expected[0], list | dict):
        return [close_to(value) for value in expected]
    return pytest.approx(expected, rel=1e-5, abs=1e-5)


# -- the same training, whatever the number of ranks ------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of two ranks, of which the second is killed at last."""

    def fill(folder: Path) -> None:
        alone = train_on(folder / "checkpoints" / "one")
        (folder / "alone.json").write_text(json.dumps(alone))
        jobs = ("agreement", "checkpoints", "commanded", "judged", "killed")
        first, second = run_ranks("ranks_jobs", folder, f"import ranks_jobs; ranks_jobs.run({jobs!r}, {str(folder)!r})")
        assert (first.exit_code, second.exit_code) == (1, -signal.SIGKILL), first.stderr + second.stderr
        (folder / "stderr").write_text(first.stderr)

    return fill_once(tmp_path_factory.getbasetemp(), "ranks", fill)


@pytest.fixture(scope="module")
def agreed(finished: Path) -> list[dict[str, Any]]:
    return results(finished / "agreement")


@pytest.mark.slow
def test_two_ranks_train_to_the_results_of_one(agreed: list[dict[str, Any]]) -> None:
    alone = same_result()
    for kind, expected in alone.items():
        assert expected["counts"] == [3, 15, 81, 0]
        assert len(expected["losses"]) == len(expected["train_metrics"]) == 15
        assert set(expected["eval_metrics"]["eval_a"]) == {"MulticlassAccuracy", "CrossEntropy"}
        assert set(expected["parts"][-1]) == ({"classes", "outputs"} if kind == "parts" else set())
        for found in agreed:
            assert found["same"][kind] == close_to(expected), kind
    assert alone["clipping"]["weights"] != alone["plain"]["weights"]


@pytest.mark.slow
def test_the_first_rank_s_weights_are_the_ones_that_are_trained(agreed: list[dict[str, Any]]) -> None:
    assert agreed[0]["different weights"] == agreed[1]["different weights"]


@pytest.mark.slow
def test_time_is_the_first_rank_s(agreed: list[dict[str, Any]]) -> None:
    for found in agreed:
        assert found["three seconds"]["counts"] == [2, 12, 66, 12]


@pytest.mark.slow
def test_one_rank_can_stop_the_training(agreed: list[dict[str, Any]]) -> None:
    for found in agreed:
        assert found["stop in a batch"]["counts"][1] == 7
        assert found["stop after a batch"]["counts"][1] == 7
        assert found["stop after evaluation"]["counts"] == [1, 5, 27, 0]
        assert found["stop after evaluation"]["stopped"]


@pytest.mark.slow
def test_a_distributed_sampler_gets_the_epoch(agreed: list[dict[str, Any]]) -> None:
    epochs = [[*first, *second] for first, second in zip(*(found["orders"] for found in agreed), strict=True)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(8))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.slow
def test_data_that_is_not_divided_among_the_ranks_is_refused(agreed: list[dict[str, Any]]) -> None:
    cases = ("plain loader", "plain evaluation", "other ranks", "lengths", "seeds", "parts", "stream")
    for found in agreed:
        assert [found[case] for case in cases if found[case] == "no error"] == []
        assert "1 of 2 ranks came to the end of their data" in found["stream"]


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_resume_as_if_not_interrupted(finished: Path) -> None:
    folder, alone = finished / "checkpoints", json.loads((finished / "alone.json").read_text())
    first, second = results(folder)
    for name in ("whole", "from batch 3", "from batch 5"):
        # Bitwise: JSON gives back the very float that was written.
        assert first[name] == second[name] == first["whole"], name
    assert first["whole"] != alone, "each rank draws noise of its own"
    assert first["random"] != second["random"]
    assert first["from the folder"] == second["from the folder"] != first["whole"]

    # With another number of ranks the noise is another one, and the training goes on all the same.
    assert first["from one rank"] == second["from one rank"] != alone
    assert train_on(None, folder / "whole" / "ep0-ba3-rank0.safetensors") != alone

    saved = [f"ep{(batch > 5) * 1}-ba{batch}-rank0.safetensors" for batch in range(1, 11)]
    assert {path.name for path in (folder / "whole").iterdir()} == {*saved, "latest-rank0.safetensors"}

    # A signal to the second rank has ended both after the batch at hand, with one checkpoint.
    assert first["interrupted"]
    assert second["interrupted"]
    assert {path.name for path in (folder / "stopped").iterdir()} == {*saved[:4], "latest-rank0.safetensors"}
    assert find_run("r", folder / "runs").status == "stopped"


# -- the stream -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_publish_into_one_recording_and_callbacks_see_the_first(tmp_path: Path) -> None:
    done = torchrun(SUPPORT / "ranks_jobs.py", "published", tmp_path)
    folder = tmp_path / "published"
    first, second = results(folder)
    good = find_run("good", folder / "runs")
    assert good.status == "finished"
    assert [path.name for path in good.path.glob("*.mcap")] == ["recording-1.mcap"]
    snapshots = list(Recording(good.recording))
    counts = [Counter(one.event for one in snapshots if one.rank == rank) for rank in (0, 1)]
    assert counts[0] == counts[1]
    assert set(counts[0]) <= BASE_EVENTS
    assert counts[0][Event.BATCH_END] == 15
    for rank, found in enumerate((first, second)):
        ends = [one for one in snapshots if one.rank == rank and one.event is Event.BATCH_END]
        assert [one.loss for one in ends] == found["losses"] == first["losses"]
        assert [one.train_metrics for one in ends] == found["train_metrics"] == first["train_metrics"]
        assert ends[-1].timestamp.sample == 81
    logged = [json.loads(line) for line in (good.path / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in logged if "time/train" in one] == list(range(1, 16))

    # The second run ends with an error on the second rank, which torchrun and the record name.
    assert done.returncode == 1
    *_, last, _rule = done.stderr.splitlines()
    assert last.strip() == "ValueError: the second rank has had enough"
    assert "RankError: rank 1 ended with ValueError: the second rank has had enough, so rank 0 can" in done.stderr
    assert "terminate called" not in done.stderr
    bad = find_run("bad", folder / "runs")
    assert bad.status == "failed"
    assert "ValueError: the second rank has had enough" in str(bad.last.error)


@pytest.mark.slow
def test_commands_take_effect_on_all_ranks_at_the_same_batch(finished: Path) -> None:
    folder = finished / "commanded"
    first, second = results(folder)
    outcomes = json.loads((folder / "outcomes.json").read_text())
    assert [error for _, _, error in outcomes] == [None] * 4
    set_at, paused_at, resumed_at, stopped_at = (batch for _, batch, _ in outcomes)
    assert set_at <= stopped_at  # a stop also takes effect within the next batch
    assert paused_at == resumed_at
    assert first["counts"][1] == second["counts"][1] == stopped_at
    assert first["weights"] == second["weights"]
    for one in (first, second):
        assert all(rate == (0.1 if int(batch) <= set_at else 0.025) for batch, rate in one["lr_by_batch"].items())


@pytest.mark.slow
def test_ranks_that_wait_for_a_consumer_stop_at_the_batch_that_it_decides(finished: Path) -> None:
    first, second = results(finished / "judged")
    assert first["counts"][1] == second["counts"][1] == 7
    assert first["weights"] == second["weights"]


@pytest.mark.slow
def test_when_a_rank_is_killed_the_other_one_fails(finished: Path) -> None:
    folder = finished
    assert "RankError: another rank has ended (" in (folder / "stderr").read_text()
    runs_dir = folder / "killed" / "runs"
    wait_for(lambda: not find_run("r", runs_dir).live, "the end of the run")
    run = find_run("r", runs_dir)
    assert run.status == "lost"
    ends = Counter(one.rank for one in Recording(run.recording) if one.event is Event.BATCH_END)
    assert ends[0] == BATCHES_BEFORE_THE_END


@pytest.mark.slow
def test_the_command_trains_on_ranks_as_on_one_and_speaks_once(
    runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = """
import os, sys
os.dup2(os.open("out-" + os.environ["RANK"], os.O_CREAT | os.O_WRONLY), 1)
sys.argv[1:] = ["digits", "--seed=3", "--device=cpu", "-d12ba", "--run-name=r", "--save-folder=ck"]
from offloop.trainer.cli.main import main
main()
"""
    first, second = run_ranks("offloop.trainer.tasks.digits", tmp_path, code)
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    info = find_run("r")
    begun, recording, checkpoints = Path("out-0").read_text().splitlines()
    assert begun.startswith("run r: ")
    assert recording == f"recording: {info.recording}"
    assert checkpoints.startswith("checkpoints: ck; ")
    assert sum(line.startswith("done: ") for line in first.stderr.splitlines()) == 1
    assert (Path("out-1").read_text(), "done: " in second.stderr) == ("", False)
    snapshots = list(Recording(info.recording))
    torch.manual_seed(3)
    settings = {"max_duration": "12ba", "seed": 3, "publish": False, "progress_bar": False, "device": "cpu"}
    losses: list[float] = []
    note = Act(lambda _event, state, _logger: losses.append(float(state.total_loss or 0)), Event.BATCH_END)
    with Trainer(**(find_task("digits").arguments() | settings), algorithms=note) as trainer:
        trainer.fit()
    for rank in (0, 1):
        ends = [one for one in snapshots if one.rank == rank and one.event is Event.BATCH_END]
        assert [one.loss for one in ends] == pytest.approx(losses, rel=1e-5)
    assert snapshots[-1].eval_metrics["eval"] == pytest.approx(trainer.state.eval_metric_values["eval"], rel=1e-5)


def test_one_process_has_no_process_group() -> None:
    trainer = fitted()
    assert trainer.state.world_size == 1
    assert not torch.distributed.is_initialized()


# -- who trains on what -----------------------------------------------------------------------------------------------


def parts(samples: int, batch_size: int, ranks: int, epoch: int = 0, **options: Any) -> list[list[list[int]]]:
    """Return the batches of an epoch, of each the ranks' parts."""
    samplers = [
        RankBatchSampler(range(samples), batch_size, rank=rank, num_replicas=ranks, **options) for rank in range(ranks)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == len(sampler)
    return [list(batch) for batch in zip(*samplers, strict=True)]


@given(
    samples=st.integers(0, 60),
    ranks=st.integers(1, 5),
    more=st.integers(0, 8),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 1000),
)
def test_the_ranks_parts_make_up_the_batches_of_one(
    samples: int, ranks: int, more: int, shuffle: bool, drop_last: bool, seed: int, epoch: int
) -> None:
    options = {"shuffle": shuffle, "drop_last": drop_last, "seed": seed}
    size = ranks + more
    whole = [batch for (batch,) in parts(samples, size, 1, epoch, **options)]
    divided = parts(samples, size, ranks, epoch, **options)
    if len(whole) > len(divided):
        # Every rank gets at least one sample of each batch.
        assert len(whole.pop()) < ranks
    assert [sorted(chain(*batch)) for batch in divided] == [sorted(batch) for batch in whole]
    assert all(max(map(len, batch)) - min(map(len, batch)) <= 1 and min(map(len, batch)) > 0 for batch in divided)
    assert all(len(batch) == size for batch in (whole if drop_last else whole[:-1]))
    seen = list(chain(*whole))
    assert len(set(seen)) == len(seen)
    assert len(seen) >= (samples // size * size if drop_last else samples - ranks + 1)
    if not shuffle:
        assert seen == list(range(len(seen)))


def test_each_epoch_has_an_order_of_its_own_that_comes_again_with_the_seed() -> None:
    orders = [parts(40, 8, 2, epoch, shuffle=True, seed=seed) for seed in (3, 4) for epoch in (0, 1, 2)]
    assert all(one != other for index, one in enumerate(orders) for other in orders[:index])
    assert orders == [parts(40, 8, 2, epoch, shuffle=True, seed=seed) for seed in (3, 4) for epoch in (0, 1, 2)]


def test_without_a_seed_the_order_follows_from_the_trainer_s() -> None:
    def order(seed: int) -> list[int]:
        dataset = TensorDataset(*gold_data("train", 24))
        sampler = RankBatchSampler(dataset, 6, shuffle=True)
        fitted(train_dataloader=DataLoader(dataset, batch_sampler=sampler), seed=seed)
        return list(chain(*sampler))

    assert order(1) == order(1) != order(2)


def test_a_batch_has_to_be_enough_for_all_ranks() -> None:
    with pytest.raises(ConfigurationError, match="batch_size 3"):
        RankBatchSampler(range(10), 3, rank=0, num_replicas=4)


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "one"), ("RANK", "2"), ("RANK", "-1"), ("WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", "")]
)
def test_an_environment_of_no_rank_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for known, given_value in {"RANK": "0", "WORLD_SIZE": "1", name: value}.items():
        monkeypatch.setenv(known, given_value)
    with pytest.raises(ConfigurationError) as refused:
        local_world_size(1) if name == "LOCAL_WORLD_SIZE" else rank_and_world_size()
    assert (refused.value.name, refused.value.value) == (name, value)
