"""The adapter for a user's own loop: :func:`watch`."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

import torch

from offloop.attached.adapter import RunEvents, contain, detach_for
from offloop.attached.options import Options, check_options, is_enabled
from offloop.attached.position import LoopPosition, length_of
from offloop.attached.training import ALWAYS, AT_FETCH, STEP, AttachedTraining, Framework
from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.bus.types.time import TimeInput
from offloop.bus.types.timestamp import Timestamp
from offloop.trainer.arguments.checks import as_list, kind_of
from offloop.trainer.arguments.durations import check_max_duration
from offloop.trainer.fields.field import ProbeHook

_EVENTS = ALWAYS | STEP | {Event.AFTER_FORWARD}
_WITH_HOOKS = STEP | {Event.AFTER_FORWARD}
_AT_START = _WITH_HOOKS | {Event.AFTER_DATALOADER, Event.BATCH_START}
OWN_LOOP = Framework("your own loop", None, _EVENTS - {Event.AFTER_LOSS})
_Batch = TypeVar("_Batch")
_P = ParamSpec("_P")


class SizedIterator(Iterator[_Batch]):
    """An iterator with the length of all its items."""

    def __init__(self, items: Iterator[_Batch], length: Callable[[], int]) -> None:
        self._items = items
        self._length = length

    def __iter__(self) -> Iterator[_Batch]:
        # Returning the items avoids a call between two batches.
        return self._items

    def __next__(self) -> _Batch:
        return next(self._items)

    def __len__(self) -> int:
        return self._length()


class _StepHook:
    """A hook of optimizers that records a step. It is a class of its own so that a copy is independent of the run."""

    has_stepped = False

    def __call__(self, *_: Any) -> None:
        self.has_stepped = True


@contain("_hook", "_hook_details", "_start", "_begin_fit", "_use", "_publish", "_fire_requested", "_start_batch")
@contain("_start_observed", "_publish_outputs", "_before_backward", "_log")
class WatchedRun(RunEvents):
    """The run of a watched training, see :func:`watch`.

    It is a context manager, and also ends with :meth:`epochs` or the program."""

    # Contained methods publish; the others count, with and without a run.

    def __init__(
        self,
        gradient_accumulation_steps: int,
        *,
        options: Options,
        model: torch.nn.Module,
        optimizers: Sequence[Any],
        **more: Any,
    ) -> None:
        """Start the run; further arguments are those of :class:`AttachedTraining`."""
        super().__init__()
        self._is_disabled = not is_enabled(options)
        self.detached: bool = self._is_disabled
        """True if there is no run: it is disabled, or an error of offloop has ended it."""
        self._accumulation = gradient_accumulation_steps
        self._position = LoopPosition()
        self._resumed: Mapping[str, Any] | None = None
        self._has_begun = self._fetches = self._is_open = self._needs_outputs = False
        self._steps = _StepHook()
        self._demand_version = -1
        self._losses: list[Any] = []
        self._handles: list[Any] = []
        self._detail_handles: list[Any] = []
        self._data: dict[str, Any] = {}
        self._model, self._optimizers = model, optimizers
        self._hook(model, optimizers)
        self._start(options=options, model=model, optimizers=optimizers, **more)

    def _hook(self, model: torch.nn.Module, optimizers: Sequence[Any]) -> None:
        self._handles += [one.register_step_post_hook(self._steps) for one in optimizers]
        self._hook_details()

    def _hook_details(self) -> None:
        self._detail_handles += [
            self._model.register_forward_pre_hook(ProbeHook(self._before_forward), with_kwargs=True),
            self._model.register_forward_hook(ProbeHook(self._after_forward)),
            *(one.register_step_pre_hook(ProbeHook(self._before_step)) for one in self._optimizers),
        ]

    def _unhook_details(self) -> None:
        for handle in self._detail_handles:
            handle.remove()
        self._detail_handles.clear()

    def _needs_details(self) -> bool:
        training = self._training
        publisher = training.publisher
        if publisher is None or not training.has_noted_precision:
            return True
        if publisher.demand_version != self._demand_version:
            self._demand_version = publisher.demand_version
            self._needs_outputs = "outputs" in publisher.demand.fields
        return self._needs_outputs or not _WITH_HOOKS.isdisjoint(training.requested_events)

    def _publish(
        self, method: Callable[Concatenate[AttachedTraining, _P], object], *args: _P.args, **more: _P.kwargs
    ) -> None:
        if not self.detached:
            method(self._training, *args, **more)

    def _fire(self, event: Event) -> None:
        if not self.detached and event in self._training.requested_events:
            self._fire_requested(event)

    def _fire_requested(self, event: Event) -> None:
        self._training.fire(event)

    def _start(self, **given: Any) -> None:
        self._training = AttachedTraining(**given)
        self._training.at_exit = self.close

    @property
    def run_name(self) -> str | None:
        """The run's name; ``None`` if it is disabled or could not be started."""
        return self._training.state.run_name if hasattr(self, "_training") else None

    @property
    def stop_requested(self) -> bool:
        """True if the loop should stop. Ends a batch whose optimizer has stepped."""
        self._end_batch()
        return self._is_stopped

    @property
    def _is_stopped(self) -> bool:
        return not self.detached and self._training.state.stopped

    @property
    def stop_reason(self) -> str | None:
        """Reason and sender of the stop."""
        return None if self.detached else self._training.state.stop_reason

    def epochs(self, count: int) -> "SizedIterator[int]":
        """Return the numbers of the remaining epochs of ``count``, until the training is stopped.

        ``len()`` is how many remain."""
        position = self._position
        done = position.reached.values.epoch + (not self._has_begun and position.resumed == "ended")
        return SizedIterator(self._epochs(count), lambda: max(0, count - done))

    def _epochs(self, count: int) -> Iterator[int]:
        self._begin(f"{count}ep")
        position = self._position
        position.in_epochs = True
        for epoch in range(position.reached.values.epoch, count):
            self._publish(AttachedTraining.epoch_start)
            position.in_body = True
            try:
                yield epoch
            finally:
                position.in_body = False
            if self.stop_requested:
                break
            self._end_epoch()
        self.close()

    def batches(self, dataloader: Iterable[_Batch]) -> "SizedIterator[_Batch]":
        """Return the batches of a dataloader, until the training is stopped.

        Outside of :meth:`epochs` a pass is an epoch. ``len()`` is that of the dataloader, if it has one.

        In an epoch that resumes in its middle the dataloader must give the remaining batches. There are none after a
        state that was saved in the last batch of an epoch."""
        is_trained = self._position.in_epochs and self._position.resumed == "trained"
        return SizedIterator(self._batches(dataloader), lambda: 0 if is_trained else len(dataloader))  # type: ignore[arg-type]

    def _batches(self, dataloader: Iterable[_Batch]) -> Iterator[_Batch]:
        self._begin()
        self._fetches = True
        position = self._position
        is_trained, is_epoch = position.resumed == "trained", not position.in_epochs
        if is_epoch:
            if is_trained:
                self._end_epoch()
            self._publish(AttachedTraining.epoch_start)
        self._use(dataloader)
        number = position.begin_pass(dataloader)
        if is_trained and not is_epoch:
            position.end_pass()
            return
        source, steps = iter(dataloader), self._steps
        try:
            while True:
                if steps.has_stepped:
                    self._end_batch()
                if not self.detached:
                    training = self._training
                    if training.state.stopped:
                        position.stop_pass()
                        break
                    if not AT_FETCH.isdisjoint(training.requested_events):
                        self._publish(AttachedTraining.fetch_start)
                try:
                    batch = next(source)
                except StopIteration:
                    position.end_pass()
                    break
                samples, tokens = position.add(batch, fetched=1)
                if self._is_disabled:
                    # Without hooks the optimizer's steps are not seen.
                    steps.has_stepped = position.is_batch_complete(self._accumulation)
                if not self.detached:
                    publisher = training.publisher
                    if (
                        self._detail_handles
                        or publisher is None
                        or publisher.demand_version != self._demand_version
                        or not _AT_START.isdisjoint(training.requested_events)
                    ):
                        self._start_observed(batch, samples, tokens)
                    else:
                        try:
                            training.batch_start(batch, samples, tokens)
                        except Exception as error:  # noqa: BLE001  not by ``contain``: see _end_batch
                            detach_for(self, error)
                yield batch
        except BaseException:
            position.leave_pass(number)
            raise
        if is_epoch and not self.stop_requested:
            self._end_epoch()

    def log(self, values: Mapping[str, Any] | None = None, /, *, step: int | None = None, **more: Any) -> None:
        """Log numbers by name; tensors are read without waiting for their device.

        ``step`` defaults to the number of batches before the current one. ``loss`` is always the loss of the current
        batch, the mean over its microbatches."""
        is_simple = values is None and self._accumulation == 1 and len(more) == 1 and "loss" in more
        if is_simple and self._is_open and not self.detached:
            self._losses.append(more["loss"])
        else:
            self._log(values, more, step)

    def _log(self, values: Mapping[str, Any] | None, more: dict[str, Any], step: int | None) -> None:
        training = self._training
        if values is not None and not isinstance(values, Mapping):
            training.leave_out("what log() was given", f"a {type(values).__name__}: use names and numbers")
            values = None
        if values:
            more = {**values, **more}
        if "loss" in more:
            loss = more.pop("loss")
            # A model compiled with CUDA graphs overwrites this loss with the next microbatch's.
            is_overwritten = self._accumulation > 1 and isinstance(loss, torch.Tensor)
            if self._is_open:
                self._losses.append(loss.detach().clone() if is_overwritten else loss)
        if more:
            training.log(more, step)

    @contextmanager
    def evaluating(self, label: str = "eval") -> Iterator[dict[str, Any]]:
        """Enter an evaluation, in which no training time passes; put its metrics into the yielded dict."""
        self._end_batch()
        metrics: dict[str, Any] = {}
        with self._position.paused():
            self._publish(AttachedTraining.eval_start, label)
            yield metrics
            self._publish(AttachedTraining.eval_end, metrics)

    def checkpoint_saved(self) -> None:
        """Announce a checkpoint just before it is written: consumers save their callbacks' states."""
        self._end_batch()
        self._publish(AttachedTraining.checkpoint_saved)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, so that a resumed training continues the counters.

        It resumes with the next epoch if :meth:`batches` has given all batches of this one."""
        self._end_batch()
        resumed = None if self._resumed is None else self._resumed["run_name"]
        return {
            "run_name": self.run_name or resumed,
            "timestamp": list((self._known_time or self._position.reached).values),
            "epoch": self._position.epoch_state(self._is_stopped),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the counters from :meth:`state_dict`, before the first epoch.

        Raises :class:`offloop.bus.errors.ConfigurationError` for anything else, and in a training that has begun."""
        if self._has_begun:
            raise ConfigurationError("the training has begun: call load_state_dict() before the first epoch")
        self._position.load(saved)
        self._resumed = saved

    def close(self, error: BaseException | None = None) -> None:
        """End the run; the loop that follows is not watched. Can be called more than once."""
        self._unhook_details()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._end_batch(is_cut_off=error is not None)
        if error is None:
            self._publish(AttachedTraining.fit_end)
        self._publish(AttachedTraining.close, error)
        self._position.reached = self._known_time or self._position.reached
        self._is_open = False

    def detach(self, error: BaseException) -> None:
        """End the run because of an error of offloop."""
        if self._fetches:
            # Otherwise batches are counted by their forward passes, without a run too.
            self._unhook_details()
        position = self._position
        position.start()
        if hasattr(self, "_training"):
            training = self._training
            training.detach(error)
            if self._is_open:
                position.reached = training.state.timestamp
                for one in training.kept:
                    position.end_batch(one.samples, one.tokens)

    def __enter__(self) -> "WatchedRun":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)

    @property
    def _known_time(self) -> Timestamp | None:
        # While a command runs at the end of a batch, the batch is already counted.
        if self._is_open:
            self._publish(AttachedTraining.publish_kept)
        return self._training.state.timestamp if self._is_open and not self.detached else None

    def _begin(self, max_duration: str | None = None) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._position.start()
            self._begin_fit(max_duration)
            if self._position.resumed == "ended":
                self._end_epoch()

    def _begin_fit(self, max_duration: str | None) -> None:
        state = self._training.state
        state.max_duration = state.max_duration or max_duration
        self._training.fit_start(**self._data, resumed=self._resumed, timestamp=self._position.reached)
        self._is_open = True

    def _use(self, dataloader: Any) -> None:
        length = length_of(dataloader)
        batches = None if length is None else -(-length // self._accumulation)
        self._training.use_data(dataloader, batches, self._accumulation)

    def _end_epoch(self) -> None:
        self._end_batch()
        reached = self._known_time or self._position.reached
        self._publish(AttachedTraining.epoch_end)
        self._position.end_epoch(self._known_time or reached.to_next_epoch())

    def _start_observed(self, batch: Any, samples: int, tokens: int) -> None:
        # Hooks make each call of a model some 10 microseconds longer: they are there while a consumer needs them.
        if not self._needs_details():
            self._unhook_details()
        elif not self._detail_handles:
            self._hook_details()
        training = self._training
        if Event.AFTER_DATALOADER in training.requested_events:
            training.state.batch = batch
            training.fire(Event.AFTER_DATALOADER)
        training.batch_start(batch, samples=samples, tokens=tokens)

    def _start_batch(self, batch: Any, samples: int, tokens: int) -> None:
        self._training.batch_start(batch, samples=samples, tokens=tokens)

    def _before_forward(self, model: torch.nn.Module, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        # Also called for a forward pass of an evaluation.
        self._end_batch()
        if not model.training:
            return
        if not self._fetches:
            self._begin()
            self._take_inputs(inputs[0] if len(inputs) == 1 and not keywords else keywords if not inputs else [*inputs])
        self._fire(Event.BEFORE_FORWARD)

    def _take_inputs(self, batch: Any) -> None:
        samples, tokens = self._position.add(batch)
        self._start_batch(batch, samples, tokens)

    def _after_forward(self, model: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        if model.training:
            self._publish_outputs(outputs)

    def _publish_outputs(self, outputs: Any) -> None:
        training = self._training
        if not training.has_noted_precision and torch.is_grad_enabled():
            training.note_precision(_with_gradient(outputs))
        training.state.outputs = outputs
        training.fire(Event.AFTER_FORWARD)
        self._watch_backward(outputs)

    def _watch_backward(self, outputs: Any) -> None:
        training = self._training
        if Event.BEFORE_BACKWARD in training.requested_events or Event.AFTER_BACKWARD in training.requested_events:
            tensor = _with_gradient(outputs)
            if tensor is not None:
                tensor.register_hook(ProbeHook(self._before_backward))  # type: ignore[no-untyped-call]

    def _before_backward(self, gradient: torch.Tensor) -> None:
        self._training.fire(Event.BEFORE_BACKWARD)
        torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self._fire(Event.AFTER_BACKWARD)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if not self._steps.has_stepped:
            self._fire(Event.AFTER_TRAIN_BATCH)

    def _end_batch(self, *, is_cut_off: bool = False) -> None:
        steps, position = self._steps, self._position
        if not steps.has_stepped:
            return
        steps.has_stepped = False
        position.trained = position.fetched
        losses, self._losses = self._losses, []
        is_counted = False
        if self._is_open and not self.detached:
            training = self._training
            # Not by ``contain``, whose call would be one more for each batch.
            try:
                if len(losses) > 1:
                    losses = [loss for given in losses if (loss := training.as_loss(given)) is not None]
                for loss in losses:
                    training.add_loss(loss, 1 / len(losses))
                if is_cut_off:
                    training.batch_cut_off()
                else:
                    training.batch_end()
                is_counted = True
            except Exception as error:  # noqa: BLE001
                is_counted = not training.in_batch
                # Otherwise the run ends with the error that has cut off the batch, which may be this one's cause.
                if not is_cut_off:
                    detach_for(self, error)
        if not is_counted:
            position.end_batch(position.samples, position.tokens)
        position.samples = position.tokens = 0


def watch(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    scheduler: Any | Sequence[Any] | None = None,
    *,
    max_duration: TimeInput | None = None,
    gradient_accumulation_steps: int = 1,
    evaluate: Callable[[], object] | None = None,
    checkpoint: Callable[[], object] | None = None,
    **options: Unpack[Options],
) -> WatchedRun:
    """Publish a training loop as a run, by hooks of its model and its optimizer.

        run = offloop.watch(model, optimizer, max_duration="10ep")
        for epoch in run.epochs(10):
            for batch in run.batches(loader):
                loss = ...; loss.backward(); optimizer.step(); optimizer.zero_grad()
                run.log(loss=loss)

    A batch is a step of the optimizer, or of several optimizers for the same batch of the dataloader. With several
    ranks each of them watches, once ``torch.distributed`` is initialized. If the run cannot be started, the reason is
    shown and the training continues without one.

    Args:
        model, optimizer, scheduler: the trained model, its optimizer and learning rate scheduler; lists for several.
        max_duration: duration of the training; by default the count given to :meth:`WatchedRun.epochs`.
        gradient_accumulation_steps: batches of the dataloader in a step of the optimizer.
        evaluate, checkpoint: functions for ``offloop send RUN set eval now`` and ``offloop send RUN checkpoint``,
            called between two batches on every rank.
        options: as in :class:`offloop.trainer.Trainer`, see :class:`offloop.attached.options.Options`.

    Raises :class:`offloop.bus.errors.ConfigurationError` for invalid arguments."""
    check_options(options)
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"model is {kind_of(model)}: give a torch.nn.Module, and after it the optimizer")
    if max_duration is not None:
        check_max_duration(max_duration)
    return WatchedRun(
        gradient_accumulation_steps,
        framework=OWN_LOOP,
        options=options,
        model=model,
        optimizers=as_list(optimizer, torch.optim.Optimizer, "optimizer"),
        schedulers=as_list(scheduler, object, "scheduler"),
        max_duration=max_duration,
        evaluate=evaluate or "give watch() a function evaluate=",
        checkpoint=checkpoint or "give watch() a function checkpoint=",
    )


def _with_gradient(outputs: Any) -> torch.Tensor | None:
    if isinstance(outputs, torch.Tensor):
        return outputs if outputs.requires_grad else None
    parts = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, list | tuple) else ()
    return next((found for part in parts if (found := _with_gradient(part)) is not None), None)
