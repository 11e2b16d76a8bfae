"""Assembles the parts of a training and runs it."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from offloop.bus.errors import ClosedError, ConfigurationError, RankError
from offloop.bus.publisher.publisher import ending_for
from offloop.bus.types.time import TimeInput
from offloop.trainer.arguments.checks import check_function, check_path, check_subset
from offloop.trainer.config import TrainerArguments, accept_arguments
from offloop.trainer.control.interrupts import Interruption, defer_signals
from offloop.trainer.control.remote_control import RemoteControl
from offloop.trainer.control.settings import Settings, make_settings
from offloop.trainer.data.evaluator import Evaluator, as_evaluators
from offloop.trainer.data.metrics import check_model
from offloop.trainer.data.spec import DataSpec, as_data_spec
from offloop.trainer.distributed.ranks import report_lost_ranks
from offloop.trainer.distributed.sampling import check_shards
from offloop.trainer.engine.engine import Engine
from offloop.trainer.engine.state import AlgorithmLogger, State
from offloop.trainer.evaluation.evaluation import evaluating_on_others, newest_metrics
from offloop.trainer.loop.progress import ProgressDisplay
from offloop.trainer.setup import Setup


class Trainer:
    """Trains a model, evaluates it, and publishes its events for consumers.

    Its arguments are those of :class:`offloop.trainer.config.TrainerArguments`::

        Trainer(model, data, optimizers=sgd, max_duration="5ep", save_folder="saved", save_interval="1ep")

    Use it as a context manager, or call :meth:`close` at the end. An exception that ends :meth:`fit`, :meth:`eval` or
    :meth:`predict` ends the run as failed.

    Raises:
        ConfigurationError: an argument is not allowed. Nothing has been started.
        InvalidTimeError: a duration or an interval cannot be read.
        CheckpointError: a checkpoint cannot be read, or belongs to another training.
        RunIsLiveError, RunDirectoryError, BrokerError: the run cannot be started.

    Reference: ``composer/trainer/trainer.py``."""

    @accept_arguments(TrainerArguments)
    def __init__(self, given: TrainerArguments) -> None:
        self._setup = setup = Setup(given)
        self.state: State = setup.state
        state = self.state
        self._closed = self._is_fitting = self._is_introduced = False
        shown = given.progress_bar and state.rank == 0
        self._progress = ProgressDisplay(state, setup.clock, sys.stderr if shown else None)
        self.logger: AlgorithmLogger = AlgorithmLogger(state)
        self.settings: Settings = make_settings(self._progress, setup.settings)
        """Values that ``offloop send RUN set NAME VALUE`` can set. More can be registered."""
        self._stream = setup.stream
        self._control = RemoteControl(state, self.settings, setup.ranks, self._progress.note)
        with self._ending_on_error():
            setup.start(self.logger, self._control, shows=given.progress_bar)
        self.engine: Engine = setup.engine
        self._publisher = setup.stream.publisher

    @property
    def run_name(self) -> str:
        """The run's name."""
        return self.state.run_name

    @property
    def run_dir(self) -> Path | None:
        """Directory of the run; ``None`` without a stream."""
        return None if self._publisher is None else self._publisher.run_dir

    @property
    def metrics(self) -> dict[str, float]:
        """Newest value of each loss and metric under its full name, such as ``loss/train/total``.

        Metrics are ``metrics/train/NAME``, and ``metrics/LABEL/NAME`` for an evaluator. A metric with several values
        has the names ``NAME/0``, ``NAME/1``, ... ``[]`` takes short names too: ``trainer.metrics["loss"]``. Waits for
        the device."""
        return newest_metrics(self.state)

    @property
    def attempt(self) -> int | None:
        """Number of this attempt, from 1; ``None`` without a stream."""
        return None if self._publisher is None else self._publisher.attempt

    @property
    def resumed_from(self) -> Path | None:
        """The checkpoint of the same run from which the training resumed; ``None`` for a new training."""
        return self._setup.checkpoints.resumed_from

    @property
    def save_folder(self) -> Path | None:
        """The folder for checkpoints; ``None`` without one."""
        return self._setup.checkpoints.folder

    @property
    def recorded_all(self) -> bool:
        """True if all published events are on disk. ``True`` without a stream."""
        return self._publisher is None or self._publisher.recorded_all

    @property
    def recording(self) -> Path | None:
        """The file with the recording; ``None`` without a stream."""
        return None if self._publisher is None else self._publisher.recording

    def introduce(self) -> str:
        """Return one line for people: the run, its recording, and how to watch it.

        The first :meth:`fit`, :meth:`eval` or :meth:`predict` shows it, unless it was requested before."""
        self._is_introduced = True
        resumed_from = self.resumed_from
        return self._stream.introduce(self.run_name, None if resumed_from is None else resumed_from.name)

    def _show_introduction(self) -> None:
        if self._publisher is not None and not self._is_introduced:
            self._progress.note(self.introduce())

    def fit(
        self,
        duration: TimeInput | None = None,
        *,
        reset_time: bool = False,
        train_dataloader: DataSpec | Iterable[Any] | None = None,
        eval_dataloader: DataSpec | Iterable[Any] | Evaluator | Sequence[Evaluator] | None = None,
        eval_interval: TimeInput | None = None,
    ) -> None:
        """Train for ``duration``, or until ``max_duration``. Further calls continue the training.

        With a ``save_folder``, Ctrl-C and SIGTERM end the training after the current batch with a checkpoint. A second
        one ends it at once.

        Args:
            duration: a duration in seconds begins with the next whole second of training time.
            reset_time: sets the training time to zero first.
            train_dataloader, eval_dataloader, eval_interval: replace those given to the trainer.

        Raises:
            ConfigurationError: data, an optimizer or a duration is missing.

        An exception in the loop is raised here, after the trainer was closed."""
        self._check_open()
        if self._is_fitting:
            raise ConfigurationError("fit() is running already: an algorithm changes the training through its state")
        setup, state = self._setup, self.state
        setup.begin_fit(
            duration,
            reset_time=reset_time,
            train_dataloader=train_dataloader,
            eval_dataloader=eval_dataloader,
            eval_interval=eval_interval,
        )
        self._is_fitting = True
        self._show_introduction()
        with self._ending_on_error():
            loop = setup.make_loop(self._control, self._progress)
            saves = bool(setup.checkpoints.watched)
            # Ranks must stop after the same batch, also without a checkpoint.
            deferred = saves or setup.ranks is not None
            with defer_signals(state, saves) if deferred else contextlib.nullcontext(Interruption()) as interruption:
                loop.run(interruption)
            if interruption.requested:
                raise KeyboardInterrupt(interruption.reason)
            self._progress.finish()
        self._is_fitting = False

    def eval(
        self,
        eval_dataloader: DataSpec | Iterable[Any] | Evaluator | Sequence[Evaluator] | None = None,
        subset_num_batches: int = -1,
    ) -> dict[str, dict[str, Any]]:
        """Evaluate the model now, on the trainer's evaluators or on others.

        Returns the metrics' values by label and name.

        Raises:
            ConfigurationError: the trainer has no evaluator, and none was given.

        An exception during the evaluation is raised here, after the trainer was closed."""
        self._check_open()
        check_subset(subset_num_batches, "subset_num_batches")
        evaluators = self.state.evaluators if eval_dataloader is None else as_evaluators(eval_dataloader)
        if not evaluators:
            raise ConfigurationError("eval() needs something to evaluate on: pass an eval_dataloader")
        others: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if eval_dataloader is not None:
            check_model(self.state.model, evaluated=True)
            check_shards(self._setup.ranks, None, evaluators)
            others = evaluating_on_others(self.state, evaluators)
        self._show_introduction()
        with others:
            with self._ending_on_error():
                self._setup.evaluation.run_standalone(evaluators, subset_num_batches)
            return {one.label: self.state.eval_metric_values[one.label] for one in evaluators}

    def predict(
        self,
        dataloader: DataSpec | Iterable[Any],
        subset_num_batches: int = -1,
        *,
        on_outputs: Callable[[Any, Any], object] | None = None,
    ) -> list[Any]:
        """Return the outputs of ``model.eval_forward`` for each batch of a dataloader, on the host.

        Args:
            dataloader: the batches.
            subset_num_batches: number of batches to use; -1 for all.
            on_outputs: called with each batch and its outputs, on the device. The returned list is empty then: use it
                for outputs that do not fit into memory.

        Raises:
            ConfigurationError: the model has no ``eval_forward``.

        An exception meanwhile is raised here, after the trainer was closed."""
        self._check_open()
        check_subset(subset_num_batches, "subset_num_batches")
        check_model(self.state.model, evaluated=False, predicts=True)
        spec = as_data_spec(dataloader, "dataloader")
        if on_outputs is not None:
            check_function(on_outputs, "on_outputs", "(batch, outputs)")
        self._show_introduction()
        with self._ending_on_error():
            return self._setup.evaluation.predict(spec, subset_num_batches, on_outputs)

    def save_checkpoint(self, path: str | os.PathLike[str]) -> Path:
        """Write a checkpoint of the training now, or of the model alone with ``save_weights_only``.

        Raises :class:`offloop.bus.errors.CheckpointError` when it cannot be written."""
        self._check_open()
        return self._setup.checkpoints.write(check_path(path, "path"))

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the trainer of run {self.run_name!r} is closed: make a new Trainer")

    @contextlib.contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        try:
            with contextlib.nullcontext() if self._setup.ranks is None else report_lost_ranks(self._setup.ranks.rank):
                yield
        except BaseException as error:
            self._end_on(error)
            raise

    def close(self) -> None:
        """End the run.

        Sends the remaining events and waits, for a limited time, until callbacks and loggers have handled them.
        Further calls do nothing."""
        self._end("stopped" if self.state.stopped else "finished", None, self.state.stop_reason, drain=True)

    def _end_on(self, error: BaseException) -> None:
        if self._setup.ranks is not None:
            # First: the run ends when all ranks have ended, and they wait for this one.
            self._setup.forward_pass.close()
            self._setup.ranks.leave(None if isinstance(error, RankError) else f"{type(error).__name__}: {error}")
        self._end(*ending_for(error))

    def _end(self, status: str, error: str | None, reason: str | None, *, drain: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        if status == "stopped" and reason is not None:
            self._progress.note(f"run {self.run_name} was stopped: {reason}")
        self._progress.close()
        self._stream.close(status, error, reason, drain=drain)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end_on(error)
