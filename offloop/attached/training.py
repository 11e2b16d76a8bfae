"""A training in another framework's loop: reports of an adapter become events of a run."""

import atexit
import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from numbers import Real
from threading import get_ident
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from offloop.attached.gradients import keep_gradients
from offloop.attached.joining import join_ranks
from offloop.attached.options import Options, make_stream
from offloop.attached.position import count
from offloop.automatic import note_attached
from offloop.bus.checkpoints.announced import Score, announce_checkpoint
from offloop.bus.errors import ConfigurationError
from offloop.bus.printing import say, share_terminal
from offloop.bus.protocol.frames import as_utf8
from offloop.bus.publisher.logged import LoggedValues, check_name, check_value, checked_step
from offloop.bus.publisher.program_end import LEFT, error_at_exit, ignoring_sigterm, watch_main_thread
from offloop.bus.publisher.publisher import Publisher, ending_for
from offloop.bus.runs.directory import is_name_for, new_run_name
from offloop.bus.types.deferred import Deferred
from offloop.bus.types.demand import BASE_EVENTS
from offloop.bus.types.event import Event
from offloop.bus.types.metrics import Mode
from offloop.bus.types.time import TimeInput
from offloop.bus.types.timestamp import Timestamp, wall_clock
from offloop.trainer.control.remote_control import RemoteControl
from offloop.trainer.control.settings import Settings, evaluate, set_learning_rate
from offloop.trainer.data.spec import DataSpec
from offloop.trainer.device.device import GpuDevice, get_device
from offloop.trainer.distributed.ranks import Ranks
from offloop.trainer.engine.state import AlgorithmLogger, State
from offloop.trainer.fields.field import Field, FieldUnsupportedError

ALWAYS = frozenset(
    {Event.INIT, Event.FIT_START, Event.EPOCH_START, Event.BEFORE_DATALOADER, Event.AFTER_DATALOADER}
    | {Event.BATCH_START, Event.BATCH_END, Event.BATCH_CHECKPOINT, Event.EPOCH_END, Event.EPOCH_CHECKPOINT}
    | {Event.EVAL_BEFORE_ALL, Event.EVAL_START, Event.EVAL_END, Event.EVAL_AFTER_ALL, Event.FIT_END}
)
AT_FETCH = frozenset({Event.BATCH_CHECKPOINT, Event.BEFORE_DATALOADER})
"""Events of :meth:`AttachedTraining.fetch_start` between two batches of an epoch."""
EVALUATION_BATCHES = frozenset({Event.EVAL_BATCH_START, Event.EVAL_BATCH_END})
STEP = frozenset(
    {Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH}
)
PREDICTION = frozenset({Event.PREDICT_START, Event.PREDICT_BATCH_START, Event.PREDICT_BATCH_END, Event.PREDICT_END})

_BATCH_START, _BATCH_END, _BATCH_CHECKPOINT = Event.BATCH_START, Event.BATCH_END, Event.BATCH_CHECKPOINT
_new_tuple = tuple.__new__  # a named tuple's own is a Python function
_PRECISIONS = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}
_AUTOCAST = {torch.bfloat16: "amp_bf16", torch.float16: "amp_fp16"}
_WITHOUT = {"checkpoint": "the training is saved by its own loop; use weights_checkpoint for the weights"}
_SUMMED = 5  # numbers of a batch that the ranks add up, see batch_end()


class Framework(NamedTuple):
    name: str
    package: str | None = None
    events: frozenset[Event] = ALWAYS  # events that it reports; consumers never receive others
    without: Mapping[str, str] = {}  # unavailable fields, with the reason
    keeps_gradients: bool = False  # true if the gradients of a batch exist at its end

    @property
    def version(self) -> str | None:
        with contextlib.suppress(PackageNotFoundError):
            return None if self.package is None else version(self.package)
        return None


class EndedBatch(NamedTuple):
    """A batch whose event is not published yet."""

    time: int  # nanoseconds, by the monotonic clock
    samples: int
    tokens: int
    loss: "float | Deferred | None"
    lr: dict[str, list[float]]
    logged: list[list[Any]]
    reached: Callable[[], Timestamp] | None  # gives the framework's timestamp


class AttachedTraining:
    """The run of a training in another framework's loop.

    An adapter creates it when the training begins, and calls the methods named after events in the order of
    :class:`offloop.bus.types.event.Event`, on all ranks in the same order. The run begins with :meth:`open`, by default
    with the first event: a loaded checkpoint decides whether it is the next attempt of a run. A batch is a step of the
    optimizer; each dataloader batch in it is a microbatch.

    Args:
        framework: the source of the events.
        options: the user's options of the adapter.
        model: the trained module, wrapped or not.
        optimizers: torch's, unwrapped, or objects with ``param_groups`` that have an ``lr`` each.
        schedulers: torch's, which continue from a rate that is set.
        max_duration: such as ``5ep``; ``None`` if unknown.
        precision: the framework's name of it; ``None`` if unknown, see :meth:`note_precision`.
        config: the framework's configuration, for the hyperparameters.
        evaluate, checkpoint, set_lr: functions for these commands, or the reason why they are refused. ``set_lr`` is
            called with the rate, and sets it in the optimizers by default.

    Raises RankError, ConfigurationError if not all ranks attach."""

    def __init__(
        self,
        framework: Framework,
        options: Options,
        model: Any,
        optimizers: Iterable[Any] = (),
        schedulers: Iterable[Any] = (),
        *,
        max_duration: TimeInput | None = None,
        precision: str | None = None,
        config: Mapping[str, Any] | None = None,
        evaluate: Callable[[], object] | str = "the loop of this framework decides when to evaluate",
        checkpoint: Callable[[], object] | str = "the loop of this framework decides when to save",
        set_lr: Callable[[float], object] | str | None = None,
    ) -> None:
        share_terminal()
        self.ranks: Ranks | None = join_ranks()
        ranks = self.ranks
        name = options.get("run_name") or new_run_name("run", options.get("runs_dir"))
        self._asked_name = name = name if ranks is None else ranks.share(name)
        self._thread = get_ident()
        for training in [one for one in _open if one._asked_name == name and one._thread == self._thread]:
            # For example, a notebook's cell was executed again. One of another thread may be at work.
            training.at_exit(KeyboardInterrupt("another training of this program has its name"))
        gpu = next((one.device for one in model.parameters() if one.is_cuda), None)
        self.state: State = State(
            model=unwrapped(model),
            device=get_device("cpu") if gpu is None else GpuDevice(gpu),
            precision=precision,
            seed=torch.initial_seed(),
            run_name=name,
            rank=0 if ranks is None else ranks.rank,
            world_size=1 if ranks is None else ranks.world_size,
            optimizers=list(optimizers),
            schedulers=list(schedulers),
        )
        state = self.state
        state.max_duration = max_duration
        del state.evaluators
        self._clock = wall_clock()
        self._time_zero = self._clock() - monotonic_ns()
        self.kept: deque[EndedBatch] = deque()
        """Ended batches that :meth:`publish_kept` publishes."""
        self._keep_until = self._keep_version = 0
        self._logger = _ValueLogger(state)
        self._stream = make_stream(options, config or {})
        self._facts = _limit_fields(self._stream.fields, framework)
        self._evaluate_now, self._save_now = _command("evaluate", evaluate), _command("save a checkpoint", checkpoint)
        self._control = RemoteControl(state, _settings(options, set_lr), ranks, say=self._say)
        self.publisher: Publisher | None = None  # the publisher of a begun run
        self.fire: Callable[[Event], object] = self._open_and_fire
        self._run_event: Callable[[Event], object] = self._open_and_fire
        self._publish: Callable[[Event], object] = self._open_and_fire
        self.requested_events: set[Event] = set()
        self._samples = self._tokens = self._began = self._paused_at = 0
        self._microbatches = 1
        self._is_introduced = False
        self.in_batch: bool = False
        self.has_noted_precision: bool = False
        self._loss: torch.Tensor | float | None = None
        self._reads_at_once = state.device.name == "cpu"
        self._save_event: Event | None = None
        self._train_data: DataSpec | None = None
        self.at_exit: Callable[[BaseException | None], object] = self.close
        """Ends the run of an abandoned loop when the program ends; called with the program's error."""
        self.error_if_left: BaseException | None = None
        """Error of an abandoned loop, if the framework calls a hook at every other end."""
        watch_main_thread()
        _open.add(self)

    def open(self, resumed: Mapping[str, Any] | None = None, *, continues: bool = False) -> None:
        """Begin the run, unless it has begun. Raises OffloopError if it cannot be started.

        It is the next attempt of the run of ``resumed``, an earlier :meth:`state_dict`, or of the last run if it
        ``continues`` in another way. Otherwise, and if ``resumed`` is of another name, it is a new run."""
        if self.publisher is not None:
            return
        state, asked = self.state, self._asked_name
        known = None if resumed is None else resumed["run_name"]
        saved = _run_names.get(asked, asked) if known is None else str(known)
        # A training that branches from another run's checkpoint is a new run.
        continues = (continues or resumed is not None) and is_name_for(saved, asked)
        if continues:
            state.run_name = saved
        if self.ranks is not None:
            state.run_name, continues = self.ranks.share([state.run_name, continues])
        engine = self._stream.start(
            state,
            self._logger,
            self._control,
            max_duration=state.max_duration,
            clock=self._clock,
            ranks=self.ranks,
            shows=True,
            facts=lambda _: self._facts,
            resume=continues,
        )
        _run_names[asked] = state.run_name
        self.publisher = self._stream.publisher
        assert self.publisher is not None  # there is one with `publish`
        self.fire = self._run_event = engine.run_event
        self._publish = engine.publish
        self.requested_events = self.publisher.requested_events
        note_attached()
        self.fire(Event.INIT)

    def _open_and_fire(self, event: Event) -> None:
        self.open()
        self.fire(event)

    # The loop, in its order.

    def fit_start(
        self,
        *,
        dataloader: Any = None,
        batches_per_epoch: int | None = None,
        microbatches: int = 1,
        resumed: Mapping[str, Any] | None = None,
        earlier: Mapping[str, Any] | None = None,
        batches_done: int = 0,
        epochs_done: int = 0,
        timestamp: Timestamp | None = None,
        begins_again: bool = False,
    ) -> None:
        """Start the training.

        Args:
            dataloader, batches_per_epoch, microbatches: see :meth:`use_data`.
            resumed: the :meth:`state_dict` in the checkpoint that the training resumes from.
            earlier: that at the end of this program's last training. One with as many batches continues here.
            batches_done, epochs_done: the framework's own counters, which take precedence over ``resumed``.
            timestamp: the complete training time of the framework, which takes precedence over both.
            begins_again: whether this is another attempt of the run from the beginning."""
        state = self.state
        saved = resumed or (earlier if batches_done else None)
        reached = timestamp or time_reached(saved, batches_done, epochs_done, batches_per_epoch)
        self.open(resumed, continues=begins_again or reached.values.batch > 0 or reached.values.epoch > 0)
        assert self.publisher is not None  # it is open
        state.timestamp = reached
        if resumed is not None and resumed["run_name"] is not None:
            self.publisher.mark_checkpoint("load", state.timestamp.values, resumed["run_name"])
        if not self._is_introduced:
            self._is_introduced = True
            done = state.timestamp.values.batch
            self._say(self._stream.introduce(state.run_name, f"batch {done}" if done else None))
        self.use_data(dataloader, batches_per_epoch, microbatches)
        state.evaluate_now = self._evaluate_now
        self._control.checkpoint = self._save_now
        state.fitting = True
        self.fire(Event.FIT_START)
        self._began = monotonic_ns() // 1000

    def use_data(self, dataloader: Any, batches_per_epoch: int | None, microbatches: int = 1) -> None:
        """Set the training data, optimizer steps per epoch, and dataloader batches per step; ``None`` if unknown."""
        self.publish_kept()
        self._microbatches = microbatches
        state, size = self.state, getattr(dataloader, "batch_size", None)
        if size is None:
            size = getattr(getattr(dataloader, "batch_sampler", None), "batch_size", None)
        if isinstance(size, int):
            state.device_train_microbatch_size = size if microbatches > 1 else None
            state.train_dataloader = SimpleNamespace(
                batch_size=size * microbatches, dataset=getattr(dataloader, "dataset", None)
            )
        self._train_data = _sized(batches_per_epoch)
        state.set_dataloader(self._train_data, "train")

    def epoch_start(self) -> None:
        # A resumed epoch has no event.
        self.publish_kept()
        self.save_place()
        if not self.state.timestamp.values.batch_in_epoch:
            self.fire(Event.EPOCH_START)

    def fetch_start(self) -> None:
        self.save_place()
        self.fire(Event.BEFORE_DATALOADER)

    def batch_start(self, batch: Any = None, samples: int | None = None, tokens: int | None = None) -> None:
        """Start a batch, or a further microbatch of it. Missing counts are taken from ``batch``."""
        is_first = not self.in_batch
        if is_first:
            self.in_batch = True
            if self._save_event is not None:
                self.save_place()
            self._samples = self._tokens = 0
        if samples is None or tokens is None:
            counted = count(batch)
            samples = counted[0] if samples is None else samples
            tokens = counted[1] if tokens is None else tokens
        self._samples += samples
        self._tokens += tokens
        state = self.state
        state.batch = batch
        state.batch_size = self._samples or None
        if is_first and (_BATCH_START in self.requested_events or self.publisher is None):
            self.fire(_BATCH_START)

    def note_precision(self, output: torch.Tensor | None) -> None:
        """Record the precision of the first pass, with a gradient in ``output``; unknown if the model casts weights."""
        self.publish_kept()
        self.has_noted_precision = True
        state = self.state
        if state.precision is None:
            kind = (state.device.torch_device if output is None else output.device).type
            if torch.is_autocast_enabled(kind):
                state.precision = _AUTOCAST.get(torch.get_autocast_dtype(kind))
            elif output is None or not _casts_weights(output):
                state.precision = precision_of(state.model)
            state.context_changed = True

    def add_loss(self, loss: Any, share: float = 1.0) -> None:
        """Add the loss of a microbatch, times its share of the batch. Reports anything but a number."""
        if share == 1.0 and self._loss is None:
            try:
                number = loss.item() if self._reads_at_once and loss.__class__ is torch.Tensor else loss
            except RuntimeError:
                number = None  # not one number: as_loss() reports it
            if number.__class__ is float:
                self._loss = number
                return
        checked = self.as_loss(loss)
        if checked is not None:
            # A model compiled with CUDA graphs overwrites this loss with the next microbatch's.
            part = checked if share == 1.0 and self._microbatches == 1 else checked * share
            self._loss = part if self._loss is None else self._loss + part

    def batch_end(self, *, tokens: int | None = None, reached: Callable[[], Timestamp] | None = None) -> None:
        """End the batch and apply commands. ``tokens`` are this rank's, ``reached`` gives the framework's timestamp.

        Between the operations of a model, code runs several times as long as it does for many batches in turn. So an
        event of no more than numbers is kept, and published with those of the next batches, before anything else."""
        state, now, publisher, samples, loss = self.state, monotonic_ns(), self.publisher, self._samples, self._loss
        tokens = self._tokens if tokens is None else tokens
        is_known = publisher is not None and publisher.demand_version == self._keep_version and now < self._keep_until
        if (is_known or self._may_keep(now)) and not (state.stop_requested or self._control.waiting):
            number = state.device.read_later(loss) if isinstance(loss, torch.Tensor) else loss
            logged = self._logger.take() if self._logger.entries else []
            ended = (now, samples, tokens, number, self._learning_rates(), logged, reached)
            self.kept.append(_new_tuple(EndedBatch, ended))
            self.fire = self._fire_after_kept
            self.in_batch, self._loss = False, None
            return
        self.publish_kept()
        elapsed = now // 1000 - self._began
        stop: int = state.stop_requested
        commands: Any = self._control.waiting
        if self.ranks is not None:
            mine = (samples, tokens, elapsed if state.rank == 0 else 0, int(stop), len(commands))
            samples, tokens, elapsed, stop, commands = self.ranks.sum_batch(*mine)
        self.in_batch, self._loss = False, None
        self._advance(now, loss, reached() if reached else state.timestamp.advance_batch(samples, tokens, elapsed))
        if stop:
            state.stop_now(state.requested_reason)
        requested = self.requested_events
        if _BATCH_END in requested:
            self._publish(_BATCH_END)
        if commands:
            self.apply_commands(_BATCH_END)
        if _BATCH_CHECKPOINT in requested:
            self._save_event = _BATCH_CHECKPOINT

    def batch_cut_off(self) -> None:
        """End the last batch before an error, without commands and without the other ranks, which may not come.

        Their batches are assumed to have the same size."""
        self.publish_kept()
        state, now, loss, published = self.state, monotonic_ns(), self._loss, self._stream.published
        samples, tokens = self._samples * state.world_size, self._tokens * state.world_size
        self.in_batch, self._loss = False, None
        self._advance(now, loss, state.timestamp.advance_batch(samples, tokens, now // 1000 - self._began))
        if published is not None and _BATCH_END in self.requested_events:
            published.publish(_BATCH_END)

    def _may_keep(self, now: int) -> bool:
        publisher, published = self.publisher, self._stream.published
        if publisher is None or published is None or self._stream.waits_for or self.ranks is not None:
            return False
        is_plain = published.is_plain and self.requested_events <= BASE_EVENTS
        self._keep_until = publisher.gathers_until - self._time_zero if is_plain else 0
        self._keep_version = publisher.demand_version
        self._learning_rates = published.learning_rates
        return now < self._keep_until

    def publish_kept(self) -> None:
        """Publish the events of ended batches: called before anything else is, and before what they report changes."""
        kept, state, logger = self.kept, self.state, self._logger
        if not kept:
            return
        published, requested = self._stream.published, self.requested_events
        assert published is not None  # else no batch is kept
        batch_size, later = state.batch_size, logger.take()
        try:
            while kept:
                time, samples, tokens, loss, lr, logged, reached = kept.popleft()
                elapsed = time // 1000 - self._began
                timestamp = reached() if reached else state.timestamp.advance_batch(samples, tokens, elapsed)
                self._advance(time, loss, timestamp)
                if _BATCH_END in requested:
                    state.batch_size = samples or None
                    logger.entries += logged
                    published.publish(_BATCH_END, lr=lr, time=time + self._time_zero)
        finally:
            state.batch_size = batch_size
            logger.entries[:0] = later
        self.fire = self._run_event

    def _advance(self, now: int, loss: Any, timestamp: Timestamp) -> None:
        state = self.state
        state.batch_loss = loss
        state.previous_timestamp = state.timestamp
        state.timestamp = timestamp
        self._began = now // 1000

    def _fire_after_kept(self, event: Event) -> None:
        if event in self.requested_events:
            self.publish_kept()
            self._run_event(event)

    def epoch_end(self, *, timestamp: Timestamp | None = None) -> None:
        """End the epoch. A single rank applies stops, so that an evaluation can stop before the next epoch."""
        self.publish_kept()
        self.save_place()
        state = self.state
        state.previous_timestamp = state.timestamp
        state.timestamp = timestamp or state.timestamp.to_next_epoch()
        self.fire(Event.EPOCH_END)
        if self.ranks is None:
            self._control.apply_stops(Event.EPOCH_END)
        else:
            self.ranks.end_epoch(_SUMMED)
        self._save_event = Event.EPOCH_CHECKPOINT

    def save_place(self) -> None:
        """Fire the pending checkpoint event of the last batch or epoch, after evaluations that may follow it."""
        event, self._save_event = self._save_event, None
        if event is not None:
            self.fire(event)

    def eval_start(self, label: str = "eval", *, batches: int | None = None, alone: bool = True) -> None:
        """Start an evaluation; unless ``alone``, the adapter fires EVAL_BEFORE_ALL and EVAL_AFTER_ALL."""
        state = self.state
        self.open()
        self.publish_kept()
        self._paused_at = monotonic_ns() // 1000
        if alone and Event.EVAL_BEFORE_ALL in self.requested_events:
            self.fire(Event.EVAL_BEFORE_ALL)
        state.set_dataloader(_sized(batches), as_utf8(str(label)))
        state.eval_timestamp = Timestamp()
        self.fire(Event.EVAL_START)

    def eval_batch_start(self, batch: Any = None) -> None:
        self._fire_for(batch, Event.EVAL_BATCH_START)

    def eval_batch_end(self) -> None:
        state = self.state
        state.eval_timestamp = state.eval_timestamp.advance_batch(state.batch_size or 0, 0, 0)
        self.fire(Event.EVAL_BATCH_END)

    def _fire_for(self, batch: Any, event: Event) -> None:
        self.state.batch, self.state.batch_size = batch, count(batch)[0] or None
        self.fire(event)

    def eval_end(self, metrics: Mapping[str, Any], *, alone: bool = True) -> None:
        """End the evaluation with its metrics. Reading tensors waits for a GPU."""
        state, label = self.state, self.state.dataloader_label or "eval"
        state.eval_metric_values = {**state.eval_metric_values, label: self._logger.numbers_of(metrics)}
        took = monotonic_ns() // 1000 - self._paused_at
        state.total_eval_wct += took
        # Training time does not pass during evaluations.
        self._began += took
        self.fire(Event.EVAL_END)
        self._use_training_data()
        if alone:
            self.fire(Event.EVAL_AFTER_ALL)

    def _use_training_data(self) -> None:
        is_fitting = self.state.fitting
        self.state.set_dataloader(self._train_data if is_fitting else None, "train" if is_fitting else None)

    def predict_start(self, *, batches: int | None = None) -> None:
        self.publish_kept()
        self.state.set_dataloader(_sized(batches), "predict")
        self.state.predict_timestamp = Timestamp()
        self.fire(Event.PREDICT_START)

    def predict_batch_start(self, batch: Any = None) -> None:
        self._fire_for(batch, Event.PREDICT_BATCH_START)

    def predict_batch_end(self) -> None:
        state = self.state
        state.predict_timestamp = state.predict_timestamp.advance_batch(state.batch_size or 0, 0, 0)
        self.fire(Event.PREDICT_BATCH_END)

    def predict_end(self) -> None:
        self.fire(Event.PREDICT_END)
        self._use_training_data()

    def fit_end(self) -> None:
        self.publish_kept()
        self.save_place()
        state = self.state
        if not state.fitting:
            return
        state.fitting = False
        del state.evaluate_now
        self._control.checkpoint = None
        self.fire(Event.FIT_END)
        self._control.reject_pending()

    def close(self, error: BaseException | None = None) -> None:
        """End the run: failed with an error, stopped after Ctrl-C or a command. Waits briefly until all is recorded."""
        _open.discard(self)
        self._control.end_profile()
        self.publish_kept()
        status, text, reason = ending_for(error)
        if error is None and self.state.stopped:
            status, reason = "stopped", self.state.stop_reason
        if self.publisher is None and error is not None and self.ranks is None:
            # Shows why the training ended before its first event.
            self.open()
        self._stream.close(status, text, reason, drain=error is None)

    def __del__(self) -> None:
        # Kept batches are not the publisher's yet, which closes itself in the same way.
        publisher: Publisher | None = getattr(self, "publisher", None)
        if publisher is not None and not publisher.closed:
            self.at_exit(KeyboardInterrupt(LEFT))

    def detach(self, error: BaseException) -> None:
        _open.discard(self)
        self._control.end_profile()
        # The error that detaches is reported already.
        with contextlib.suppress(Exception):
            self.publish_kept()
        if self.ranks is not None and not self.ranks.closed:
            # They wait for this rank in the next batch, and get an error when it leaves.
            self.ranks.disconnect()
        self._stream.close("failed", f"offloop was detached: {type(error).__name__}: {error}", None, drain=False)

    # At any time.

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers by name, by default for the current or last batch. Tensors are read without waiting."""
        if not values:
            return
        if step is not None:
            try:
                step = checked_step(step)
            except ConfigurationError as error:
                self.leave_out("step", error)
                step = None
        self._logger.log_metrics(values, self.step if step is None else step)

    @property
    def step(self) -> int:
        """The number of batches before the current or last one."""
        done = self.batches_done
        return done if self.in_batch else max(done - 1, 0)

    @property
    def batches_done(self) -> int:
        return self.state.timestamp.values.batch + len(self.kept)

    def publish_own(self, event: Event, fields: dict[str, Any]) -> None:
        """Publish a custom event or rows of a table."""
        self.publish_kept()
        self._logger.publish_own(event, fields)

    def log_metrics(self, values: Mapping[str, Any]) -> None:
        self.log({f"metrics/train/{name}": value for name, value in values.items()})

    def leave_out(self, name: object, reason: object) -> None:
        self._logger.left_out.add(name, reason)

    def as_loss(self, value: Any) -> "torch.Tensor | float | None":
        """Return the loss for :meth:`add_loss`; ``None``, with a report, for anything but a number."""
        if (
            isinstance(value, torch.Tensor)
            and value.layout is torch.strided
            and value.numel() == 1
            and not (value.is_complex() or value.is_meta or value.is_quantized or value.is_nested)
        ):
            return value.detach().reshape(()) if value.dim() else value.detach()
        return self._logger.numbers_of({"loss": value}).get("loss")

    def apply_commands(self, event: Event) -> None:
        """Apply waiting commands between two batches, at the same place on all ranks. No training time passes."""
        began = monotonic_ns()
        self._control.apply(event)
        self._began += (monotonic_ns() - began) // 1000

    def checkpoint_saved(self) -> None:
        """Announce a checkpoint before it is written: consumers save their callbacks' states."""
        self.publish_kept()
        if self.state.rank == 0 and self.publisher is not None:
            self.publisher.mark_checkpoint("save", self.state.timestamp.values)

    def checkpoint_written(
        self, path: "str | os.PathLike[str]", metric: str | None = None, value: Any = None, mode: Mode = "min"
    ) -> None:
        """List a checkpoint, compared by ``metric`` with this ``value`` and ``mode``, and report it to its command."""
        self.publish_kept()
        if self.state.rank == 0 and self.publisher is not None:
            reached = self.state.timestamp.values
            number = None if metric is None else self._logger.numbers_of({metric: value}).get(metric)
            score = None if metric is None or number is None else Score(metric, number, mode)
            announce_checkpoint(self.publisher.run_dir, path, reached.epoch, reached.batch, score)
        self._control.checkpoint_written(path)

    def state_dict(self) -> dict[str, Any]:
        self.publish_kept()
        return {"run_name": self.state.run_name, "timestamp": list(self.state.timestamp.values)}

    def _say(self, line: str) -> None:
        if self.state.rank == 0:
            say(line, err=True)


class _ValueLogger(AlgorithmLogger):
    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._names: set[str] = set()
        self._reads_at_once = state.device.name == "cpu"

    def _value_of(self, name: str, value: Any) -> Any:
        if name.__class__ is not str or name not in self._names:
            check_name(name, self._names)
        if value.__class__ is torch.Tensor and self._reads_at_once and value.numel() == 1:
            value = value.item()
        is_one = isinstance(value, torch.Tensor) and value.numel() == 1
        return check_value(name, self._state.device.read_later(value.detach().reshape(())) if is_one else value)

    def numbers_of(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return the values that are numbers, read at once; others are reported."""
        numbers: dict[str, float] = {}
        for name, value in metrics.items():
            try:
                number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
                if not isinstance(number := check_value(name, number), Deferred):
                    numbers[check_name(name, self._names)] = float(number)
            except Exception as error:  # noqa: BLE001  it is the user's value
                self.left_out.add(name, error)
        return numbers

    def take(self) -> Any:
        gathered = LoggedValues(self.left_out)
        for step, values in super().take():
            gathered.add(values, step)
        return gathered.entries()


def precision_of(model: torch.nn.Module) -> str | None:
    dtypes = (one.dtype for one in model.parameters() if one.is_floating_point())
    return _PRECISIONS.get(next(dtypes, torch.float32))


def _casts_weights(output: torch.Tensor) -> bool:
    waiting: list[Any] = [output.grad_fn]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        before = [one for one, _ in node.next_functions]
        if node.name() == "ToCopyBackward0" and any(hasattr(one, "variable") for one in before):
            return True
        waiting += before
    return False


def time_reached(
    resumed: Mapping[str, Any] | None, batches: int, epochs: int, batches_per_epoch: int | None
) -> Timestamp:
    """Return the training time by a framework's counters and an :meth:`AttachedTraining.state_dict`."""
    if resumed:
        saved = Timestamp.from_values(resumed["timestamp"])
        if saved.values.batch == batches:
            # It may have been saved between the last batch of an epoch and the epoch's end.
            return saved.to_next_epoch() if saved.values.epoch < epochs else saved
    in_epoch = max(0, batches - epochs * (batches_per_epoch or batches))
    return Timestamp(batch=batches, epoch=epochs, batch_in_epoch=in_epoch)


def _evaluate(state: State, value: Any) -> None:
    if not state.fitting:
        raise ConfigurationError("the training has ended")
    evaluate(state, value)


def _command(what: str, how: Callable[[], object] | str) -> Callable[[], object]:
    if not isinstance(how, str):
        return how
    message = f"cannot {what} on command: {how}"

    def refuse() -> None:
        raise ConfigurationError(message)

    return refuse


def _settings(options: Options, set_lr: Callable[[float], object] | str | None) -> Settings:
    def set_rate(state: State, value: Any) -> None:
        if set_lr is None:
            set_learning_rate(state, value)
            return
        if isinstance(set_lr, str):
            raise ConfigurationError(f"cannot set lr: {set_lr}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigurationError(f"lr is {value!r}: use a number of at least 0, such as 0.01")
        set_lr(float(value))

    settings = Settings({"lr": set_rate, "eval": _evaluate})
    for name, function in (options.get("on_set") or {}).items():
        settings.register(name, lambda _, value, function=function: function(value))  # type: ignore[misc]
    return settings


def _limit_fields(fields: dict[str, Field], framework: Framework) -> dict[str, Any]:
    """Make the fields that a framework lacks unavailable; return the stream's description of the framework."""
    if not framework.keeps_gradients:
        keep_gradients(fields)
    without = {**_WITHOUT, **framework.without}
    for name, reason in without.items():
        fields[name] = _unavailable(fields[name], reason)
    return {
        "framework": {"name": framework.name, "version": framework.version},
        "unavailable": {"events": [one.value for one in Event if one not in framework.events], "fields": without},
    }


def _unavailable(field: Field, reason: str) -> Field:
    def compute(_: State) -> None:
        raise FieldUnsupportedError(reason)

    return field._replace(compute=compute, probe=None, reserves=False)


def _sized(batches: int | None) -> DataSpec | None:
    return None if batches is None else DataSpec(range(batches))


def numbers_in(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    }


def unwrapped(model: Any) -> Any:
    """Return the model without wrappers of ``torch.compile`` and ``DistributedDataParallel``."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


_run_names: dict[str, str] = {}  # requested name to the name of this program's last run
_open: "weakref.WeakSet[AttachedTraining]" = weakref.WeakSet()


def _close_forgotten() -> None:
    with ignoring_sigterm():
        for training in list(_open):
            # Ranks that have left their group can no longer agree.
            end = training.at_exit if training.ranks is None or dist.is_initialized() else training.close
            error = error_at_exit(training.error_if_left) or training.error_if_left
            has_ended = training.publisher is not None and training.publisher.fit_has_ended
            end(None if has_ended and isinstance(error, KeyboardInterrupt) else error)


atexit.register(_close_forgotten)
