"""The adapter for torchtitan's structured logger: :func:`register`."""

import contextlib
import logging
import os
import re
import time
from collections import defaultdict
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from offloop.attached.logged_run import LoggedRun
from offloop.bus.errors import BrokerError, ConfigurationError, RunNotFoundError
from offloop.bus.publisher.actor import Actor, join
from offloop.bus.types.actor import JOIN
from offloop.bus.types.deferred import LeftOut
from offloop.bus.types.disabled import is_disabled
from offloop.bus.types.event import ANY_CUSTOM, Event

_TRAINING = ("training", "trainer")  # sources of torchtitan's pre-training, and of its reinforcement learning
_WHERE = "offloop_run"  # file in the output folder, with the directory of the run
_JOIN_SECONDS = 60.0
_NOT_IN_NAMES = re.compile("[^A-Za-z0-9_.-]+")

_log = logging.getLogger("offloop")


def register(*, structured_logger: logging.Logger, rank: int, source: str, output_dir: str, **_: Any) -> None:
    """Make a training of torchtitan a run, by its environment and without a line of code.

        TITAN_STRUCT_LOGGER_HANDLERS=offloop.torchtitan.register torchrun ... -m torchtitan.train ...

    torchtitan calls it in each process. The first rank of the training is the run, named after the output folder.
    All other processes on its machine join it as actors. Spans, instants and scalars of the structured logger are
    spans, events and logged numbers; a step is a batch."""
    if not is_disabled():
        structured_logger.addHandler(_Handler(structured_logger, source, rank, output_dir))


class _Handler(logging.Handler):
    def __init__(self, owner: logging.Logger, source: str, rank: int, output_dir: str) -> None:
        super().__init__()
        self._owner, self._source, self._name, self._where = owner, source, f"{source}-{rank}", Path(output_dir, _WHERE)
        self._run: LoggedRun | Actor | None = None
        self._training: LoggedRun | None = None
        self._left_out = LeftOut(self._name)
        self._join_until = time.monotonic() + _JOIN_SECONDS
        self._next_try = 0.0
        self._spans: defaultdict[Any, list[tuple[str, AbstractContextManager[Any], dict[str, Any]]]] = defaultdict(list)
        if source in _TRAINING and rank == 0 and JOIN not in os.environ:
            with self._contained():
                self._run = self._training = self._start(output_dir)

    def _start(self, output_dir: str) -> LoggedRun:
        self._where.unlink(missing_ok=True)
        run = LoggedRun(Path(output_dir).resolve().name, "torchtitan", {ANY_CUSTOM})
        self._where.parent.mkdir(parents=True, exist_ok=True)
        self._where.write_text(str(run.run_dir))
        return run

    def _join(self) -> Actor | None:
        # The training may not have begun yet, or is on another machine.
        now = time.monotonic()
        if now < self._next_try:
            return None
        self._next_try = now + 1
        try:
            where = os.environ.get(JOIN) or self._where.read_text()
            return join(where, role=self._source, name=self._name, wait_seconds=0)
        except (OSError, BrokerError, RunNotFoundError) as error:
            if now > self._join_until:
                self._detach(f"no live run in {self._where} ({error})")
            return None

    def emit(self, record: Any) -> None:
        with self._contained():
            if self._run is None:
                self._run = self._join()
            # Others are texts.
            if self._run is not None and getattr(record, "log_type_name", None) is not None:
                try:
                    self._publish(self._run, record)
                except ConfigurationError as error:
                    self._left_out.add(record.event_name or record.log_type_name, error)

    def _publish(self, run: LoggedRun | Actor, record: Any) -> None:
        kind, step, task = str(record.log_type_name), record.step, (record.thread, record.task_name)
        if step is not None and self._training is not None:
            self._training.reach(step - 1)
        if record.log_type == "instant":
            if kind == "metric_value":
                run.log({record.event_name: record.value}, step=None if step is None else step - 1)
                return
            if kind == "training_start" and self._training is not None:
                self._training.publish(Event.FIT_START)
            run.event(_NOT_IN_NAMES.sub("_", kind))
            return
        name, _, what = kind.rpartition("_")
        # torchtitan pairs them in the same way.
        open_spans = self._spans[task]
        if what == "start":
            fields = {}
            if name.endswith(".build"):
                # One for each class of a configuration.
                name, fields = "build", {"of": name.removesuffix(".build")}
            span = run.span(_NOT_IN_NAMES.sub("_", name), **fields)
            open_spans.append((kind, span, span.__enter__()))
        elif open_spans and open_spans[-1][0] == f"{name}_start":
            if what == "error":
                open_spans[-1][2]["error"] = record.getMessage().partition("_error: ")[2].partition(":")[0]
                return
            open_spans.pop()[1].__exit__(None, None, None)
            if not open_spans:
                # Tasks come and go.
                del self._spans[task]
            if name == "step" and step is not None and self._training is not None:
                self._training.reach(step)

    @contextlib.contextmanager
    def _contained(self) -> Any:
        try:
            yield
        except Exception as error:  # noqa: BLE001  the training must continue
            self._detach(f"{type(error).__name__}: {error}")

    def _detach(self, reason: str) -> None:
        self._owner.removeHandler(self)
        _log.error("offloop is detached from %s, the training continues without it: %s", self._name, reason)
