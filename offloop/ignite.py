"""The adapter for engines of PyTorch Ignite: :class:`OffloopLogger`."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from offloop.attached.adapter import Wrapped, contain, missing
from offloop.attached.options import Options, check_options, is_enabled
from offloop.attached.training import (
    AT_FETCH,
    EVALUATION_BATCHES,
    AttachedTraining,
    numbers_in,
    time_reached,
    unwrapped,
)
from offloop.bus.errors import ConfigurationError
from offloop.bus.types.timestamp import Timestamp
from offloop.own_loop import OWN_LOOP, WatchedRun
from offloop.trainer.arguments.checks import as_list

try:
    import torch
    from ignite.engine import Engine, Events
except ModuleNotFoundError as _error:
    raise missing(_error, "offloop.ignite", "pytorch-ignite") from None

_WITHOUT_OUTPUT = (Events.ITERATION_STARTED, Events.EXCEPTION_RAISED)
_FRAMEWORK = OWN_LOOP._replace(name="Ignite", package="pytorch-ignite", events=OWN_LOOP.events | EVALUATION_BATCHES)


class OffloopLogger:
    """Publishes each ``run()`` of a trainer as a run.

        OffloopLogger(run_name="mnist").attach(trainer, optimizer, evaluators={"val": evaluator})
        trainer.run(loader, max_epochs=10)

    All ranks attach one. Put it into ``to_save`` and ``to_load`` of a ``Checkpoint``: consumers then save their
    callbacks' states, and a resumed training continues the counters.

    Args:
        options: as in :class:`offloop.trainer.Trainer`, see :class:`offloop.attached.options.Options`.

    Raises :class:`offloop.bus.errors.ConfigurationError` for invalid options."""

    def __init__(self, **options: Unpack[Options]) -> None:
        check_options(options)
        self._options = options
        self._run: IgniteRun | None = None
        self._resumed: Mapping[str, Any] | None = None

    def attach(
        self,
        trainer: Engine,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        evaluators: Mapping[str, Engine] | None = None,
        *,
        model: torch.nn.Module | None = None,
        scheduler: Any | Sequence[Any] | None = None,
        output_transform: Callable[[Any], Any] | None = None,
        gradient_accumulation_steps: int = 1,
        evaluate: Callable[[], object] | None = None,
        checkpoint: Callable[[], object] | None = None,
    ) -> "OffloopLogger":
        """Attach to the engines and return the logger.

        Args:
            trainer, optimizer: the training engine and its optimizer, or a list of optimizers.
            evaluators: evaluating engines, by the label of their data.
            model: by default the module with the optimizer's parameters that the trainer's function uses.
            scheduler: torch's schedulers, which follow a rate that is set by command.
            output_transform: function from ``trainer.state.output`` to the loss, or to a map of ``loss`` and other
                numbers; by default the output itself.
            gradient_accumulation_steps: iterations in a step of the optimizer.
            evaluate, checkpoint: functions for ``offloop send RUN set eval now`` and ``offloop send RUN checkpoint``,
                called between two iterations on every rank.

        Raises :class:`offloop.bus.errors.ConfigurationError` for invalid arguments."""
        optimizers = as_list(optimizer, torch.optim.Optimizer, "optimizer")
        for label, engine in {"trainer": trainer, **(evaluators or {})}.items():
            if not isinstance(engine, Engine):
                raise ConfigurationError(f"{label} is {type(engine).__name__}: give an ignite.engine.Engine")
        if not is_enabled(self._options):
            return self
        attached = {
            "options": self._options,
            "model": model or _find_model(trainer, optimizers),
            "optimizers": optimizers,
            "schedulers": as_list(scheduler, object, "scheduler"),
            "evaluate": evaluate or "give OffloopLogger.attach() a function evaluate=",
            "checkpoint": checkpoint or "give OffloopLogger.attach() a function checkpoint=",
        }

        def start() -> None:
            self.close()
            resumed, self._resumed = self._resumed, None
            self._run = IgniteRun(
                trainer, evaluators or {}, output_transform, resumed, gradient_accumulation_steps, **attached
            )

        trainer.add_event_handler(Events.STARTED, start)
        # A handler of EXCEPTION_RAISED would hide the exception from the caller.
        Wrapped(trainer, "run", failed=self.close)
        return self

    @property
    def run(self) -> "IgniteRun | None":
        """The current or last run."""
        return self._run

    def log(self, values: Mapping[str, Any] | None = None, /, *, step: int | None = None, **more: Any) -> None:
        """Log numbers as :meth:`offloop.own_loop.WatchedRun.log`."""
        if self._run is not None:
            self._run.log(values, step=step, **more)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. The call announces the checkpoint."""
        if self._run is None:
            return {}
        self._run.checkpoint_saved()
        return self._run.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the counters from :meth:`state_dict`, for the next ``trainer.run()``."""
        self._resumed = saved or None

    def close(self, error: BaseException | None = None) -> None:
        """End the run, if the trainer has not."""
        if self._run is not None:
            self._run.close(error)


@contain("_hook", "_resume", "_take_output", "_log_metrics")
class IgniteRun(WatchedRun):
    """The run of one ``trainer.run()``, see :class:`OffloopLogger`."""

    def __init__(
        self,
        trainer: Engine,
        evaluators: Mapping[str, Engine],
        output_transform: Callable[[Any], Any] | None,
        resumed: Mapping[str, Any] | None,
        steps: int,
        **attached: Any,
    ) -> None:
        self._trainer = trainer
        self._evaluators = evaluators
        self._transform = output_transform
        self._seen = 0  # the last iteration whose output was handled
        self._epoch = trainer.state.epoch  # number of ended epochs
        self._logged: dict[str, Any] = {}
        state = trainer.state
        config = {name: getattr(state, name) for name in ("max_epochs", "max_iters", "epoch_length")}
        super().__init__(
            steps,
            framework=_FRAMEWORK,
            max_duration=f"{state.max_iters // steps}ba" if state.max_iters else f"{state.max_epochs}ep",
            config={**config, "gradient_accumulation_steps": steps},
            **attached,
        )
        self._fetches = True
        per_epoch = None if (length := state.epoch_length) is None or length % steps else length // steps
        self._data = {"dataloader": state.dataloader, "batches_per_epoch": per_epoch, "microbatches": steps}
        # Ignite's counters are the loop's.
        self._position.reached = Timestamp(batch=state.iteration // steps, epoch=state.epoch)
        self._resume(resumed)
        self._begin()

    def _resume(self, resumed: Mapping[str, Any] | None) -> None:
        now = self._position.reached.values
        self._position.reached = time_reached(resumed, now.batch, now.epoch, self._data["batches_per_epoch"])
        self._resumed = resumed

    def _hook(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super()._hook(model, optimizers)
        publish, training = self._publish, AttachedTraining
        self._handle(
            self._trainer,
            {
                Events.EPOCH_STARTED: lambda _: publish(training.epoch_start),
                Events.GET_BATCH_STARTED: self._on_get_batch_started,
                Events.ITERATION_STARTED: self._on_iteration_started,
                Events.ITERATION_COMPLETED: self._terminate_if_asked,
                Events.EPOCH_COMPLETED: self._on_epoch_completed,
                Events.TERMINATE: self._on_terminate,
                Events.COMPLETED: lambda _: self.close(),
            },
        )
        for label, engine in self._evaluators.items():
            self._handle(
                engine,
                {
                    Events.STARTED: functools.partial(self._on_evaluation_started, label),
                    Events.ITERATION_STARTED: lambda engine: publish(training.eval_batch_start, engine.state.batch),
                    Events.ITERATION_COMPLETED: lambda _: publish(training.eval_batch_end),
                    Events.COMPLETED: lambda engine: publish(training.eval_end, numbers_in(engine.state.metrics)),
                },
            )

    def _handle(self, engine: Engine, handlers: Mapping[Events, Callable[[Engine], object]]) -> None:
        self._handles += [engine.add_event_handler(event, handler) for event, handler in handlers.items()]

    def _on_get_batch_started(self, engine: Engine) -> None:
        if not self.detached and not AT_FETCH.isdisjoint(self._training.requested_events):
            self._publish(AttachedTraining.fetch_start)

    def _on_iteration_started(self, engine: Engine) -> None:
        batch = engine.state.batch
        self._start_observed(batch, *self._position.add(batch))

    def _terminate_if_asked(self, engine: Engine) -> None:
        if self.stop_requested:
            engine.terminate()

    def _on_terminate(self, engine: Engine) -> None:
        if engine.should_terminate == "skip_completed":
            self.close()

    def _on_epoch_completed(self, engine: Engine) -> None:
        if engine.state.epoch != self._epoch:
            self._epoch = engine.state.epoch
            self._end_epoch()
        self._log_metrics()
        self._terminate_if_asked(engine)

    def _on_evaluation_started(self, label: str, engine: Engine) -> None:
        self._end_batch()
        if self._trainer.last_event_name == Events.EPOCH_COMPLETED:
            self._on_epoch_completed(self._trainer)
        self._publish(AttachedTraining.eval_start, label, batches=engine.state.epoch_length)

    def _end_batch(self, *, is_cut_off: bool = False) -> None:
        # The output does not exist within the trainer's function, and perhaps not after an exception.
        if self._trainer.last_event_name not in _WITHOUT_OUTPUT:
            if self._trainer.state.iteration != self._seen:
                self._seen = self._trainer.state.iteration
                self._take_output(self._trainer.state.output)
            super()._end_batch(is_cut_off=is_cut_off)

    def _take_output(self, output: Any) -> None:
        if self._transform is not None:
            output = self._transform(output)
        if self._trainer.state.metrics or self._logged:
            self._log_metrics()
        if output.__class__ is torch.Tensor and output.numel() == 1:
            self._losses.append(output.detach())
            return
        values = numbers_in(output if isinstance(output, Mapping) else {"loss": output})
        loss = values.pop("loss", None)
        if loss is not None:
            self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)
        self._log_numbers(values)

    def _log_metrics(self) -> None:
        values = numbers_in(self._trainer.state.metrics)
        new = {name: value for name, value in values.items() if self._logged.get(name) is not value}
        self._logged = values
        self._log_numbers(new)

    def _log_numbers(self, values: Mapping[str, Any]) -> None:
        if values:
            self._publish(AttachedTraining.log_metrics, values)


def _find_model(trainer: Engine, optimizers: Sequence[torch.optim.Optimizer]) -> torch.nn.Module:
    owned = {id(parameter) for one in optimizers for group in one.param_groups for parameter in group["params"]}
    function = getattr(trainer._process_function, "__wrapped__", trainer._process_function)
    used = inspect.getclosurevars(function) if inspect.isroutine(function) else None
    candidates = [] if used is None else [*used.globals.values(), *used.nonlocals.values()]
    found = {
        id(unwrapped(one)): one
        for one in candidates
        if isinstance(one, torch.nn.Module) and any(id(parameter) in owned for parameter in one.parameters())
    }
    if len(found) != 1:
        raise ConfigurationError(
            f"the trainer's function uses {len(found)} models with parameters of the optimizer: give the one to "
            "watch, attach(trainer, optimizer, model=model)"
        )
    return next(iter(found.values()))
