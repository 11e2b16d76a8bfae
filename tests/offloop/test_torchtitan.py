"""torchtitan's own structured logger, in two processes as torchrun starts them: a run and an actor."""

from pathlib import Path
from typing import Any

import pytest
from attached_runs import snapshots_of
from forked import Program, run_forked
from paths import FOLDERS

import offloop
from offloop.bus import Event, Recording
from offloop.bus.runs.directory import find_run
from offloop.bus.types.actor import is_actor

TRAINING = """
import asyncio, logging, os, time
from pathlib import Path
from torchtitan.observability import structured_logger as sl

folder, rank, first = Path(os.environ["FOLDER"]), int(os.environ["RANK"]), int(os.environ["FIRST"])
sl.init_structured_logger(source="training", output_dir=str(folder))
if rank == 0:
    with sl.log_trace_span("Trainer.<locals>.Config.build"):
        pass
sl.log_trace_instant("training_start")
deadline = time.monotonic() + 150
(handler,) = logging.getLogger("torchtitan.structured_logger").handlers or [None]
while rank and handler._run is None and time.monotonic() < deadline:
    time.sleep(0.05)
    sl.log_trace_instant("waiting")
for step in range(first, first + 3):
    sl.set_step(step, relative_step=step - first + 1)
    with sl.log_trace_span("step"):
        with sl.log_trace_span("fwd_bwd"):
            sl.log_trace_scalar({"local_valid_tokens": 10 * step})
try:
    with sl.log_trace_span("eval"):
        raise ValueError("no data")
except ValueError:
    pass

@sl.log_trace_span("rollout")
async def rollout(seconds):
    await asyncio.sleep(seconds)

async def rollouts():
    await asyncio.gather(rollout(0.02), rollout(0.01))

asyncio.run(rollouts())
if rank == 0:
    while not (folder / "left").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
else:
    (folder / "left").touch()
"""

pytestmark = [pytest.mark.slow, pytest.mark.needs("lowest")]


def program(folder: Path, rank: int = 0, ranks: int = 1, first: int = 1, **more: str) -> Program:
    folder.mkdir(exist_ok=True)
    if ranks == 1:
        (folder / "left").touch()
    environment = {"FOLDER": str(folder), "RANK": str(rank), "FIRST": str(first)}
    return Program(TRAINING, environment | {"TITAN_STRUCT_LOGGER_HANDLERS": "offloop.torchtitan.register"} | more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all trainings of this file have left what they did."""
    folder = tmp_path_factory.mktemp("titan")
    runs = {"OFFLOOP_RUNS_DIR": str(folder / "runs")}
    (folder / "file").touch()
    programs = [
        *(program(folder / "out put", rank, 2, **runs) for rank in (0, 1)),
        program(folder / "resumed", first=101, **runs),
        program(folder / "disabled", OFFLOOP_RUNS_DIR=str(folder / "none"), OFFLOOP_DISABLED="1"),
        program(folder / "broken", OFFLOOP_RUNS_DIR=str(folder / "file" / "runs")),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(FOLDERS["lowest"]))
        ended = run_forked("torchtitan.observability.structured_logger", folder, programs)
    assert [one.exit_code for one in ended] == [0] * len(ended), [one.stderr for one in ended]
    return folder


@pytest.fixture(autouse=True)
def _runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOOP_RUNS_DIR", str(folder / "runs"))


def spans_of(snapshots: list[Any]) -> list[tuple[str, str | None]]:
    """Names of spans and of the spans around them, in the order of their ends."""
    found = [one for one in snapshots if one.event.is_custom and "span" in one.fields]
    names = {one.fields["span"][0]: one.event.value[1:] for one in found}
    return [(one.event.value[1:], names.get(one.fields["span"][1])) for one in found]


def test_steps_are_batches_and_spans_and_scalars_of_all_ranks_are_recorded(folder: Path) -> None:
    assert all("detached" not in (folder / f"said-{rank}.txt").read_text() for rank in (0, 1))
    run = find_run("out-put")
    assert run.status == "finished"
    assert run.last.info["framework"] == {"name": "torchtitan", "version": "0.3.0"}
    training = snapshots_of("out-put")
    assert [int(one.timestamp.batch) for one in training if one.event is Event.BATCH_END] == [1, 2, 3]
    steps = [("fwd_bwd", "step"), ("step", None)] * 3
    assert spans_of(training) == [("build", None), *steps, ("eval", None), ("rollout", None), ("rollout", None)]
    by_name = {one.event.value: one for one in training if one.event.is_custom}
    assert by_name["@build"].fields["of"] == "Trainer.<locals>.Config"
    assert by_name["@eval"].fields["error"] == "ValueError"
    assert "@training_start" in by_name
    logged = [one for event in training for one in event.fields.get("logged", ())]
    assert logged == [[step - 1, {"local_valid_tokens": 10 * step}] for step in (1, 2, 3)]
    other = [one for one in Recording(run.path) if is_actor(one.rank)]
    assert spans_of(other)[-9:] == [*steps, ("eval", None), ("rollout", None), ("rollout", None)]
    frame = offloop.runs()["out-put"].metrics("training-1/local_valid_tokens")
    assert list(frame["training-1/local_valid_tokens"]) == [10, 20, 30]


def test_a_resumed_training_begins_at_its_step() -> None:
    ended = [one for one in snapshots_of("resumed") if one.event is Event.BATCH_END]
    assert [int(one.timestamp.batch) for one in ended] == [101, 102, 103]


def test_nothing_is_attached_where_offloop_is_disabled_and_errors_are_contained(folder: Path) -> None:
    assert not (folder / "none").exists()
    shown = (folder / "said-4.txt").read_text()
    assert shown.count("offloop is detached from training-0, the training continues without it") == 1
