"""The trainer: takes everything that a training needs, checks it, and runs it."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from bus.errors import ClosedError, ConfigurationError, RankError
from bus.protocol.frames import check_run_name
from bus.publisher.publisher import BACKLOG_BYTES, ending_for
from bus.recording.recording import Recording
from bus.runs.directory import new_run_name
from bus.types.event import Event
from bus.types.time import Time, TimeInput, TimeUnit
from bus.types.timestamp import Timestamp, wall_clock
from trainer.arguments.checks import (
    OptimizerFactory,
    Optimizers,
    as_list,
    check_flags,
    check_function,
    check_path,
    check_text,
)
from trainer.arguments.durations import (
    check_countable,
    check_interval,
    check_iteration_length,
    check_max_duration,
    end_after,
    scaled_max_duration,
)
from trainer.checkpoints.checkpoints import Checkpoints
from trainer.control.interrupts import defer_signals
from trainer.control.remote_control import RemoteControl
from trainer.control.settings import SettingFunction, check_settings, make_settings
from trainer.data.evaluator import Evaluator, as_evaluators
from trainer.data.models import check_model
from trainer.data.resume import DataLoaderResume
from trainer.data.spec import DataSpec, as_data_spec, check_subset
from trainer.device.device import Device, check_precision, get_device, is_gpu, make_scaler
from trainer.device.seeding import check_seed, make_deterministic, new_seed, seed_all
from trainer.distributed.parallel import check_parts, check_shards
from trainer.distributed.ranks import join_ranks, report_lost_ranks
from trainer.distributed.sampling import own_sampler
from trainer.engine.algorithm import Algorithm
from trainer.engine.engine import check_loss_interpolation
from trainer.engine.logger import Logger
from trainer.engine.state import State
from trainer.evaluation.evaluation import Evaluation
from trainer.evaluation.model_metrics import add_eval_metrics, add_train_metrics, evaluating_on_others, use_evaluators
from trainer.evaluation.prediction import predict
from trainer.fields.field import FieldFunction
from trainer.loop.forward_pass import ForwardPass
from trainer.loop.loop import TrainingLoop
from trainer.loop.microbatches import Microbatching, MicrobatchSize, check_microbatch_size
from trainer.loop.optimization import Optimization
from trainer.loop.progress import make_progress
from trainer.loop.step import TrainStep
from trainer.schedulers import SchedulerFunction
from trainer.stream.introduction import introduction
from trainer.stream.options import check_stream_options
from trainer.stream.run_stream import RunStream


class Trainer:
    """Trains a model, evaluates it, and publishes what happens for consumers to watch.

    Args:
        model: an ``nn.Module`` with the methods of :class:`trainer.data.models.Model`, such as
            :class:`trainer.Classifier`.
        train_dataloader: a dataloader, or a :class:`trainer.DataSpec` that says how to count and split its batches.
        eval_dataloader: a dataloader (its label is ``eval``), a :class:`trainer.Evaluator` or a list of them.
        optimizers: one or several torch optimizers of the model's parameters, or a function that makes them from the
            model. It is called after ``INIT``, when algorithms have made their changes to the model.
        schedulers: one schedule of :mod:`trainer.schedulers`, or a function ``(state, ssr)`` that gives the share of
            the base rate: it follows the training time, for all optimizers. Or one or several of torch's schedulers.
        step_schedulers_every_batch: whether schedulers step after each batch (``True``) or each epoch (``False``); by
            default schedules that follow the training time after each batch, torch's schedulers after each epoch.
        max_duration: how long to train: ``5ep``, ``1000ba``, ``10000sp``, ``1e6tok``, ``1h30m``, or a number of epochs.
        eval_interval: how often to evaluate, in the same way or as a share such as ``0.1dur``; 0 for never.
        algorithms: :class:`trainer.Algorithm` objects, which run in the loop and may change it.
        callbacks, loggers: objects of the package ``consumers``; they run in a process that is started for them.
        run_name: the run's name, by default a new one.
        seed: for Python's, numpy's and torch's random numbers; by default a new one, which is recorded.
        device: ``auto``, ``cpu`` or ``gpu``, or torch's device ``cpu`` or ``cuda``.
        precision: ``fp32``, ``amp_bf16`` or ``amp_fp16``; the last one scales the loss.
        device_train_microbatch_size: splits batches into microbatches of so many samples, whose gradients are added up;
            ``auto`` halves them whenever the memory runs out.
        train_subset_num_batches, eval_subset_num_batches: how many batches make an epoch, or an evaluation; -1 for all.
        iteration_length: epochs or tokens after which an iteration ends, for those who count in them.
        scale_schedule_ratio: stretches the times of time-aware schedulers, and ``max_duration``.
        save_folder: where to write checkpoints; none are written without it. ``{run_name}`` and the like stand for
            what they name.
        save_filename, save_latest_filename: names of checkpoints in it, see :mod:`trainer.checkpoints.folder`.
        save_interval: how often to write one, in the same way as ``eval_interval``, and at the end; 0 for never.
        save_num_checkpoints_to_keep: the oldest ones beyond this number are removed; -1 keeps all.
        save_overwrite: whether checkpoints that are in the folder already may be written over.
        save_weights_only: whether to write the model alone.
        load_path: a checkpoint to go on from, or a folder of them, of which the latest is taken.
        load_weights_only: takes the model's weights and nothing else; also from a torch file (``.pt``).
        load_strict_model_weights: whether a checkpoint has to have all of the model's weights and no others.
        autoresume: goes on from the latest checkpoint in ``save_folder``, if there is one. Needs a ``run_name``.
        deterministic_mode: makes torch use deterministic algorithms only, and fail where it has none.
        compile_config: keyword arguments of ``torch.compile``, ``{}`` for its defaults; ``None`` does not compile.
        find_unused_parameters: with several ranks, whether parameters may be left out of a forward pass, see torch's
            ``DistributedDataParallel``.
        fsdp_config: shards the model over several ranks instead of giving each the whole (DDP): keyword arguments of
            :class:`trainer.distributed.sharding.FullySharded`, which are ``shard``, ``reshard_after_forward``,
            ``mp_policy`` and ``offload_policy``; ``{}`` for the defaults. Checkpoints are folders then, see
            :mod:`trainer.checkpoints.checkpoints`.
        runs_dir: where runs live, by default ``$OFFLOOP_RUNS_DIR`` or ``runs``.
        publish: whether there is a stream at all.
        broker: the address of a broker that stands alone; by default one is started.
        key, broker_key: files with one's own secret key and with that broker's public one, where it takes keys; by
            default those that ``$OFFLOOP_KEY`` and ``$OFFLOOP_BROKER_KEY`` name.
        progress_bar: whether to show on standard error, on the first rank, which run this is, where it is recorded and
            how to watch it, how far it is, and why it was stopped.
        record: events to record beside the base set, or ``"all"``; others are recorded while a consumer wants them.
        max_delay: seconds by which the events of batches may be late in a fast loop, see :class:`bus.Publisher`.
        backlog_bytes: bound of the memory for events that the broker does not have on disk yet, 64 MiB by default.
        clock: nanoseconds since 1970, for tests.
        config: what else to write down about the run in ``run.json``.
        fields: what else consumers can ask for, by name: functions of the state, see :mod:`trainer.fields.registry`.
        settings: what else ``bus send RUN set NAME VALUE`` can set, by name: functions of the state and the value.
        wait_for: names of consumers that may decide to stop the training: it waits for them where they decide, so that
            they stop it exactly there. ``callbacks`` stands for those given here, ``all`` for every such consumer.
        wait_seconds: how long it waits for one at a time.
        commands_from: a recording, or a run's directory: the commands that its training took are applied again where
            they were then.

    Use it as a context manager, or call :meth:`close` at the end. An exception that ends :meth:`fit`, :meth:`eval` or
    :meth:`predict` ends the run as failed.

    Raises:
        ConfigurationError: an argument is not allowed; nothing has been started then.
        InvalidTimeError: a duration or an interval cannot be read.
        CheckpointError: a checkpoint cannot be read, or is of another training.
        RunIsLiveError, RunDirectoryError, BrokerError: the run cannot be started.

    Reference: ``composer/trainer/trainer.py``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        train_dataloader: DataSpec | Iterable[Any] | None = None,
        eval_dataloader: DataSpec | Iterable[Any] | Evaluator | Sequence[Evaluator] | None = None,
        optimizers: Optimizers | OptimizerFactory | None = None,
        schedulers: LRScheduler | SchedulerFunction | Sequence[LRScheduler | SchedulerFunction] | None = None,
        max_duration: TimeInput | None = None,
        eval_interval: TimeInput = 1,
        algorithms: Algorithm | Sequence[Algorithm] | None = None,
        callbacks: Any | Sequence[Any] | None = None,
        loggers: Any | Sequence[Any] | None = None,
        run_name: str | None = None,
        seed: int | None = None,
        device: str | torch.device | Device = "auto",
        *,
        precision: str | None = None,
        device_train_microbatch_size: MicrobatchSize | None = None,
        train_subset_num_batches: int = -1,
        eval_subset_num_batches: int = -1,
        iteration_length: TimeInput | None = None,
        step_schedulers_every_batch: bool | None = None,
        scale_schedule_ratio: float = 1.0,
        save_folder: str | os.PathLike[str] | None = None,
        save_filename: str = "ep{epoch}-ba{batch}-rank{rank}.safetensors",
        save_latest_filename: str | None = "latest-rank{rank}.safetensors",
        save_interval: TimeInput = 1,
        save_num_checkpoints_to_keep: int = -1,
        save_overwrite: bool = False,
        save_weights_only: bool = False,
        load_path: str | os.PathLike[str] | None = None,
        load_weights_only: bool = False,
        load_strict_model_weights: bool = True,
        autoresume: bool = False,
        deterministic_mode: bool = False,
        compile_config: Mapping[str, Any] | None = None,
        find_unused_parameters: bool = False,
        fsdp_config: Mapping[str, Any] | None = None,
        runs_dir: str | os.PathLike[str] | None = None,
        publish: bool = True,
        broker: str | None = None,
        key: str | None = None,
        broker_key: str | None = None,
        progress_bar: bool = True,
        record: str | Iterable[Event | str] | None = None,
        max_delay: float = 0.05,
        backlog_bytes: int = BACKLOG_BYTES,
        clock: Callable[[], int] | None = None,
        config: Mapping[str, Any] | None = None,
        fields: Mapping[str, FieldFunction] | None = None,
        settings: Mapping[str, SettingFunction] | None = None,
        wait_for: str | Sequence[str] | None = None,
        wait_seconds: float = 30.0,
        commands_from: str | os.PathLike[str] | None = None,
    ) -> None:
        evaluators = as_evaluators(eval_dataloader)
        check_model(model, evaluated=bool(evaluators))
        self._data = None if train_dataloader is None else as_data_spec(train_dataloader, "train_dataloader")
        self._max_duration = scaled_max_duration(max_duration, scale_schedule_ratio)
        length = check_iteration_length(iteration_length)
        check_countable(self._max_duration, length)
        self._eval_interval = check_interval(eval_interval)
        self._microbatch_size = check_microbatch_size(device_train_microbatch_size, self._data)
        self._train_subset = check_subset(train_subset_num_batches, "train_subset_num_batches")
        eval_subset = check_subset(eval_subset_num_batches, "eval_subset_num_batches")
        self._step_schedulers_every_batch = step_schedulers_every_batch
        if step_schedulers_every_batch is not None:
            check_flags(step_schedulers_every_batch=step_schedulers_every_batch)
        check_flags(
            save_overwrite=save_overwrite,
            save_weights_only=save_weights_only,
            load_weights_only=load_weights_only,
            load_strict_model_weights=load_strict_model_weights,
            autoresume=autoresume,
            deterministic_mode=deterministic_mode,
            find_unused_parameters=find_unused_parameters,
            publish=publish,
            progress_bar=progress_bar,
        )
        if clock is not None:
            check_function(clock, "clock", "()")
        self._clock = clock or wall_clock()
        options = check_stream_options(
            publish=publish,
            runs_dir=runs_dir,
            broker=broker,
            key=key,
            broker_key=broker_key,
            record=record,
            max_delay=max_delay,
            backlog_bytes=backlog_bytes,
            config=config,
            fields=fields,
            callbacks=callbacks,
            loggers=loggers,
            wait_for=wait_for,
            wait_seconds=wait_seconds,
        )
        own_settings = check_settings(settings)
        script = [] if commands_from is None else Recording(check_path(commands_from, "commands_from")).read_commands()
        for path, argument in ((save_folder, "save_folder"), (load_path, "load_path")):
            if path is not None:
                check_path(path, argument)
        check_text(save_filename, "save_filename")
        if save_latest_filename is not None:
            check_text(save_latest_filename, "save_latest_filename")
        self._optimization = Optimization(optimizers, schedulers, scale_schedule_ratio)
        if deterministic_mode:
            make_deterministic()
        precision = check_precision(precision)
        # Before the device is chosen: each rank has its own.
        self._ranks = join_ranks(on_gpu=is_gpu(device))
        on_device = get_device(device)
        rank, world_size = 0, 1
        if self._ranks is not None:
            rank, world_size = self._ranks.rank, self._ranks.world_size
            if self._microbatch_size == "auto":
                raise ConfigurationError(
                    "device_train_microbatch_size 'auto' is for one rank: with several, give a number of samples"
                )
        self._check_shards(self._data, evaluators)
        has_run_name = run_name is not None
        run_name = new_run_name("run", runs_dir) if run_name is None else check_run_name(run_name)
        seed = new_seed() if seed is None else check_seed(seed)
        if self._ranks is not None:
            run_name, seed = self._ranks.share([run_name, seed])
        self._forward_pass = ForwardPass(
            self._ranks,
            compile_config=compile_config,
            find_unused_parameters=find_unused_parameters,
            fsdp_config=fsdp_config,
        )
        self.state = State(
            model=model,
            device=on_device,
            precision=precision,
            scaler=make_scaler(precision, on_device),
            seed=seed,
            run_name=run_name,
            rank=rank,
            world_size=world_size,
            optimizers=self._optimization.optimizers,
            algorithms=as_list(algorithms, Algorithm, "algorithms"),
            evaluators=evaluators,
        )
        check_loss_interpolation(self.state.algorithms)
        for algorithm in self.state.algorithms:
            algorithm.check(self.state)
        self.state.iteration_length = length
        self._loader_resume = DataLoaderResume()
        self._checkpoints = Checkpoints(
            self.state,
            self._loader_resume,
            save_folder=save_folder,
            save_filename=save_filename,
            save_latest_filename=save_latest_filename,
            save_interval=check_interval(save_interval),
            keep=save_num_checkpoints_to_keep,
            overwrite=save_overwrite,
            weights_only=save_weights_only,
            load_path=load_path,
            load_weights_only=load_weights_only,
            strict=load_strict_model_weights,
            autoresume=autoresume,
            has_run_name=has_run_name,
            ranks=self._ranks,
            sharded=self._forward_pass.is_sharded,
        )
        self._checkpoints.check()
        model.to(on_device.torch_device)
        add_train_metrics(self.state)
        add_eval_metrics(self.state, evaluators)

        self._closed = self._is_fitting = self._is_introduced = False
        self._place = options.runs_dir, options.broker
        self._progress = make_progress(progress_bar and rank == 0, self.state, self._clock)
        self.logger = Logger(self.state)
        self.settings = make_settings(self._progress, own_settings)
        """What ``bus send RUN set NAME VALUE`` can set; more can be registered."""
        self.fields = options.fields
        """What consumers can ask for; more can be registered, see :class:`trainer.fields.registry.FieldRegistry`."""
        self._control = RemoteControl(self.state, self.settings, self._ranks, script, self._progress.note)
        self._stream = RunStream(options, self.state, self._clock, self._ranks, shows=progress_bar)
        with self._ending_on_error():
            self._publisher = self._stream.start(self._control, self._max_duration)
            if self._publisher is not None:
                self._checkpoints.announce = self._publisher.mark_checkpoint
            self.engine = self._stream.make_engine(self.logger, self._control)
            self._evaluation = Evaluation(
                self.state,
                self.engine,
                self._clock,
                subset_num_batches=eval_subset,
                in_step=self._forward_pass.in_step,
            )
            self._begin()

    def _begin(self) -> None:
        state = self.state
        # As late as this, so that nothing that was started before can have taken a random number.
        seed_all(state.seed)
        if self._ranks is not None:
            self._ranks.share_weights(state.model)
        self.engine.run_event(Event.INIT)
        # Parts that algorithms have put in come from the host.
        state.model.to(state.device.torch_device)
        sharding = self._forward_pass.shard(state)
        self._optimization.make_optimizers(state)
        state.max_duration = self._max_duration
        self._use_train_data()
        has_schedulers = self._optimization.compile_schedulers(state)
        self.engine.run_event(Event.BEFORE_LOAD)
        self._checkpoints.load(self._evaluation, sharding)
        if has_schedulers:
            self._checkpoints.load_schedulers()
        if self._microbatch_size == "auto":
            state.device_train_microbatch_size = self._checkpoints.microbatch_size
        self._seed_sampler()
        self.engine.run_event(Event.AFTER_LOAD)
        if state.rank > 0:
            # Up to here all ranks drew the same numbers, for algorithms that make changes to the model.
            seed_all((state.seed + state.rank) % 2**32)

    def _use_train_data(self) -> None:
        if self._data is not None:
            self.state.train_dataloader = self._data.dataloader
            self.state.set_dataloader(self._data, "train", self._train_subset)

    def _seed_sampler(self) -> None:
        sampler = None if self._data is None else own_sampler(self._data.dataloader)
        if sampler is not None:
            seed = self._checkpoints.sampler_seed
            sampler.use_seed(self.state.seed if seed is None else seed)

    @property
    def run_name(self) -> str:
        """The run's name."""
        return self.state.run_name

    @property
    def run_dir(self) -> Path | None:
        """The run's directory; ``None`` without a stream."""
        return None if self._publisher is None else self._publisher.run_dir

    @property
    def attempt(self) -> int | None:
        """Which attempt of the run this is, from 1; ``None`` without a stream."""
        return None if self._publisher is None else self._publisher.attempt

    @property
    def resumed_from(self) -> Path | None:
        """The checkpoint of the same run that the training goes on from, if there is one."""
        return self._checkpoints.resumed_from

    @property
    def save_folder(self) -> Path | None:
        """Where checkpoints are written; ``None`` when none are."""
        return self._checkpoints.folder

    @property
    def recorded_all(self) -> bool:
        """Whether everything that was published so far is on disk; without a stream there is nothing to record."""
        return self._publisher is None or self._publisher.recorded_all

    @property
    def recording(self) -> Path | None:
        """The file that the stream is recorded in; ``None`` without a stream."""
        return None if self._publisher is None else self._publisher.recording

    def introduce(self) -> str:
        """Which run this is, where it is recorded and how to watch it, as one line for people. The first :meth:`fit`,
        :meth:`eval` or :meth:`predict` shows it, unless it was asked for before."""
        self._is_introduced = True
        return introduction(self.run_name, self.attempt, self.resumed_from, self.recording, *self._place)

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
        """Trains for ``duration``, or until ``max_duration``. Can be called again to train on.

        ``reset_time`` sets the training time to zero first. Dataloaders and the interval, when given, take the place of
        those given to the trainer. With a ``save_folder``, Ctrl-C and SIGTERM end the training after the batch at hand
        with a checkpoint, and a second one ends it at once. A duration in seconds, which training time counts in whole
        ones, is never cut short: a second that has begun does not count.

        Raises :class:`bus.errors.ConfigurationError` when there is nothing to train on, with or for, and whatever is
        raised in the loop, after which the trainer is closed."""
        self._check_open()
        if self._is_fitting:
            raise ConfigurationError("fit() is at work already: an algorithm changes the training through its state")
        data = self._data if train_dataloader is None else as_data_spec(train_dataloader, "train_dataloader")
        check_microbatch_size(self._microbatch_size, data)
        evaluators = None if eval_dataloader is None else as_evaluators(eval_dataloader)
        self._check_shards(data, evaluators or [])
        if evaluators is not None:
            check_model(self.state.model, evaluated=True)
        interval = self._eval_interval if eval_interval is None else check_interval(eval_interval)
        max_duration = self._check_fit(data, duration, reset_time)
        assert data is not None  # checked there

        # Nothing is changed before this, so that a call that was refused can be made again.
        if reset_time:
            self.state.timestamp = Timestamp()
            self._evaluation.last_batches = {}
            self._checkpoints.forget()
        if data is not self._data:
            self._data = data
            self._seed_sampler()
        if evaluators is not None:
            use_evaluators(self.state, evaluators)
        self._eval_interval = interval
        self.state.stopped, self.state.stop_reason = False, None
        self.state.max_duration = max_duration
        self._use_train_data()
        self._optimization.compile_schedulers(self.state)
        self._checkpoints.load_schedulers()
        self._is_fitting = True
        self._show_introduction()
        with self._ending_on_error():
            if self._ranks is not None:
                check_parts(data, self.state.dataloader_len, self._ranks)
            self._evaluation.plan(self._eval_interval, max_duration)
            saver = self._checkpoints.plan(self._evaluation, data, max_duration)
            self.state.gather_checkpoint = self._checkpoints.gatherer(self._evaluation, data)
            loop = TrainingLoop(
                self.state,
                self.engine,
                self._make_step(data),
                self._evaluation,
                saver,
                self._progress,
                data,
                self._loader_resume,
                self._clock,
                self._control,
                ranks=self._ranks,
                subset_num_batches=self._train_subset,
                step_schedulers_every_batch=self._step_schedulers_every_batch,
                token_intervals=self._token_intervals(),
            )
            # Ranks have to stop after the same batch, also without a checkpoint.
            if saver.watched or self._ranks is not None:
                with defer_signals(self.state, with_checkpoint=bool(saver.watched)) as interruption:
                    loop.run(interruption)
                if interruption.requested:
                    raise KeyboardInterrupt(interruption.reason)
            else:
                loop.run()
            self._progress.finish()
        self._is_fitting = False

    def _make_step(self, data: DataSpec) -> TrainStep:
        forward = self._forward_pass.prepare(self.state)
        return TrainStep(
            self.state,
            self.engine,
            data,
            Microbatching(self.state, self._microbatch_size),
            forward=forward,
            ranks=self._ranks,
            parallel=self._forward_pass.parallel,
        )

    def _token_intervals(self) -> list[str]:
        """The intervals that are counted in tokens, as they are called."""
        named = {f"eval_interval {str(one)!r} of evaluator {label!r}": one for label, one in self._evaluation.intervals}
        if self._checkpoints.interval is not None:
            named[f"save_interval {str(self._checkpoints.interval)!r}"] = self._checkpoints.interval
        return [name for name, interval in named.items() if interval.unit is TimeUnit.TOKEN]

    def _check_shards(self, data: DataSpec | None, evaluators: Sequence[Evaluator]) -> None:
        if self._ranks is not None:
            check_shards(data, "train_dataloader", self._ranks.world_size)
            for one in evaluators:
                check_shards(one.spec, f"the dataloader of evaluator {one.label!r}", self._ranks.world_size)

    def _check_fit(self, data: DataSpec | None, duration: TimeInput | None, reset_time: bool) -> Time:
        """How long to train."""
        for value, argument in ((data, "a train_dataloader"), (self.state.optimizers, "optimizers")):
            if not value:
                raise ConfigurationError(f"fit() needs {argument}: pass it to Trainer(...)")
        timestamp = Timestamp() if reset_time else self.state.timestamp
        if duration is not None:
            length = check_max_duration(duration)
            max_duration: Time | None = end_after(timestamp, length)
        else:
            # A training that was stopped has its end as its duration; what it was to be is still known.
            max_duration = self.state.max_duration if self._max_duration is None else self._max_duration
        if max_duration is None:
            raise ConfigurationError("fit() needs to know how long to train: pass max_duration='5ep' or the like")
        if timestamp >= max_duration and not self._checkpoints.resumed:
            raise ConfigurationError(
                f"max_duration {str(max_duration)!r} is over already: "
                "pass a longer one, or fit(duration=...), or fit(reset_time=True)"
            )
        check_countable(max_duration, self.state.iteration_length)
        if reset_time:
            self._checkpoints.check_conflicts(timestamp)
        return max_duration

    def eval(
        self,
        eval_dataloader: DataSpec | Iterable[Any] | Evaluator | Sequence[Evaluator] | None = None,
        subset_num_batches: int = -1,
    ) -> dict[str, dict[str, Any]]:
        """Evaluates the model now, on the trainer's evaluators or on others; returns the metrics' values by label and
        name.

        Raises :class:`bus.errors.ConfigurationError` when there is nothing to evaluate on, and whatever is raised
        meanwhile, after which the trainer is closed."""
        self._check_open()
        check_subset(subset_num_batches, "subset_num_batches")
        evaluators = self.state.evaluators if eval_dataloader is None else as_evaluators(eval_dataloader)
        if not evaluators:
            raise ConfigurationError("eval() needs something to evaluate on: pass an eval_dataloader")
        others: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if eval_dataloader is not None:
            check_model(self.state.model, evaluated=True)
            self._check_shards(None, evaluators)
            others = evaluating_on_others(self.state, evaluators)
        self._show_introduction()
        with others:
            with self._ending_on_error():
                self._evaluation.run_standalone(evaluators, subset_num_batches)
            return {one.label: self.state.eval_metric_values[one.label] for one in evaluators}

    def predict(
        self,
        dataloader: DataSpec | Iterable[Any],
        subset_num_batches: int = -1,
        *,
        on_outputs: Callable[[Any, Any], object] | None = None,
    ) -> list[Any]:
        """The model's outputs for each batch of a dataloader, on the host, from ``model.eval_forward``.

        With ``on_outputs(batch, outputs)`` each batch and its outputs are handed to that function, on the device, and
        the list that is returned is empty: for more than fits into memory.

        Raises :class:`bus.errors.ConfigurationError` for a model without ``eval_forward``, and whatever is raised
        meanwhile, after which the trainer is closed."""
        self._check_open()
        check_subset(subset_num_batches, "subset_num_batches")
        check_model(self.state.model, evaluated=False, predicts=True)
        spec = as_data_spec(dataloader, "dataloader")
        if on_outputs is not None:
            check_function(on_outputs, "on_outputs", "(batch, outputs)")
        self._show_introduction()
        with self._ending_on_error():
            return predict(
                self.state,
                self.engine,
                spec,
                self._clock,
                subset_num_batches=subset_num_batches,
                on_outputs=on_outputs,
                in_step=self._forward_pass.in_step,
            )

    def save_checkpoint(self, path: str | os.PathLike[str]) -> Path:
        """Writes a checkpoint of the training as it is now, or of the model alone with ``save_weights_only``.

        Raises :class:`bus.errors.CheckpointError` when it cannot be written."""
        self._check_open()
        return self._checkpoints.write(check_path(path, "path"), self._evaluation, self._data)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the trainer of run {self.run_name!r} is closed: make a new Trainer")

    @contextlib.contextmanager
    def _ending_on_error(self) -> Iterator[None]:
        try:
            with contextlib.nullcontext() if self._ranks is None else report_lost_ranks(self._ranks.rank):
                yield
        except BaseException as error:
            self._end_on(error)
            raise

    def close(self) -> None:
        """Ends the run: sends what is left and waits, for a limited time, until callbacks and loggers have handled
        everything. Can be called more than once."""
        self._end("stopped" if self.state.stopped else "finished", None, self.state.stop_reason, drain=True)

    def _end_on(self, error: BaseException) -> None:
        if self._ranks is not None:
            # First of all: the run is over when all ranks have ended, and they wait for this one.
            self._forward_pass.close()
            self._ranks.leave(None if isinstance(error, RankError) else f"{type(error).__name__}: {error}")
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
