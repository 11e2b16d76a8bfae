"""The adapter for verl: the logging back end ``offloop``.

Importing this module adds it to verl's ``Tracking``. verl does so itself, by the entry point ``verl.plugins``::

    python -m verl.trainer.main_ppo ... trainer.logger='["console","offloop"]'
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

try:
    from verl.utils import tracking
except ModuleNotFoundError as _error:
    # verl loads this module in each of its processes, so the rest of offloop is imported when it is used.
    from offloop.attached.adapter import missing

    raise missing(_error, "offloop.verl", "verl") from None

_NAME = "offloop"
_log = logging.getLogger(_NAME)


class _Backend:
    """The run of an experiment: a step is a batch. After an error of ours the training continues without it."""

    current: "_Backend | None" = None  # for verl's logger of generations, which knows back ends by name only

    def __init__(self, experiment: object, config: Mapping[str, Any] | None) -> None:
        from offloop.attached.logged_run import LoggedRun
        from offloop.bus.types.disabled import is_disabled

        self._run: LoggedRun | None = None
        if not is_disabled():
            with self._contained():
                self._run = LoggedRun(experiment, "verl", (), config)
        _Backend.current = self

    def log(self, data: Mapping[str, Any], step: int) -> None:
        if self._run is not None:
            with self._contained():
                # The first step is 1; validation before it is step 0.
                self._run.reach(max(step - 1, 0))
                self._run.log({name: value for name, value in data.items() if _is_number(value)}, max(step - 1, 0))
                self._run.reach(step)

    def log_generations(self, samples: Sequence[Sequence[Any]], step: int) -> None:
        if self._run is not None:
            with self._contained():
                rows = [dict(zip(("input", "output", "score"), sample, strict=False)) for sample in samples]
                self._run.log_table("val_generations", rows, step=max(step - 1, 0))

    def finish(self, exit_code: int) -> None:
        run, self._run = self._run, None
        if run is not None:
            with self._contained():
                run.close(*(("failed", f"verl ended with exit code {exit_code}") if exit_code else ()))

    @contextlib.contextmanager
    def _contained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  the training must continue
            self._run = None
            _log.error("offloop is detached from verl, the training continues without it: %s", error)


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, str)


def _wrap(owner: type, name: str, then: Callable[..., None]) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **more: Any) -> Any:
        result = method(self, *args, **more)
        then(self, *args, **more)
        return result

    setattr(owner, name, call)


def _start(
    self: Any, project_name: Any, experiment_name: Any, default_backend: Any = "console", config: Any = None
) -> None:
    if _NAME in ([default_backend] if isinstance(default_backend, str) else default_backend):
        self.logger[_NAME] = _Backend(experiment_name, config)


def _finish(self: Any, exit_code: int = 0) -> None:
    if (backend := getattr(self, "logger", {}).get(_NAME)) is not None:
        backend.finish(exit_code)


def _log_generations(self: Any, loggers: Any, samples: Any, step: int) -> None:
    if _NAME in loggers and _Backend.current is not None:
        _Backend.current.log_generations(samples, step)


if _NAME not in tracking.Tracking.supported_backend:
    tracking.Tracking.supported_backend.append(_NAME)
    _wrap(tracking.Tracking, "__init__", _start)
    _wrap(tracking.Tracking, "finish", _finish)
    _wrap(tracking.ValidationGenerationsLogger, "log", _log_generations)
