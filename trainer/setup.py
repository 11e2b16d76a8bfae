"""Checks and assembles the parts of a training."""

from collections.abc import Callable, Iterable
from typing import Any

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.frames import check_run_name
from offloop.bus.runs.directory import is_name_for, new_run_name
from offloop.bus.types.event import Event
from offloop.bus.types.time import Time, TimeInput
from offloop.bus.types.timestamp import Timestamp, wall_clock
from offloop.trainer.arguments.checks import as_list
from offloop.trainer.arguments.durations import (
    check_countable,
    check_interval,
    check_iteration_length,
    end_of_fit,
    scaled_max_duration,
)
from offloop.trainer.checkpoints.checkpoints import Checkpoints
from offloop.trainer.config import TrainerArguments
from offloop.trainer.control.remote_control import RemoteControl
from offloop.trainer.control.settings import SettingFunction, check_settings
from offloop.trainer.data.evaluator import Evaluator, as_evaluators
from offloop.trainer.data.metrics import check_model
from offloop.trainer.data.spec import DataSpec, as_data_spec
from offloop.trainer.device.device import get_device, is_gpu, make_scaler
from offloop.trainer.device.seeding import check_seed, make_deterministic, new_seed, seed_all
from offloop.trainer.distributed.ranks import Ranks, join_ranks, make_equal
from offloop.trainer.distributed.sampling import check_parts, check_shards, own_sampler
from offloop.trainer.engine.engine import Engine, check_loss_interpolation
from offloop.trainer.engine.state import Algorithm, AlgorithmLogger, State
from offloop.trainer.evaluation.evaluation import Evaluation, add_eval_metrics, add_train_metrics, use_evaluators
from offloop.trainer.loop.forward_pass import ForwardPass
from offloop.trainer.loop.loop import TrainingLoop
from offloop.trainer.loop.optimization import Optimization
from offloop.trainer.loop.progress import ProgressDisplay
from offloop.trainer.loop.step import TrainStep, check_microbatch_size
from offloop.trainer.stream.run_stream import TrainingStream


class Setup:
    """The parts of a training. The constructor starts nothing, :meth:`start` does."""

    def __init__(self, given: TrainerArguments) -> None:
        self._given = given
        evaluators = as_evaluators(given.eval_dataloader)
        check_model(given.model, evaluated=bool(evaluators))
        self.data = None if given.train_dataloader is None else as_data_spec(given.train_dataloader, "train_dataloader")
        self.max_duration: Time | None = scaled_max_duration(given.max_duration, given.scale_schedule_ratio)
        check_countable(self.max_duration, check_iteration_length(given.iteration_length))
        self.eval_interval: Time = check_interval(given.eval_interval, "eval_interval")
        self.microbatch_size = check_microbatch_size(given.device_train_microbatch_size)
        self.clock: Callable[[], int] = given.clock or wall_clock()
        self.stream: TrainingStream = TrainingStream(given, given.callbacks, given.loggers)
        self.settings: dict[str, SettingFunction] = check_settings(given.settings)
        self.optimization: Optimization = Optimization(given.optimizers, given.schedulers, given.scale_schedule_ratio)

        # From here on the process changes, and waits for the other ranks.
        if given.deterministic_mode:
            make_deterministic()
        # Before the device is chosen: each rank has its own.
        self.ranks: Ranks | None = join_ranks(on_gpu=is_gpu(given.device))
        if self.ranks is not None and self.microbatch_size == "auto":
            raise ConfigurationError(
                "device_train_microbatch_size 'auto' is for one rank: with several, give a number of samples"
            )
        self.forward_pass: ForwardPass = ForwardPass(given, self.ranks)
        check_shards(self.ranks, self.data, evaluators)
        self.state: State = self._make_state(given, evaluators)
        self.checkpoints: Checkpoints = Checkpoints(
            given, self.state, self.ranks, has_run_name=given.run_name is not None, sharded=self.forward_pass.is_sharded
        )
        self.checkpoints.check()
        self._find_name(given)
        self.checkpoints.check_folder()
        given.model.to(self.state.device.torch_device)
        add_train_metrics(self.state)
        add_eval_metrics(self.state, evaluators)

    def _make_state(self, given: TrainerArguments, evaluators: list[Evaluator]) -> State:
        precision, device = given.precision or "fp32", get_device(given.device)
        run_name = new_run_name("run", given.runs_dir) if given.run_name is None else check_run_name(given.run_name)
        seed = new_seed() if given.seed is None else check_seed(given.seed)
        if self.ranks is not None:
            run_name, seed = self.ranks.share([run_name, seed])
        state = State(
            model=given.model,
            device=device,
            precision=precision,
            scaler=make_scaler(precision, device),
            seed=seed,
            run_name=run_name,
            rank=0 if self.ranks is None else self.ranks.rank,
            world_size=1 if self.ranks is None else self.ranks.world_size,
            optimizers=self.optimization.optimizers,
            algorithms=as_list(given.algorithms, Algorithm, "algorithms"),
            evaluators=evaluators,
        )
        state.iteration_length = check_iteration_length(given.iteration_length)
        check_loss_interpolation(state.algorithms)
        for algorithm in state.algorithms:
            algorithm.check(state)
        return state

    def _find_name(self, given: TrainerArguments) -> None:
        state, saved = self.state, self.checkpoints.saved_name
        found = state.run_name
        if saved is not None and is_name_for(saved, state.run_name):
            found = saved if self.checkpoints.is_next_attempt else found
        elif saved is not None and not given.autoresume:
            # A training that branches from another run's checkpoint is a run of its own.
            self.checkpoints.is_next_attempt = False
        if given.run_name is not None and not self.checkpoints.is_next_attempt:
            if state.rank == 0:
                found = self.stream.find_name(given.run_name)
            if self.ranks is not None:
                found = self.ranks.share(found)
        if found != state.run_name:
            self._use_name(found)

    def _use_name(self, run_name: str) -> None:
        self.state.run_name = run_name
        self.checkpoints.use_run_name()

    def _describe(self, run_name: str) -> dict[str, Any]:
        self._use_name(run_name)
        return {}

    def start(self, logger: AlgorithmLogger, control: RemoteControl, shows: bool) -> None:
        """Start the run and its consumers, then bring the state to the start of the training."""
        checked = self.state.run_name
        self.engine: Engine = self.stream.start(
            self.state,
            logger,
            control,
            run_name=None if self.checkpoints.is_next_attempt else self._given.run_name,
            resume=self.checkpoints.is_next_attempt,
            max_duration=self.max_duration,
            clock=self.clock,
            ranks=self.ranks,
            shows=shows,
            facts=self._describe,
        )
        if self.state.run_name != checked:
            self._use_name(self.state.run_name)
            self.checkpoints.check_folder()
        if self.stream.publisher is not None:
            self.checkpoints.announce = self.stream.publisher.mark_checkpoint
            self.checkpoints.run_dir = self.stream.publisher.run_dir
        self.evaluation: Evaluation = Evaluation(
            self.state,
            self.engine,
            self.clock,
            subset_num_batches=self._given.eval_subset_num_batches,
            in_step=self.forward_pass.in_step,
        )
        self._begin()

    def _begin(self) -> None:
        """Let algorithms change the model, make optimizers and schedulers, and load the checkpoint to resume from."""
        state = self.state
        # As late as this: earlier steps may have drawn random numbers.
        seed_all(state.seed)
        if self.ranks is not None:
            make_equal([*state.model.parameters(), *state.model.buffers()])
        self.engine.run_event(Event.INIT)
        # Modules added by algorithms are on the host.
        state.model.to(state.device.torch_device)
        sharding = self.forward_pass.shard(state)
        self.optimization.make_optimizers(state)
        state.max_duration = self.max_duration
        self.use_data(self.data)
        has_schedulers = self.optimization.compile_schedulers(state)
        self.engine.run_event(Event.BEFORE_LOAD)
        self.checkpoints.load(sharding)
        if has_schedulers:
            self.checkpoints.load_schedulers()
        if self.microbatch_size == "auto":
            state.device_train_microbatch_size = self.checkpoints.microbatch_size
        self._seed_sampler()
        self.engine.run_event(Event.AFTER_LOAD)
        if state.rank > 0:
            # Until here all ranks draw the same numbers, for algorithms that change the model.
            seed_all((state.seed + state.rank) % 2**32)

    def begin_fit(
        self,
        duration: TimeInput | None,
        *,
        reset_time: bool,
        train_dataloader: DataSpec | Iterable[Any] | None,
        eval_dataloader: Any,
        eval_interval: TimeInput | None,
    ) -> None:
        """Check the arguments of ``Trainer.fit`` and prepare the state. A refused argument changes nothing."""
        state = self.state
        data = self.data if train_dataloader is None else as_data_spec(train_dataloader, "train_dataloader")
        evaluators = None if eval_dataloader is None else as_evaluators(eval_dataloader)
        check_shards(self.ranks, data, evaluators or [])
        if evaluators is not None:
            check_model(state.model, evaluated=True)
        interval = self.eval_interval if eval_interval is None else check_interval(eval_interval, "eval_interval")
        if data is None or not state.optimizers:
            missing = "a train_dataloader" if data is None else "optimizers"
            raise ConfigurationError(f"fit() needs {missing}: pass it to Trainer(...)")
        begin = Timestamp() if reset_time else state.timestamp
        # The duration of a stopped training is its end; the planned one is still known.
        planned = state.max_duration if self.max_duration is None else self.max_duration
        max_duration = end_of_fit(begin, duration, planned, state.iteration_length, self.checkpoints.resumed)
        if reset_time:
            self.checkpoints.check_conflicts(begin)
            state.timestamp, state.evaluated_at = begin, {}
            self.checkpoints.forget()
        if evaluators is not None:
            use_evaluators(state, evaluators)
        self.eval_interval = interval
        state.stopped, state.stop_reason = False, None
        state.max_duration = max_duration
        self.use_data(data)
        self.optimization.compile_schedulers(state)
        self.checkpoints.load_schedulers()

    def make_loop(self, control: RemoteControl, progress: ProgressDisplay) -> TrainingLoop:
        state, data, max_duration, ranks = self.state, self.data, self.state.max_duration, self.ranks
        assert data is not None  # fit() checks both
        assert max_duration is not None
        if ranks is not None:
            check_parts(data, state.dataloader_len, ranks)
        self.evaluation.plan(self.eval_interval, max_duration)
        self.checkpoints.plan(max_duration)
        return TrainingLoop(
            state,
            self.engine,
            TrainStep(state, self.engine, data, self.forward_pass, ranks, self.microbatch_size),
            self.evaluation,
            self.checkpoints,
            progress,
            control,
            self.clock,
            ranks,
            step_schedulers_every_batch=self._given.step_schedulers_every_batch,
        )

    def use_data(self, data: DataSpec | None) -> None:
        if data is not self.data:
            self.data = data
            self._seed_sampler()
        if data is not None:
            self.state.train_dataloader = data.dataloader
            self.state.set_dataloader(data, "train", self._given.train_subset_num_batches)

    def _seed_sampler(self) -> None:
        sampler = None if self.data is None else own_sampler(self.data.dataloader)
        if sampler is not None:
            seed = self.checkpoints.sampler_seed
            sampler.use_seed(self.state.seed if seed is None else seed)
