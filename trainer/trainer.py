"""The trainer: takes everything that a training needs, checks it, and runs it."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from bus.clock import wall_clock
from bus.errors import ClosedError, ConfigurationError
from bus.event import Event
from bus.publisher import BASE_EVENTS, Publisher, ending_for
from bus.runs import new_run_name
from bus.time import Time, TimeInput
from trainer.algorithm import Algorithm
from trainer.arguments import check_microbatch_size, check_record, check_schedulers, several
from trainer.attached import AttachedConsumers, check_picklable, events_of
from trainer.data import DataSpec, as_data_spec
from trainer.device import Device, get_device
from trainer.durations import check_interval, check_max_duration
from trainer.engine import Engine
from trainer.evaluation import Evaluation
from trainer.evaluator import Evaluator, as_evaluators
from trainer.logger import Logger
from trainer.loop import TrainingLoop
from trainer.models import check_model
from trainer.progress import make_progress
from trainer.publishing import StatePublisher, optimizer_names
from trainer.seeding import check_seed, new_seed, seed_all
from trainer.state import State

__all__ = ["Trainer"]


class Trainer:
    """Trains a model, evaluates it, and publishes what happens for consumers to watch.

    Args:
        model: an ``nn.Module`` with the methods of :class:`trainer.models.Model`, such as :class:`trainer.Classifier`.
        train_dataloader: a dataloader, or a :class:`trainer.DataSpec` that says how to count and split its batches.
        eval_dataloader: a dataloader (its label is ``eval``), a :class:`trainer.Evaluator` or a list of them.
        optimizers: one or several torch optimizers of the model's parameters.
        schedulers: one or several torch schedulers, stepped after each epoch, or after each batch with
            ``step_schedulers_every_batch``.
        max_duration: how long to train: ``5ep``, ``1000ba``, ``10000sp``, ``1e6tok``, ``1h30m``, or a number of epochs.
        eval_interval: how often to evaluate, in the same way or as a share such as ``0.1dur``; 0 for never.
        algorithms: :class:`trainer.Algorithm` objects, which run in the loop and may change it.
        callbacks, loggers: objects of the package ``consumers``; they run in a process that is started for them.
        run_name: the run's name, by default a new one.
        seed: for Python's, numpy's and torch's random numbers; by default a new one, which is recorded.
        device: ``auto``, ``cpu`` or ``gpu``.
        device_train_microbatch_size: splits batches into microbatches of so many samples, whose gradients are added up.
        runs_dir: where runs live, by default ``$OFFLOOP_RUNS_DIR`` or ``runs``.
        publish: whether there is a stream at all.
        broker: the address of a broker that stands alone; by default one is started.
        progress_bar: whether to show progress on standard error.
        record: events to record beside the base set, or ``"all"``; others are recorded while a consumer wants them.
        max_delay: seconds by which the events of batches may be late in a fast loop, see :class:`bus.Publisher`.
        clock: nanoseconds since 1970, for tests.
        config: what else to write down about the run in ``run.json``.

    Use it as a context manager, or call :meth:`close` at the end. An exception that ends :meth:`fit` ends the run as
    failed.

    Raises:
        ConfigurationError: an argument is not allowed; nothing has been started then.
        InvalidTimeError: a duration or an interval cannot be read.
        RunIsLiveError, RunDirectoryError, BrokerError: the run cannot be started.

    Reference: ``composer/trainer/trainer.py``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        train_dataloader: DataSpec | Iterable[Any] | None = None,
        eval_dataloader: DataSpec | Iterable[Any] | Evaluator | Sequence[Evaluator] | None = None,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        schedulers: LRScheduler | Sequence[LRScheduler] | None = None,
        max_duration: TimeInput | None = None,
        eval_interval: TimeInput = 1,
        algorithms: Algorithm | Sequence[Algorithm] | None = None,
        callbacks: Any | Sequence[Any] | None = None,
        loggers: Any | Sequence[Any] | None = None,
        run_name: str | None = None,
        seed: int | None = None,
        device: str | Device = "auto",
        *,
        device_train_microbatch_size: int | None = None,
        step_schedulers_every_batch: bool | None = None,
        runs_dir: str | os.PathLike[str] | None = None,
        publish: bool = True,
        broker: str | None = None,
        progress_bar: bool = True,
        record: str | Iterable[Event | str] | None = None,
        max_delay: float = 0.05,
        clock: Callable[[], int] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        evaluators = as_evaluators(eval_dataloader)
        check_model(model, evaluated=bool(evaluators))
        self._data = None if train_dataloader is None else as_data_spec(train_dataloader, "train_dataloader")
        self._max_duration = None if max_duration is None else check_max_duration(max_duration)
        self._eval_interval = check_interval(eval_interval)
        self._microbatch_size = check_microbatch_size(device_train_microbatch_size)
        self._step_schedulers_every_batch = bool(step_schedulers_every_batch)
        self._clock = clock or wall_clock()
        callbacks, loggers = several(callbacks, object, "callbacks"), several(loggers, object, "loggers")
        events = check_record(record) | _check_consumers(callbacks, loggers, publish)
        self.state = State(
            model=model,
            device=get_device(device),
            seed=new_seed() if seed is None else check_seed(seed),
            run_name=run_name or new_run_name("run", runs_dir),
            optimizers=several(optimizers, torch.optim.Optimizer, "optimizers"),
            schedulers=check_schedulers(several(schedulers, LRScheduler, "schedulers")),
            algorithms=several(algorithms, Algorithm, "algorithms"),
            evaluators=evaluators,
        )
        self._prepare_model()

        self._closed = False
        self._publisher: Publisher | None = None
        self._attached: AttachedConsumers | None = None
        self._progress = make_progress(progress_bar, self.state, self._clock)
        self.logger = Logger(self.state)
        try:
            if publish:
                self._publisher = self._start_stream(runs_dir, broker, max_delay, events, config or {})
                if callbacks or loggers:
                    self._attached = AttachedConsumers(callbacks, loggers, self._publisher.run_dir)
            self.engine = self._make_engine()
            self._evaluation = Evaluation(self.state, self.engine, self._clock)
            self._begin()
        except BaseException as error:
            self._end(*ending_for(error))
            raise

    def _prepare_model(self) -> None:
        state = self.state
        state.model.to(state.device.torch_device)
        if hasattr(state.model, "get_metrics"):
            state.train_metrics = deepcopy(dict(state.model.get_metrics(is_train=True)))
        state.eval_metrics = {one.label: one.choose_metrics(state.model) for one in state.evaluators}
        for metrics in (state.train_metrics, *state.eval_metrics.values()):
            for metric in metrics.values():
                metric.to(state.device.torch_device)

    def _start_stream(
        self,
        runs_dir: str | os.PathLike[str] | None,
        broker: str | None,
        max_delay: float,
        events: set[Event],
        config: Mapping[str, Any],
    ) -> Publisher:
        state = self.state
        return Publisher(
            state.run_name,
            runs_dir=runs_dir,
            broker=broker,
            rank=state.rank,
            world_size=state.world_size,
            info={**self._describe(), "config": dict(config)},
            events=BASE_EVENTS | events,
            clock=self._clock,
            max_delay=max_delay,
        )

    def _describe(self) -> dict[str, Any]:
        state = self.state
        return {
            "seed": state.seed,
            "max_duration": None if self._max_duration is None else str(self._max_duration),
            "model": type(state.model).__name__,
            "parameters": sum(parameter.numel() for parameter in state.model.parameters()),
            "optimizers": optimizer_names(state.optimizers),
            "device": str(state.device.torch_device),
        }

    def _make_engine(self) -> Engine:
        if self._publisher is None:
            return Engine(self.state, self.logger)
        publish = StatePublisher(self.state, self.logger, self._publisher).publish
        return Engine(self.state, self.logger, self._publisher.wanted, publish)

    def _begin(self) -> None:
        # As late as this, so that nothing that was started before can have taken a random number.
        seed_all(self.state.seed)
        self.engine.run_event(Event.INIT)
        self.state.max_duration = self._max_duration
        if self._data is not None:
            self.state.train_dataloader = self._data.dataloader
            self.state.set_dataloader(self._data, "train")
        self.engine.run_event(Event.BEFORE_LOAD)
        self.engine.run_event(Event.AFTER_LOAD)

    @property
    def run_name(self) -> str:
        """The run's name."""
        return self.state.run_name

    @property
    def run_dir(self) -> Path | None:
        """The run's directory; ``None`` without a stream."""
        return None if self._publisher is None else self._publisher.run_dir

    @property
    def recorded_all(self) -> bool:
        """Whether everything that was published so far is on disk; without a stream there is nothing to record."""
        return self._publisher is None or self._publisher.recorded_all

    @property
    def recording(self) -> Path | None:
        """The file that the stream is recorded in; ``None`` without a stream."""
        return None if self._publisher is None else self._publisher.recording

    def fit(self, duration: TimeInput | None = None) -> None:
        """Trains for ``duration``, or until ``max_duration``.

        Raises :class:`bus.errors.ConfigurationError` when there is nothing to train on, with or for, and whatever is
        raised in the loop, after which the trainer is closed."""
        data, max_duration = self._check_fit(duration)
        self.state.max_duration = max_duration
        loop = TrainingLoop(
            self.state,
            self.engine,
            self._evaluation,
            self._progress,
            data,
            self._clock,
            microbatch_size=self._microbatch_size,
            step_schedulers_every_batch=self._step_schedulers_every_batch,
        )
        try:
            self._evaluation.plan(self._eval_interval, max_duration)
            loop.run()
            self._progress.finish()
        except BaseException as error:
            self._end(*ending_for(error))
            raise

    def _check_fit(self, duration: TimeInput | None) -> tuple[DataSpec, Time]:
        if self._closed:
            raise ClosedError(f"the trainer of run {self.run_name!r} is closed: make a new Trainer")
        for value, argument in ((self._data, "a train_dataloader"), (self.state.optimizers, "optimizers")):
            if not value:
                raise ConfigurationError(f"fit() needs {argument}: pass it to Trainer(...)")
        timestamp, max_duration = self.state.timestamp, self.state.max_duration
        if duration is not None:
            length = check_max_duration(duration)
            max_duration = timestamp.get(length.unit) + length
        if max_duration is None:
            raise ConfigurationError("fit() needs to know how long to train: pass max_duration='5ep' or the like")
        if timestamp >= max_duration:
            raise ConfigurationError(
                f"max_duration {str(max_duration)!r} is over already: pass a longer one, or fit(duration=...)"
            )
        if timestamp.batch_in_epoch != 0:
            raise ConfigurationError("fit() cannot go on in the middle of an epoch: train for whole epochs")
        assert self._data is not None  # checked above
        return self._data, max_duration

    def close(self) -> None:
        """Ends the run: sends what is left and waits, for a limited time, until callbacks and loggers have handled
        everything. Can be called more than once."""
        self._end("stopped" if self.state.stopped else "finished", None)

    def _end(self, status: str, error: str | None) -> None:
        if self._closed:
            return
        self._closed = True
        self._progress.close()
        try:
            if self._publisher is not None:
                self._publisher.close(status, error)
        finally:
            if self._attached is not None:
                self._attached.wait()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end(*ending_for(error))


def _check_consumers(callbacks: list[Any], loggers: list[Any], publish: bool) -> set[Event]:
    if (callbacks or loggers) and not publish:
        raise ConfigurationError("callbacks and loggers are fed by the stream: leave out publish=False, or them")
    check_picklable(callbacks, "callbacks")
    check_picklable(loggers, "loggers")
    return events_of(callbacks)
