"""Training with weights that are spread over ranks, and the checkpoints of such trainings."""

import functools
import json
import math
import os
import pickle
import shutil
import signal
from pathlib import Path
from typing import Any

import norms_jobs
import pytest
import torch
from callback_calls import CallLog
from forked import fill_once, run_ranks
from safetensors import safe_open
from sharding_jobs import DIES_AT, LAST, comparable, fitted, flip_last_byte, random_training, weights
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from training import Act, gold_trainer

from offloop.bus import Event, Recording
from offloop.bus.errors import CheckpointError, ConfigurationError
from offloop.bus.hosts.windows import HostWindows
from offloop.bus.protocol.host_windows import HostWindow, decode_window, encode_window
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers import OptimizerMonitor
from offloop.consumers.callbacks.shards import WholeNorms
from offloop.trainer import State
from offloop.trainer.algorithms import GradientClipping
from offloop.trainer.checkpoints.folder import CheckpointFolder
from offloop.trainer.checkpoints.sharded import check_sharded, read_sharded
from offloop.trainer.distributed.sharding import check_fsdp_config

pytestmark = pytest.mark.slow

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results and checkpoints of two ranks, of which the second is killed at last."""

    def fill(folder: Path) -> None:
        first, second = run_ranks("sharding_jobs", folder, f"import sharding_jobs; sharding_jobs.main({str(folder)!r})")
        assert (first.exit_code, second.exit_code) == (1, -signal.SIGKILL), first.stderr + second.stderr

    return fill_once(tmp_path_factory.getbasetemp(), "sharding", fill)


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Return the weights that one process ends with."""
    return weights(fitted(comparable()))


@pytest.fixture
def saved(folder: Path, tmp_path: Path) -> Path:
    """Return a sharded checkpoint of one's own, of the end of the training."""
    return shutil.copytree(folder / "saved" / LAST, tmp_path / LAST)


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(values), rtol=0, atol=tolerance)


# -- training ---------------------------------------------------------------------------------------------------------


def test_sharded_weights_come_to_the_same_as_on_one_rank(found: Found, alone: dict[str, Any]) -> None:
    for rank in found:
        assert len(rank["same"]) == 4
        for result in rank["same"].values():
            assert_close(result, alone)


def test_each_rank_keeps_its_part_of_weights_and_of_the_optimizer_s_averages(found: Found) -> None:
    for kind in ("weights", "averages"):
        parts = [rank["sizes"][kind] for rank in found]
        assert sum(parts) == found[0]["sizes"]["all"]
        assert max(parts) < 0.6 * sum(parts)


def test_buffers_are_the_first_rank_s_as_with_ddp(found: Found) -> None:
    whole, sharded = (found[0]["resumed"][how][0] for how in ("whole", "sharded"))
    assert any(name.endswith("running_mean") for name in whole)
    assert_close(sharded, whole)


def test_a_weight_in_two_places_stays_one(found: Found) -> None:
    assert found[0]["tied"]["is one"]
    whole, sharded = found[0]["tied"]["weights"]
    assert_close(sharded, whole)


def test_ranks_with_unequal_numbers_of_batches_are_evaluated_together(found: Found) -> None:
    assert [rank["evaluated"]["predicted"] for rank in found] == [4, 2]
    for rank in found:
        assert rank["evaluated"]["sharded"] == pytest.approx(rank["evaluated"]["whole"])


def test_after_an_evaluation_a_change_of_the_weights_is_seen(found: Found) -> None:
    assert [rank["evaluated"]["after a change"] for rank in found] == [[0.0] * 4, [0.0] * 2]


# -- norms -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return the fields of norms of four ranks, for several layouts of the weights."""

    def fill(folder: Path) -> None:
        for one in run_ranks("norms_jobs", folder, f"import norms_jobs; norms_jobs.layouts({str(folder)!r})", 4):
            assert one.exit_code == 0, one.stderr

    folder = fill_once(tmp_path_factory.getbasetemp(), "norms", fill)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(4)]


def whole(of_ranks: Found, layout: str, field: str) -> Any:
    """Return a field of norms as consumers add it up, from the events of all ranks."""
    norms = WholeNorms(field)
    ranks = [
        Snapshot.build(Event.BATCH_END, rank=rank, timestamp=Timestamp(batch=1), **{field: one[layout]["found"][field]})
        for rank, one in enumerate(of_ranks)
    ]
    found = [norms.whole(ranks[rank]) for rank in (2, 0, 3, 1)]
    [summed] = [one for one in found if one is not None]
    return summed


LAYOUTS = ["fsdp", "hsdp", "mixed_precision", "partly", "tensor_parallel", "two_dimensions"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_of_shards_add_up_to_those_of_the_whole_weights(of_ranks: Found, layout: str) -> None:
    close = functools.partial(pytest.approx, rel=1e-5, abs=1e-9)
    for rank in of_ranks:
        expected = rank[layout]["expected"]
        for field in ("gradient_norms", "parameter_norms", "moment_norms", "update_norms"):
            assert whole(of_ranks, layout, field) == close(expected[field])
        for field in ("gradient_histograms", "parameter_histograms"):
            # With mixed precision, the sums of gradients are rounded elsewhere.
            assert whole(of_ranks, layout, field) == expected[field]
        for field in ("gradient_norm", "parameter_norm"):
            assert whole(of_ranks, layout, field) == close(math.hypot(*expected[f"{field}s"].values()))
        kinds = {"grad": "gradient_norms", "moment": "moment_norms", "param": "parameter_norms"}
        reported = {
            f"l2_norm/{kind}/{name}": norm for kind, field in kinds.items() for name, norm in expected[field].items()
        }
        reported["l2_norm/grad/global"] = math.hypot(*expected["gradient_norms"].values())
        assert whole(of_ranks, layout, "optimizer_norms") == close(reported)
    if layout != "mixed_precision":
        alone = norms_jobs.norms_of(lambda _: None)["found"]
        assert whole(of_ranks, layout, "gradient_norms") == close(alone["gradient_norms"])
        assert whole(of_ranks, layout, "update_norms") == pytest.approx(alone["update_norms"], rel=1e-4)


def test_of_shards_on_several_hosts_windows_have_the_norm_of_all_gradients(of_ranks: Found) -> None:
    fields = [one["fsdp"]["found"]["gradient_norm"] for one in of_ranks]

    def windows(host: int, norms: list[Any]) -> list[HostWindow]:
        ranks = (2 * host, 2 * host + 1)
        made, found = HostWindows(f"node{host}", 1, ranks, 4, 2), []
        for batch in (1, 2):
            for rank in ranks:
                # Of the first batch there is only a part, as at a request.
                norm = {} if rank == 3 and batch == 1 else {"gradient_norm": norms[rank]}
                time_ns, timestamp = batch * 2 * 10**9, Timestamp(batch=batch)
                end = Snapshot.build(Event.BATCH_END, rank=rank, timestamp=timestamp, time_ns=time_ns, **norm)
                found += made.take(end)
        return [decode_window(encode_window(one)) for one in found + made.finish()]

    def logged(norms: list[Any]) -> list[tuple[int, float]]:
        monitor, logger = OptimizerMonitor(), CallLog()
        logger.begin(Snapshot.build(Event.BATCH_END))
        for host in (1, 0):
            monitor.host_windows(windows(host, norms), logger)
        return [(step, metrics["l2_norm/grad/global"]) for step, _, metrics in logger.calls]

    expected = math.hypot(*of_ranks[0]["fsdp"]["expected"]["gradient_norms"].values())
    assert logged(fields) == [(2, pytest.approx(expected, rel=1e-5))]
    [(_, norm)] = logged([*fields[:3], fields[3] | {"shards": math.inf}])
    assert math.isnan(norm)
    # A host that reports only one of its ranks.
    assert logged([*fields[:3], None]) == []


def test_norms_that_cannot_be_added_up_are_refused_with_the_reason(of_ranks: Found) -> None:
    for rank in of_ranks:
        stages, unfinished = rank["pipeline"]["found"], rank["unfinished"]["found"]
        assert "on_demand" not in stages
        assert "gradient_norm: no parameter is spread over all 4 ranks" in stages["not_sent"]
        assert not unfinished.keys() & {"gradient_norm", "gradient_norms", "optimizer_norms", "gradient_histograms"}
        assert "gradient_norm: its tensors are not yet added up over the ranks" in unfinished["not_sent"]


def test_a_batch_of_which_a_killed_rank_has_no_norms_is_left_out(folder: Path) -> None:
    expected: dict[int, dict[str, float]] = {}

    def note(_: Event, state: State, __: object) -> None:
        gradients = {name: float(one.grad.norm()) for name, one in state.model.named_parameters()}
        norms = {f"l2_norm/grad/{name}": norm for name, norm in gradients.items()}
        expected[int(state.timestamp.batch)] = norms | {"l2_norm/grad/global": math.hypot(*gradients.values())}

    fitted(comparable(algorithms=[GradientClipping("norm", 0.2), Act(note, Event.BATCH_END)]))
    rows = [json.loads(line) for line in (folder / "killed" / "rows.jsonl").read_text().splitlines()]
    found = {
        row["step"]: {name: value for name, value in row.items() if name.startswith("l2_norm/")}
        for row in rows
        if "l2_norm/grad/global" in row
    }
    assert list(found) == list(range(1, DIES_AT))
    for batch, norms in found.items():
        assert norms == pytest.approx(expected[batch], rel=1e-5)
    recorded = Recording(folder / "killed" / "sharded").snapshots([Event.BATCH_END])
    assert {one.rank for one in recorded if one.timestamp.batch == DIES_AT} == {0}


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_training_resumes_from_either_kind_of_checkpoint_as_if_not_interrupted(found: Found) -> None:
    for rank in found:
        for how in ("sharded from sharded", "sharded from whole", "whole from sharded"):
            assert rank["resumed"][how] == rank["resumed"][how.split()[-1]], how
        assert rank["resumed"]["latest"] == {"load_path": 9, "autoresume": 9}


def test_a_checkpoint_is_a_folder_of_safetensors_files_without_pickle(folder: Path) -> None:
    path = folder / "saved" / LAST
    files = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    assert files == ["shards/rank0.safetensors", "shards/rank1.safetensors", "training.safetensors"]
    names = set()
    for file in files:
        with pytest.raises((pickle.UnpicklingError, ValueError, EOFError, LookupError, ImportError, AttributeError)):
            pickle.loads((path / file).read_bytes())
        with safe_open(path / file, framework="pt") as content:
            if file.startswith("shards"):
                names.update(content.keys())
    weight_names = {f"rows.model.net.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")}
    averages = {f"{number}.{kind}" for number in range(4) for kind in ("exp_avg", "exp_avg_sq")}
    assert names == weight_names | {f"rows.optimizers.AdamW.state.{name}" for name in averages}


@pytest.mark.parametrize("world_size", [3, 64])
def test_any_number_of_ranks_reads_its_rows(saved: Path, world_size: int) -> None:
    whole = read_sharded(saved)["model"]
    parts = [read_sharded(saved, "model", rank, world_size)["model"] for rank in range(world_size)]
    for name, tensor in whole.items():
        chunks = tensor.chunk(world_size)
        assert [len(part[name]) for part in parts[: len(chunks)]] == [len(chunk) for chunk in chunks]
        assert torch.equal(torch.cat([part[name] for part in parts]), tensor)


def test_the_folder_keeps_the_requested_number_of_checkpoints_and_a_link_to_the_latest(folder: Path) -> None:
    assert sorted(path.name for path in (folder / "sharded").iterdir()) == [
        "ep2-ba8-rank0.safetensors",
        "ep3-ba9-rank0.safetensors",
        "latest-rank0.safetensors",
    ]


def test_one_process_takes_the_weights_of_several(folder: Path, alone: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        random_training(load_path=folder / "saved" / LAST)
    trainer = gold_trainer(load_path=folder / "saved" / LAST, load_weights_only=True)
    assert trainer.state.timestamp.batch == 0
    assert_close(weights(trainer), alone)


def test_one_process_resumes_the_training_of_several(folder: Path, alone: dict[str, Any]) -> None:
    trainer = comparable(load_path=folder / "saved" / "ep1-ba5-rank0.safetensors")
    assert trainer.state.timestamp.batch == 5
    trainer.fit()
    assert_close(weights(trainer), alone)


def test_a_checkpoint_replaces_one_of_the_same_name(found: Found, folder: Path) -> None:
    assert found[0]["saved again"]["found"] == found[0]["saved again"]["expected"]
    assert list(folder.glob(".*")) == []


def test_a_damaged_shard_is_noticed_and_the_older_checkpoint_is_the_latest(folder: Path, saved: Path) -> None:
    older = saved.with_name("ep2-ba10-rank0.safetensors")
    shutil.copytree(folder / "saved" / older.name, older)
    checkpoints = CheckpointFolder(saved.parent)
    assert checkpoints.latest() == saved
    flip_last_byte(saved / "shards" / "rank1.safetensors")
    with pytest.raises(CheckpointError, match=r"shards/rank1\.safetensors is damaged: the checksum of"):
        read_sharded(saved)
    assert checkpoints.latest() == older
    assert list(checkpoints.unreadable) == [saved]


def test_a_checkpoint_with_a_file_missing_or_cut_short_is_refused(saved: Path) -> None:
    (saved / "shards" / "rank1.safetensors").rename(saved / "away")
    for read in (read_sharded, check_sharded):
        with pytest.raises(CheckpointError, match="rank1"):
            read(saved)
    (saved / "away").rename(saved / "shards" / "rank1.safetensors")
    file = saved / "training.safetensors"
    for size in (file.stat().st_size - 1, 100, 0):
        os.truncate(file, size)
        with pytest.raises(CheckpointError, match=r"training\.safetensors"):
            gold_trainer(load_path=saved)
    file.unlink()
    with pytest.raises(CheckpointError):
        gold_trainer(load_path=saved)


def test_a_kill_leaves_no_part_of_a_checkpoint(saved: Path) -> None:
    killed = [saved.with_name(f".{name}.0123abcd.tmp") for name in (LAST, f"{LAST}.shards")]
    for path in killed:
        shutil.copytree(saved, path)
    checkpoints = CheckpointFolder(saved.parent, keep=1)
    checkpoints.adopt(saved)
    assert checkpoints.latest() == saved
    checkpoints.clean()
    assert [*saved.parent.iterdir()] == [saved]
    path = checkpoints.save(Timestamp(batch=16), {})
    assert sorted(saved.parent.iterdir()) == [path, saved.with_name("latest-rank0.safetensors")]


# -- what is refused --------------------------------------------------------------------------------------------------


def test_every_rank_reports_what_is_wrong(found: Found) -> None:
    for rank in found:
        assert {what: error.partition(":")[0] for what, error in rank["refused"].items()} == {
            "unknown class": "ConfigurationError",
            "number as a weight": "ConfigurationError",
            "not writable": "CheckpointError",
            "none can be read": "CheckpointError",
            "from scratch": "no error",
            "damaged": "CheckpointError",
            "another model": "CheckpointError",
        }
        assert "belongs to another model" in rank["refused"]["another model"]


@pytest.mark.parametrize(
    "config",
    ["FULL_SHARD", {"strategy": "FULL"}, {"shard": "Block"}, {"reshard_after_forward": "yes"}, {"mp_policy": "bf16"}],
)
def test_a_wrong_fsdp_config_is_refused_and_policies_of_torch_are_accepted(config: Any) -> None:
    with pytest.raises(ConfigurationError, match="fsdp_config"):
        gold_trainer(fsdp_config={})  # on one rank
    with pytest.raises(ConfigurationError, match="fsdp_config"):
        check_fsdp_config(config, world_size=2)
    config = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16), "offload_policy": OffloadPolicy(), "shard": None}
    assert check_fsdp_config(config, world_size=2) == config
