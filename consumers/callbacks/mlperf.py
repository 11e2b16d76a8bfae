"""Result files for the MLPerf Training benchmark."""

import inspect
import json
import os
import re
import shlex
import subprocess
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from offloop.bus.errors import check_choice
from offloop.bus.printing import say
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.strict_json import plain
from offloop.bus.types.event import Event
from offloop.consumers.api.callback import Callback, CannotWorkError
from offloop.consumers.api.logger import Logger
from offloop.consumers.loggers.files import FileDestination

Benchmark = Literal["resnet", "bert"]
Division = Literal["open"]
Status = Literal["onprem", "cloud", "preview"]

# The count of the training time that a benchmark reports as its epoch_num.
_EPOCH_NUM = {"resnet": "epoch", "bert": "sample"}

# Keys of a system description that a run does not know: the submitter fills them in.
_LEFT_EMPTY = (
    "host_processor_frequency",
    "host_processor_caches",
    "host_processor_interconnect",
    "host_storage_type",
    "host_storage_capacity",
    "host_networking",
    "host_networking_topology",
    "host_memory_configuration",
    "accelerator_host_interconnect",
    "accelerator_frequency",
    "accelerator_on-chip_memories",
    "accelerator_memory_configuration",
    "accelerator_memory_capacity",
    "accelerator_interconnect",
    "accelerator_interconnect_topology",
    "cooling",
    "hw_notes",
    "sw_notes",
)

# The key of each size that the trainer publishes at FIT_START.
_SIZES = {
    "seed": "seed",
    "global_train_batch_size": "global_batch_size",
    "device_train_microbatch_size": "device_train_microbatch_size",
    "train_samples": "train_samples",
    "eval_samples": "eval_samples",
}


class MLPerfCallback(Callback):
    """Writes the files of a submission to the MLPerf Training benchmark; ``exit_at_target`` also stops the training.

    Below ``root_folder`` they are ``systems/SYSTEM.json``, which describes the machine, and
    ``results/SYSTEM/BENCHMARK/result_INDEX.txt``, with a line for the start and end of the initialisation, of each
    epoch and of each evaluation, for the accuracy of each evaluation of ``metric_label``, and a last line for the end
    of the run once the target is passed. Both are passed to ``logger.upload_file``, as ``RUN/systems/...`` at once, and
    as ``RUN/results/...`` after every epoch and evaluation.

    All times are those of the events, so a replay writes the same file. Unknown values, such as the ``submitter``, are
    left out of the results and empty in the description. A result file of another run is refused; a further attempt of
    a run appends. ``cache_clear_cmd`` is run without a shell when the consumer begins: leave it out of a replay.
    Reference: ``composer/callbacks/mlperf.py``; format: https://github.com/mlcommons/logging."""

    background: ClassVar[bool] = True
    resumes: ClassVar[bool] = False
    barrier_events: ClassVar[tuple[Event, ...]] = (Event.EVAL_END,)

    def __init__(
        self,
        root_folder: str,
        index: int,
        benchmark: Benchmark = "resnet",
        target: float = 0.759,
        division: Division = "open",
        metric_name: str = "MulticlassAccuracy",
        metric_label: str = "eval",
        submitter: str = "",
        system_name: str | None = None,
        status: Status = "onprem",
        cache_clear_cmd: str | None = None,
        host_processors_per_node: int | None = None,
        exit_at_target: bool = False,
    ) -> None:
        check_choice("benchmark", benchmark, get_args(Benchmark))
        check_choice("division", division, get_args(Division))
        check_choice("status", status, get_args(Status))
        self._root = Path(root_folder)
        self._index = index
        self._benchmark = benchmark
        self._target = target
        self._division = division
        self._metric_name = metric_name
        self._metric_label = metric_label
        self._submitter = submitter
        self._system_name = system_name
        self._status = status
        self._cache_clear_cmd = cache_clear_cmd
        self._host_processors_per_node = host_processors_per_node
        self._exit_at_target = exit_at_target
        self._file: _ResultFile | None = None
        self._written: dict[str, Any] | None = None
        self._success = False

    def state_dict(self) -> dict[str, Any]:
        if self._file is not None:
            self._written = self._file.state_dict()
        return {"system_name": self._system_name, "written": self._written, "success": self._success}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._system_name, self._success, self._written = state["system_name"], state["success"], state["written"]

    def init(self, state: Snapshot, logger: Logger) -> None:
        self._results(state, logger)

    def fit_start(self, state: Snapshot, logger: Logger) -> None:
        sizes = [(key, state.fields.get(field)) for field, key in _SIZES.items()]
        lines = [_line(state, key, value) for key, value in sizes if value is not None]
        self._write(state, logger, *lines, _line(state, "init_stop"), _line(state, "run_start"))

    def epoch_start(self, state: Snapshot, logger: Logger) -> None:
        number = self._epoch_num(state)
        self._write(
            *(state, logger, _line(state, "epoch_start", epoch_num=number)),
            _line(state, "block_start", first_epoch_num=number, epoch_count=1),
        )

    def epoch_end(self, state: Snapshot, logger: Logger) -> None:
        self._write(state, logger, _line(state, "epoch_stop", epoch_num=self._epoch_num(state)))
        self._upload_results(state, logger)

    def eval_start(self, state: Snapshot, logger: Logger) -> None:
        if state.dataloader_label == self._metric_label:
            self._write(state, logger, _line(state, "eval_start", epoch_num=self._epoch_num(state)))

    def eval_end(self, state: Snapshot, logger: Logger) -> None:
        if state.dataloader_label != self._metric_label:
            return
        number, accuracy = self._epoch_num(state), self._accuracy(state)
        reached = accuracy > self._target and not self._success
        self._write(
            *(state, logger, _line(state, "eval_stop", epoch_num=number)),
            _line(state, "eval_accuracy", accuracy, epoch_num=number),
            _line(state, "block_stop", first_epoch_num=number),
            *([_line(state, "run_stop", status="success")] if reached else []),
        )
        self._success |= reached
        if reached and self._exit_at_target:
            state.stop_training(f"mlperf: accuracy {accuracy:.4g} is above the target {self._target:g}")
        self._upload_results(state, logger)

    def post_close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def _results_path(self) -> Path:
        return self._root / "results" / str(self._system_name) / self._benchmark / f"result_{self._index}.txt"

    def _results(self, state: Snapshot, logger: Logger) -> "_ResultFile":
        if self._file is None:
            self._file = self._open(state, logger)
        return self._file

    def _open(self, state: Snapshot, logger: Logger) -> "_ResultFile":
        if self._system_name is None:
            name = str(state.fields.get("device_name") or _system(state).get("cpu") or "cpu")
            # It becomes the name of a file, and comes from the stream.
            device = re.sub(r"[^\w .+()@-]", "_", name).lstrip(".")
            self._system_name = f"{state.world_size}x{device.replace(' ', '_')}_offloop"
        if self._written is not None:
            results = _ResultFile(self._results_path)
            results.load_state_dict(self._written)
            results.open(logger.context)
            return results
        is_cleared = self._cache_clear_cmd is not None and _run(self._cache_clear_cmd)
        lines = [_line(state, key, kind="INTERVAL_START") for key in ["cache_clear"] * is_cleared + ["init_start"]]
        for key, value in (
            ("submission_benchmark", self._benchmark),
            ("submission_division", self._division),
            *([("submission_org", self._submitter)] if self._submitter else []),
            ("submission_platform", self._system_name),
            ("submission_status", self._status),
        ):
            lines.append(_line(state, key, value))
        results = _ResultFile(self._results_path, lines[0].rstrip(), append=state.attempt > 1)
        results.open(logger.context)
        results.write("".join(lines))
        path = self._root / "systems" / f"{self._system_name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plain(self._describe_system(state)), indent=4))
        logger.upload_file(f"{state.run_name}/systems/{path.name}", path)
        return results

    def _write(self, state: Snapshot, logger: Logger, *lines: str) -> None:
        results = self._results(state, logger)
        if not self._success:
            results.write("".join(lines))

    def _upload_results(self, state: Snapshot, logger: Logger) -> None:
        path = self._results_path
        logger.upload_file(f"{state.run_name}/{path.relative_to(self._root).as_posix()}", path)

    def _accuracy(self, state: Snapshot) -> float:
        metrics = state.eval_metrics.get(self._metric_label, {})
        if not isinstance(accuracy := metrics.get(self._metric_name), float | int):
            raise CannotWorkError(
                f"the evaluator {self._metric_label!r} has no metric {self._metric_name!r} that is a number: it has "
                f"{', '.join(metrics) or 'none'}; set '-o mlperf.metric_name=NAME'"
            )
        return accuracy

    def _epoch_num(self, state: Snapshot) -> int:
        number: int = getattr(state.timestamp.values, _EPOCH_NUM[self._benchmark])
        return number

    def _describe_system(self, state: Snapshot) -> dict[str, Any]:
        system = _system(state)
        memory = system.get("memory_bytes")
        accelerators = system.get("accelerators") or 0
        return {
            "submitter": self._submitter,
            "division": self._division,
            "status": self._status,
            "number_of_nodes": system.get("nodes", ""),
            "host_processors_per_node": _text(self._host_processors_per_node),
            "host_processor_model_name": _text(system.get("cpu")),
            "host_processor_core_count": _text(system.get("cpu_cores")),
            "host_processor_vcpu_count": _text(system.get("cpu_threads")),
            "host_memory_capacity": f"{memory / 2**30:.0f} GiB" if isinstance(memory, int) else "",
            "accelerators_per_node": str(accelerators),
            "accelerator_model_name": _text(state.fields.get("device_name")) if accelerators else "",
            "framework": f"PyTorch {system.get('torch', '')} and offloop {system.get('offloop', '')}",
            "other_software_stack": {
                "python_version": _text(system.get("python")),
                "cuda_version": _text(system.get("cuda")),
            },
            "operating_system": _text(system.get("operating_system")),
            **dict.fromkeys(_LEFT_EMPTY, ""),
            "system_name": self._system_name,
        }


def _line(state: Snapshot, key: str, value: Any = None, kind: str = "POINT_IN_TIME", **metadata: Any) -> str:
    frame = inspect.currentframe()
    caller = frame and frame.f_back
    place = {"file": "consumers/callbacks/mlperf.py", "lineno": caller and caller.f_lineno}
    content = {
        "namespace": "",
        "time_ms": state.time_ns // 10**6,
        "event_type": kind,
        "key": key,
        "value": plain(value),
        "metadata": place | metadata,
    }
    return f":::MLLOG {json.dumps(content)}\n"


class _ResultFile(FileDestination):
    """A file that begins with the first line of this run, because all of it is written again.

    Refuses a file with other content, unless it is to ``append`` to it."""

    name = "mlperf"
    elsewhere = "index=N"

    def __init__(self, path: Path, first_line: str = "", append: bool = False) -> None:
        super().__init__(str(path))
        self._first_line = first_line.encode()
        self._appends = append

    def begin(self) -> None:
        found = self.opened_path.read_bytes()
        begun_at = found.find(self._first_line)
        kept = found[:begun_at] if begun_at >= 0 else found
        if kept and not self._appends:
            raise self._problem("holds the results of another run:")
        os.ftruncate(self._opened.fileno(), len(kept))
        self._bytes, self._checksum = len(kept), zlib.crc32(kept)


def _run(command: str) -> bool:
    try:
        code = subprocess.run(shlex.split(command), check=False).returncode
    except (OSError, ValueError) as error:
        problem = str(error)
    else:
        problem = f"exit code {code}" if code else ""
    if problem:
        said = f"cache_clear_cmd {command!r} failed: {problem}; the results do not say that caches were cleared"
        say(said, err=True)
    return not problem


def _system(state: Snapshot) -> Mapping[str, Any]:
    system = state.fields.get("system")
    return system if isinstance(system, dict) else {}


def _text(value: Any) -> str:
    return "" if value is None else str(value)
