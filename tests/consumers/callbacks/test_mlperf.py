"""MLPerfCallback: the files and uploads of the reference, and exactly once whatever ends the consumer."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import pytest
from callback_calls import CallLog, calls_of
from consumers_stream import record_run
from helpers import strict_json
from mlperf_runs import GOLDEN, LINES, RUNS, SIZES, SYSTEM, lines_of, mlperf, stable

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers.callbacks.mlperf import MLPerfCallback


class Run:
    """The base events of the reference's job: two epochs with an evaluation each, and what is asked of the trainer."""

    def __init__(self, accuracies: tuple[float, ...] = (0.25, 0.375), attempt: int = 1) -> None:
        self.asked: list[tuple[str, Any]] = []
        self._attempt = attempt
        timestamp = Timestamp()
        self.snapshots = [self._at(Event.INIT, timestamp, system=SYSTEM), self._at(Event.FIT_START, timestamp, **SIZES)]
        for accuracy in accuracies:
            self.snapshots.append(self._at(Event.EPOCH_START, timestamp))
            for _ in range(4):
                timestamp = timestamp.advance_batch(6, 0, 1000)
                self.snapshots.append(self._at(Event.BATCH_END, timestamp))
            timestamp = timestamp.to_next_epoch()
            self.snapshots += [
                self._at(Event.EPOCH_END, timestamp),
                self._at(Event.EVAL_START, timestamp, "eval_b"),
                self._at(
                    Event.EVAL_END, timestamp, "eval_b", eval_metrics={"eval_b": {"MulticlassAccuracy": accuracy}}
                ),
            ]
        self.snapshots.append(self._at(Event.FIT_END, timestamp))

    def _at(self, event: Event, timestamp: Timestamp, label: str = "train", **fields: Any) -> Snapshot:
        return Snapshot.build(
            event,
            run_name="gold",
            attempt=self._attempt,
            time_ns=1_700_000_000_123_456_789 + self._attempt * 10**15 + int(timestamp.batch) * 10**9,
            timestamp=timestamp,
            dataloader_label=label,
            on_command=lambda name, arguments: self.asked.append((name, arguments)),
            **fields,
        )


def write(callback: MLPerfCallback, snapshots: list[Snapshot]) -> CallLog:
    try:
        return calls_of(callback, snapshots)
    finally:
        callback.post_close()


@pytest.mark.parametrize("name", RUNS)
def test_files_and_uploads_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    golden, run = GOLDEN[name], Run((0.25,) if name.endswith("_exit") else (0.25, 0.375))
    logger = write(mlperf(tmp_path, name), run.snapshots)
    assert [stable(line) for line in lines_of(tmp_path)] == golden[LINES]
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == set(golden["files"])
    expected = [
        {key: call[key] for key in ("remote_file_name", "overwrite", "event")} for call in golden["upload_file_calls"]
    ]
    assert [{key: call[key] for key in expected[0]} for call in logger.uploads] == expected
    assert {call["file_path"] for call in logger.uploads} == {str(tmp_path / path) for path in golden["files"]}
    assert [command for command, _ in run.asked] == (["stop"] if name.endswith("_exit") else [])


def test_times_are_those_of_the_events_and_lines_name_the_code_that_wrote_them(tmp_path: Path) -> None:
    run = Run()
    write(mlperf(tmp_path), run.snapshots)
    first, last = lines_of(tmp_path)[0], lines_of(tmp_path)[-1]
    assert (first["time_ms"], last["time_ms"]) == (1_701_000_000_123, 1_701_000_008_123)
    source = Path(sys.modules[MLPerfCallback.__module__].__file__ or "").read_text().splitlines()
    assert first["metadata"]["file"] == "consumers/callbacks/mlperf.py"
    assert "init_start" in source[first["metadata"]["lineno"] - 1]


def test_the_system_is_described_with_every_key_of_the_reference(tmp_path: Path) -> None:
    write(mlperf(tmp_path, host_processors_per_node=2), Run().snapshots)
    described = json.loads((tmp_path / "systems/mysys.json").read_text())
    assert sorted(described) == sorted(GOLDEN["system_description_keys"])
    assert described["host_processor_model_name"] == "Some CPU"
    assert described["host_processors_per_node"] == "2"
    assert described["host_memory_capacity"] == "64 GiB"
    assert described["accelerators_per_node"] == "0"
    assert described["system_name"] == "mysys"


def test_an_accuracy_that_is_no_number_is_a_text_in_the_files_for_mlperf(tmp_path: Path) -> None:
    write(mlperf(tmp_path), Run((math.nan, 0.375)).snapshots)
    path = next((tmp_path / "results").rglob("result_0.txt"))
    lines = [strict_json(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]
    assert [line["value"] for line in lines if line["key"] == "eval_accuracy"] == ["NaN", 0.375]


def test_a_consumer_killed_anywhere_goes_on_to_the_same_file(tmp_path: Path) -> None:
    name, snapshots = "run_target_low_exit", Run().snapshots
    write(mlperf(tmp_path / "whole", name), snapshots)
    expected = (tmp_path / "whole/results/mysys/resnet/result_0.txt").read_bytes()
    path = tmp_path / "killed/results/mysys/resnet/result_0.txt"
    for committed in range(len(snapshots)):
        path.unlink(missing_ok=True)
        killed, goes_on = mlperf(tmp_path / "killed", name), mlperf(tmp_path / "killed", name)
        calls_of(killed, snapshots[:committed])
        kept = msgpack.packb(killed.state_dict())
        written = path.stat().st_size if path.exists() else 0
        # It comes two events further, and dies in the middle of a line.
        calls_of(killed, snapshots[committed : committed + 2])
        killed.post_close()
        if path.exists() and path.stat().st_size > written:
            os.truncate(path, path.stat().st_size - 5)
        goes_on.load_state_dict(msgpack.unpackb(kept))
        write(goes_on, snapshots[committed:])
        assert path.read_bytes() == expected


PLUGIN = """
import os, pathlib, signal
from offloop.consumers import Callback
from offloop.consumers.callbacks.mlperf import MLPerfCallback

class Mine(MLPerfCallback):
    def __init__(self):
        named = {"metric_label": "eval_b", "system_name": "mysys", "submitter": "MosaicML"}
        super().__init__(os.environ["ROOT"], 0, target=0.9, **named)

class Killer(Callback):
    def batch_end(self, state, logger):
        if not pathlib.Path("killed").exists() and state.timestamp.batch == int(os.environ["KILL_AT"]):
            pathlib.Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_consumer_process_that_was_killed_writes_no_line_twice(runs_dir: Path, tmp_path: Path) -> None:
    snapshots = Run().snapshots
    write(mlperf(tmp_path / "whole"), snapshots)
    directory = record_run(runs_dir, "gold", snapshots)
    (tmp_path / "plugin.py").write_text(PLUGIN)
    command = [sys.executable, "-m", "offloop.consumers", "--replay", str(directory), "--name", "results"]
    command += ["--commit-every", "3", "--callbacks", "plugin.py:Mine,plugin.py:Killer"]
    environment = os.environ | {"ROOT": str(tmp_path / "out"), "KILL_AT": "6"}
    codes = [subprocess.run(command, cwd=tmp_path, env=environment, check=False).returncode for _ in range(2)]
    assert codes == [-signal.SIGKILL, 0]
    whole, out = (tmp_path / place / "results/mysys/resnet/result_0.txt" for place in ("whole", "out"))
    assert out.read_bytes() == whole.read_bytes()


def test_the_same_events_again_give_the_same_file_and_another_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results/mysys/resnet/result_0.txt"
    write(mlperf(tmp_path), Run().snapshots)
    once = path.read_bytes()
    write(mlperf(tmp_path), Run().snapshots)
    assert path.read_bytes() == once
    # With a target that is reached earlier there is less of it.
    write(mlperf(tmp_path, target=0.3), Run((0.375, 0.4)).snapshots)
    assert [line["key"] for line in lines_of(tmp_path)].index("run_stop") == len(lines_of(tmp_path)) - 1
    path.write_text("of somebody else\n")
    with pytest.raises(ConfigurationError):
        write(mlperf(tmp_path), Run().snapshots)
    assert path.read_text() == "of somebody else\n"


def test_a_further_attempt_appends_to_the_results_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "results/mysys/resnet/result_0.txt"
    write(mlperf(tmp_path), Run().snapshots)
    first = path.read_bytes()
    for _ in range(2):
        write(mlperf(tmp_path), Run(attempt=2).snapshots)
        assert path.read_bytes().startswith(first)
        assert len(path.read_bytes().splitlines()) == 2 * len(first.splitlines())


def test_results_that_were_changed_meanwhile_are_left_alone(tmp_path: Path) -> None:
    run, killed, goes_on = Run(), mlperf(tmp_path), mlperf(tmp_path)
    calls_of(killed, run.snapshots[:6])
    goes_on.load_state_dict(killed.state_dict())
    killed.post_close()
    (tmp_path / "results/mysys/resnet/result_0.txt").write_text("edited\n")
    with pytest.raises(ConfigurationError, match="is shorter than the"):
        write(goes_on, run.snapshots[6:])


@pytest.mark.parametrize(("code", "first"), [(0, "cache_clear"), (3, "init_start")])
def test_caches_are_cleared_before_the_run_is_said_to_begin(code: int, first: str, tmp_path: Path) -> None:
    write(mlperf(tmp_path, cache_clear_cmd=f"sh -c 'touch {tmp_path}/cleared; exit {code}'"), Run().snapshots[:1])
    assert (tmp_path / "cleared").exists()
    assert lines_of(tmp_path)[0]["key"] == first
