"""The adapter for loops with Hugging Face Accelerate."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from offloop.attached.adapter import Wrapped, contain, missing
from offloop.attached.options import Options, check_options
from offloop.attached.training import AttachedTraining, numbers_in
from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.bus.types.time import TimeInput
from offloop.own_loop import OWN_LOOP, WatchedRun
from offloop.trainer.arguments.checks import as_list
from offloop.trainer.arguments.durations import check_max_duration

try:
    import torch
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import DistributedType, DynamoBackend
except ModuleNotFoundError as _error:
    raise missing(_error, "offloop.accelerate", "accelerate") from None

_FRAMEWORK = OWN_LOOP._replace(name="Accelerate", package="accelerate", events=OWN_LOOP.events | {Event.AFTER_LOSS})
_ENGINES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
_PRECISIONS = {"no": None, "bf16": "amp_bf16", "fp16": "amp_fp16"}


@contain("_hook", "_use_pass", "_publish_backward", "_log_values")
class AcceleratedRun(WatchedRun):
    """The run of a training with Accelerate, see :func:`attach`. A loop needs only :attr:`stop_requested`."""

    def __init__(
        self, accelerator: Accelerator, *, optimizers: Sequence[Any], schedulers: Sequence[Any], **more: Any
    ) -> None:
        self._accelerator = accelerator
        self._scaled = [one for one in optimizers if isinstance(one, AcceleratedOptimizer) and one.scaler is not None]
        self._backward_losses: list[torch.Tensor] = []
        self._is_between = True  # true if the next forward pass is the first one of a dataloader batch
        self._pass: Callable[[], Any] | None = None  # the dataloader of the current epoch
        names = ("mixed_precision", "num_processes", "split_batches", "gradient_accumulation_steps")
        super().__init__(
            accelerator.gradient_accumulation_steps,
            framework=_FRAMEWORK,
            optimizers=[_inner(one, "optimizer") for one in optimizers],
            schedulers=[_inner(one, "scheduler") for one in schedulers],
            precision=_PRECISIONS.get(accelerator.mixed_precision, accelerator.mixed_precision),
            config={name: getattr(accelerator, name) for name in names},
            **more,
        )

    def _hook(self, model: torch.nn.Module, optimizers: Sequence[Any]) -> None:
        super()._hook(model, optimizers)
        accelerator, passes = self._accelerator, self._accelerator.gradient_state
        self._handles += [
            Wrapped(accelerator, "backward", self._publish_backward, self._after_accelerator),
            Wrapped(accelerator, "log", self._log_values),
            Wrapped(accelerator, "save_state", lambda *_, **__: self.checkpoint_saved(), self._after_save),
            Wrapped(accelerator, "end_training", self.close),
            Wrapped(passes, "_add_dataloader", self._pass_changes),
            Wrapped(passes, "_remove_dataloader", self._pass_changes),
            *(Wrapped(one, "step", after=self._step_scaled) for one in self._scaled),
        ]

    def _after_save(self, path: Any, *_: Any, **__: Any) -> None:
        self._publish(AttachedTraining.checkpoint_written, path)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the counters from :meth:`state_dict`, before the first batch.

        ``accelerator.load_state()`` calls it if the run is registered for checkpointing. A training that goes back to a
        checkpoint continues its counters."""
        if not self._has_begun:
            super().load_state_dict(saved)

    def _take_inputs(self, batch: Any) -> None:
        dataloader = self._accelerator.gradient_state.active_dataloader if self._pass is None else None
        if dataloader is not None:
            self._pass = weakref.ref(dataloader)
            self._use_pass(dataloader)
            if not self._position.in_epochs:
                self._publish(AttachedTraining.epoch_start)
        # A model may be called several times for the same batch of the dataloader.
        if self._is_between:
            self._is_between = False
            super()._take_inputs(batch)

    def _use_pass(self, dataloader: Any) -> None:
        # The rest of a resumed epoch has another length.
        if self._training.state.timestamp.values.batch_in_epoch == 0:
            self._accumulation = self._accelerator.gradient_accumulation_steps
            self._use(dataloader)

    def _pass_changes(self, dataloader: Any) -> None:
        # The dataloader has ended, or restarts after a pass that was left early.
        if self._pass is not None and self._pass() is dataloader:
            self._pass = None
            if self._position.in_epochs:
                self._end_batch()
                self._position.end_pass()
            else:
                self._end_epoch()

    def _watch_backward(self, outputs: Any) -> None:
        """Not needed: ``accelerator.backward()`` is wrapped."""

    def _publish_backward(self, loss: torch.Tensor, **_: Any) -> None:
        self._backward_losses.append(loss.detach())
        self._fire(Event.AFTER_LOSS)
        self._fire(Event.BEFORE_BACKWARD)

    def _after_accelerator(self, *_: Any, **__: Any) -> None:
        self._is_between = True
        self._fire(Event.AFTER_BACKWARD)

    def _step_scaled(self, *_: Any, **__: Any) -> None:
        # With fp16 a step with overflowing gradients is skipped, and the batch ends all the same.
        if self._accelerator.sync_gradients:
            self._steps.has_stepped = True

    def _end_batch(self, *, is_cut_off: bool = False) -> None:
        if self._steps.has_stepped:
            self._losses, self._backward_losses = self._losses or self._backward_losses, []
        super()._end_batch(is_cut_off=is_cut_off)

    def _log_values(self, values: Mapping[str, Any], step: int | None = None, *_: Any, **__: Any) -> None:
        if self._accelerator.is_main_process:
            self._publish(AttachedTraining.log, numbers_in(values), step)


def attach(
    accelerator: Accelerator,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    scheduler: Any | Sequence[Any] | None = None,
    *,
    max_duration: TimeInput | None = None,
    evaluate: Callable[[], object] | None = None,
    checkpoint: Callable[[], object] | None = None,
    **options: Unpack[Options],
) -> AcceleratedRun:
    """Publish a loop with Accelerate as a run.

        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        run = attach(accelerator, max_duration="3ep")
        for epoch in range(3):
            for batch in loader:
                with accelerator.accumulate(model):
                    ...
                if run.stop_requested:
                    break
        accelerator.end_training()

    A batch is a step of the optimizer, an epoch a pass over a prepared dataloader, and the loss the argument of
    ``accelerator.backward()``, averaged over the batch. All ranks attach. Attaching to the same accelerator again ends
    the earlier run. If the run cannot be started, the reason is shown and the training continues without one.

    Args:
        accelerator: after ``prepare()``.
        model, optimizer, scheduler: by default those that the accelerator has prepared. The model is required if there
            are several, or the accelerator compiles it.
        max_duration: duration of the training for progress bars, such as ``3ep`` or ``1000ba``.
        evaluate: function for ``offloop send RUN set eval now``, called between two batches on every rank.
        checkpoint: function for ``offloop send RUN checkpoint``, by default ``accelerator.save_state`` if the
            accelerator names its checkpoints itself.
        options: as in :class:`offloop.trainer.Trainer`, see :class:`offloop.attached.options.Options`.

    Raises :class:`offloop.bus.errors.ConfigurationError` for invalid arguments."""
    check_options(options)
    if max_duration is not None:
        check_max_duration(max_duration)
    models = accelerator._models if model is None else [model]
    optimizers = as_list(optimizer, torch.optim.Optimizer, "optimizer") or accelerator._optimizers
    _check_prepared(accelerator, models, optimizers, is_given=model is not None)
    if checkpoint is None and accelerator.project_configuration.automatic_checkpoint_naming:

        def checkpoint() -> object:
            # Looked up when called, as it is wrapped later.
            return accelerator.save_state()

    earlier = vars(accelerator).get("_offloop_run")
    if earlier is not None:
        earlier.close()
    run = accelerator._offloop_run = AcceleratedRun(
        accelerator,
        options=options,
        model=models[0],
        optimizers=optimizers,
        schedulers=as_list(scheduler, object, "scheduler") or accelerator._schedulers,
        max_duration=max_duration,
        evaluate=evaluate or "give attach() a function evaluate=",
        checkpoint=checkpoint
        or "give attach() a function checkpoint=, or let the Accelerator name its checkpoints: "
        "ProjectConfiguration(automatic_checkpoint_naming=True)",
    )
    return run


def _check_prepared(accelerator: Accelerator, models: Sequence[Any], optimizers: Sequence[Any], is_given: bool) -> None:
    if accelerator.distributed_type in _ENGINES:
        raise ConfigurationError(
            f"attach() cannot see the steps of {accelerator.distributed_type.value}, which run in its engine: "
            "use offloop.Publisher in the loop"
        )
    if not models or not optimizers:
        what = "optimizer" if models else "model"
        raise ConfigurationError(f"the accelerator has prepared no {what}: call attach() after accelerator.prepare()")
    if not is_given and accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise ConfigurationError(
            "the accelerator compiles the model: give the one that prepare() returned, attach(accelerator, model)"
        )
    if len(models) > 1:
        raise ConfigurationError(
            f"the accelerator has prepared {len(models)} models: give the one to watch, attach(accelerator, model)"
        )


def _inner(wrapper: Any, name: str) -> Any:
    while isinstance(wrapper, AcceleratedOptimizer | AcceleratedScheduler):
        wrapper = getattr(wrapper, name)
    return wrapper
