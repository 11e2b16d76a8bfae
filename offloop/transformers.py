"""The adapter for trainers of Hugging Face's Transformers and of TRL: :class:`OffloopCallback`."""

import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Unpack

from offloop.attached.adapter import Adapter, Wrapped, contain, missing
from offloop.attached.options import Options, as_run_name, is_enabled
from offloop.attached.samples import BatchSamples, Completions
from offloop.attached.training import (
    ALWAYS,
    EVALUATION_BATCHES,
    PREDICTION,
    STEP,
    AttachedTraining,
    Framework,
    numbers_in,
    precision_of,
)
from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import ANY_TABLE, Event
from offloop.trainer.control.remote_control import LATER
from offloop.trainer.data.spec import count_tokens
from offloop.trainer.fields.norms import NORM_FIELDS

try:
    from transformers import Trainer, TrainerCallback, __version__
    from transformers.trainer_pt_utils import find_batch_size
    from transformers.trainer_utils import has_length
except ModuleNotFoundError as _error:
    raise missing(_error, "offloop.transformers", "transformers accelerate") from None

_EVENTS = ALWAYS | EVALUATION_BATCHES | PREDICTION | STEP
_WITHOUT = {"outputs": "the trainer does not pass on the model's outputs"}
_WHOLE = ("weights", "weights_checkpoint")
_IN_EVENTS = ("loss", "learning_rate", "epoch")  # logged values that every event already has
_IN_CHECKPOINT = "offloop"
_PAIRS = re.compile("DataCollatorFor(Vision)?Preference")
_SAMPLES, _COMPLETIONS = "samples", ("completions", "eval_completions")
_TABLES = {name: frozenset((Event(f"#{name}"), ANY_TABLE)) for name in (_SAMPLES, *_COMPLETIONS)}
# Methods of TRL's trainers: one of those for both, and those that generate completions and calculate rewards.
_GENERATION = "_generate_and_score_completions"
_SPANS = {"_generate": "generate", "_generate_vllm": "generate"} | dict.fromkeys(
    ("_calculate_rewards", "_calculate_rewards_from_functions"), "score"
)


@contain("_begin", "_fire", "_begin_fetching", "_begin_step", "_end_step", "_note_place", "_begin_evaluation")
@contain("_end_evaluation", "_begin_evaluation_batch", "_end_evaluation_batch", "_begin_loss", "_fail_step")
@contain("_begin_completions", "_log_completions", hooks=True, outside="on_train_begin")
class OffloopCallback(Adapter, TrainerCallback):  # type: ignore[misc]
    """Publishes each ``train()`` of a trainer as a run.

        trainer = Trainer(...)
        trainer.add_callback(OffloopCallback(trainer))

    With several ranks each of them adds it. A batch is a step of the optimizer.

    Args:
        trainer: a ``Trainer``, a ``Seq2SeqTrainer``, TRL's ``SFTTrainer``, ``DPOTrainer`` or ``GRPOTrainer``, or
            another class derived from ``Trainer``.
        options: as in :class:`offloop.trainer.Trainer`, see :class:`offloop.attached.options.Options`. ``run_name``
            defaults to that of ``TrainingArguments``.

    Raises :class:`offloop.bus.errors.ConfigurationError` for invalid arguments."""

    def __init__(self, trainer: Any = None, **options: Unpack[Options]) -> None:
        if not isinstance(trainer, Trainer):
            raise ConfigurationError(
                "OffloopCallback needs the trainer: leave it out of callbacks=[...], and write "
                "trainer.add_callback(OffloopCallback(trainer)) when the trainer is there"
            )
        super().__init__(options)
        self._trainer: Any = trainer
        self._evaluated: dict[str, Any] = {}
        self._is_enabled = is_enabled(options)
        if self._is_enabled:
            Wrapped(trainer, "train", after=lambda *_, **__: self._end(), failed=self._end)

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        name = None
        if not self.detached:
            # With auto_find_batch_size the training restarts with smaller batches.
            name = self._training.state.run_name
            self._end(MemoryError(f"out of memory: it restarts with batches of {state.train_batch_size}"))
        attached = [one for one in self._trainer.callback_handler.callbacks if isinstance(one, OffloopCallback)]
        # A notebook's cell may add it twice.
        self.detached: bool = not self._is_enabled or attached[-1:] != [self]
        self._begin(args, state, parts["train_dataloader"], name)

    def _begin(self, args: Any, state: Any, dataloader: Any, name: str | None) -> None:
        trainer = self._trainer
        self._save_requested = False
        self._tokens_seen = state.num_input_tokens_seen
        self._evaluates = self._predicts = False
        self._train_span: Any = None
        self._completions: Completions | None = None
        # GRPO and similar trainers give each microbatch the rows of several, for generation.
        self._generates = hasattr(args, "steps_per_generation")
        # A chosen and a rejected sequence for each sample.
        self._sequences = 2 if _PAIRS.fullmatch(type(trainer.data_collator).__name__) else 1
        is_trl = any(one.__module__.startswith("trl.") for one in type(trainer).__mro__)
        precision = trainer.accelerator.mixed_precision
        in_epochs = args.max_steps <= 0 and args.num_train_epochs % 1 == 0
        lacks: tuple[str, ...] = _WHOLE if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled else ()
        if lacks and not getattr(trainer.accelerator, "is_fsdp2", False):
            lacks += tuple(NORM_FIELDS)
        without = {**_WITHOUT, **dict.fromkeys(lacks, "each rank has only a part")}
        self._training = training = AttachedTraining(
            Framework(*(("TRL", "trl") if is_trl else ("Transformers", "transformers")), _EVENTS, without),
            {**self._options, "run_name": name or self._options.get("run_name") or as_run_name(args.run_name)},
            trainer.model,
            [getattr(trainer.optimizer, "optimizer", trainer.optimizer)],
            [getattr(trainer.lr_scheduler, "scheduler", trainer.lr_scheduler)],
            max_duration=f"{int(args.num_train_epochs)}ep" if in_epochs else f"{state.max_steps}ba",
            precision=precision_of(trainer.model) if precision == "no" else precision,
            config=_config(trainer),
            evaluate=self._evaluate if trainer.eval_dataset is not None else "the trainer has no eval_dataset",
            checkpoint=self._save,
        )
        before_backward = self._firing(Event.AFTER_LOSS, Event.BEFORE_BACKWARD)
        self._wrapped = [
            Wrapped(trainer, "get_batch_samples", self._begin_fetching, self._firing(Event.AFTER_DATALOADER)),
            Wrapped(trainer, "training_step", self._begin_step, self._end_step, self._fail_step),
            Wrapped(trainer.accelerator, "backward", before_backward, self._firing(Event.AFTER_BACKWARD)),
            *(Wrapped(trainer, name, self._note_place) for name in ("_save_checkpoint", "_tune_save_checkpoint")),
            Wrapped(trainer, "evaluation_loop", self._begin_evaluation, self._end_evaluation),
            Wrapped(trainer, "prediction_step", self._begin_evaluation_batch, self._end_evaluation_batch),
            *(
                Wrapped(trainer, name, within=partial(self.span, span))
                for name, span in _SPANS.items()
                if hasattr(trainer, name)
            ),
        ]
        decode = getattr(trainer.processing_class, "decode", None)
        kinds = ("chosen", "rejected") if self._sequences == 2 else ()
        self._samples: Any = None if decode is None else BatchSamples(decode, training.state.device, kinds)
        if self._generates:
            self._wrapped.append(Wrapped(trainer, "compute_loss", self._begin_loss))
            if hasattr(trainer, _GENERATION):
                self._wrapped.append(Wrapped(trainer, _GENERATION, self._begin_completions, self._log_completions))
            else:
                self._leave_out_completions()
        per_epoch = -(-len(dataloader) // args.gradient_accumulation_steps) if has_length(dataloader) else None
        training.fit_start(
            dataloader=None if self._generates else dataloader,
            batches_per_epoch=per_epoch,
            microbatches=args.gradient_accumulation_steps,
            resumed=state.stateful_callbacks.get(_IN_CHECKPOINT),
            batches_done=state.global_step,
            epochs_done=state.global_step // per_epoch if per_epoch else 0,
            begins_again=name is not None,
        )

    def on_epoch_begin(self, *_: Any, **parts: Any) -> None:
        self._training.epoch_start()

    def on_pre_optimizer_step(self, *_: Any, **parts: Any) -> None:
        self._training.fire(Event.AFTER_TRAIN_BATCH)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._control = control
        if self._samples:
            self._log_samples()
        seen, self._tokens_seen = state.num_input_tokens_seen - self._tokens_seen, state.num_input_tokens_seen
        is_first = self._training.state.rank == 0
        # Transformers counts the tokens of all ranks, if it counts them.
        self._training.batch_end(tokens=(seen if is_first else 0) if seen else None)
        self._after_commands(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if not (control.should_training_stop and state.epoch % 1):
            self._control = control
            self._training.epoch_end()
            self._after_commands(state, control)

    def on_log(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if self._evaluates:
            self._evaluated.update(parts["logs"])
        else:
            found = {name: value for name, value in parts["logs"].items() if name not in _IN_EVENTS}
            self._training.log_metrics(numbers_in(found))

    def on_evaluate(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        found = {**self._evaluated, **parts["metrics"]}
        found.pop("epoch", None)
        self._evaluates = False
        self._training.eval_end({name.removeprefix(self._prefix): value for name, value in found.items()})

    def on_save(self, args: Any, state: Any, *_: Any, **parts: Any) -> None:
        self._save_requested = False
        self._training.checkpoint_saved()
        path = os.path.join(self._trainer._get_output_dir(trial=None), f"checkpoint-{state.global_step}")
        self._training.checkpoint_written(path, **self._score_of(args, state))

    def _score_of(self, args: Any, state: Any) -> dict[str, Any]:
        if (metric := args.metric_for_best_model) is None:
            return {}
        metric_name = f"eval_{metric.removeprefix('eval_')}"
        if not any(one.get("step") == state.global_step and metric_name in one for one in state.log_history):
            return {}
        mode = "max" if args.greater_is_better else "min"
        for label, values in self._training.state.eval_metric_values.items():
            for name, value in values.items():
                if metric_name == (f"eval_{name}" if label == "eval" else f"eval_{label}_{name}"):
                    return {"metric": f"metrics/{label}/{name}", "value": value, "mode": mode}
        return {}

    def on_train_end(self, *_: Any, **parts: Any) -> None:
        if self._samples:
            self._log_samples(wait=True)
        self._training.fit_end()

    def _after_commands(self, state: Any, control: Any) -> None:
        control.should_training_stop |= self._training.state.stopped
        control.should_save |= self._save_requested

    def _note_place(self, *_: Any, **more: Any) -> None:
        self._trainer.state.stateful_callbacks[_IN_CHECKPOINT] = self._training.state_dict()

    def _evaluate(self) -> None:
        self._control.should_evaluate = True

    def _save(self) -> object:
        # Kept until it is done, because with save_strategy="best" an evaluation overrides the flag.
        self._save_requested = True
        return LATER

    def _begin_fetching(self, *_: Any, **more: Any) -> None:
        self._training.fetch_start()

    def _begin_step(self, model: Any, inputs: Any, *_: Any, **more: Any) -> None:
        if self._generates:
            samples = self._trainer.args.per_device_train_batch_size
        else:
            samples = (find_batch_size(inputs) or 0) // self._sequences
        training = self._training
        is_first = not training.in_batch
        training.batch_start(inputs, samples, count_tokens(inputs))
        if is_first and self._is_requested(_SAMPLES):
            if self._samples is None:
                training.leave_out(f"table {_SAMPLES}", "the trainer's processing_class cannot decode tokens")
            else:
                self._samples.take(inputs, training.batches_done)
        if not self._generates:
            training.fire(Event.BEFORE_FORWARD)

    def _begin_loss(self, *_: Any, **more: Any) -> None:
        if self._trainer.model.training:
            self._training.fire(Event.BEFORE_FORWARD)
            self._train_span = self.span("train")
            self._train_span.__enter__()

    def _end_step(self, loss: Any, *_: Any, **more: Any) -> None:
        self._training.add_loss(loss)
        if self._train_span is not None:
            self._train_span.__exit__(None, None, None)
            self._train_span = None

    def _fail_step(self, error: BaseException) -> None:
        if self._train_span is not None:
            self._train_span.__exit__(type(error), None, None)
            self._train_span = None

    def _log_samples(self, wait: bool = False) -> None:
        for step, rows in self._samples.arrived(wait):
            self.log_table(_SAMPLES, rows, step=step)

    def _begin_completions(self, *_: Any, **more: Any) -> None:
        self._completions = None
        self._table = _COMPLETIONS[not self._trainer.model.training]
        if self._is_requested(self._table):
            logs: Any = getattr(self._trainer, "_logs", None)
            if Completions.supports(logs):
                self._completions = Completions(logs)
            else:
                self._leave_out_completions()

    def _log_completions(self, *_: Any, **more: Any) -> None:
        if self._completions is not None:
            self.log_table(self._table, self._completions.rows)
            if dropped := self._completions.dropped:
                kept = self._trainer.args.generation_batch_size
                self._training.leave_out(f"table {self._table}", f"{dropped} rows, because TRL keeps {kept} of a batch")

    def _leave_out_completions(self) -> None:
        kind = type(self._trainer).__name__
        self._training.leave_out(f"table {_COMPLETIONS[0]}", f"{kind} of this version of TRL does not keep them")

    def _is_requested(self, table: str) -> bool:
        # One rank has the completions of all.
        training = self._training
        return training.state.rank == 0 and not training.requested_events.isdisjoint(_TABLES[table])

    def _begin_evaluation(
        self, dataloader: Any, description: str = "", *_: Any, metric_key_prefix: str = "eval", **more: Any
    ) -> None:
        batches = len(dataloader) if has_length(dataloader) else None
        self._predicts = description == "Prediction"
        if self._predicts:
            self._training.predict_start(batches=batches)
        else:
            self._evaluates, self._evaluated, self._prefix = True, {}, f"{metric_key_prefix}_"
            self._training.eval_start(metric_key_prefix.removeprefix("eval_"), batches=batches)

    def _end_evaluation(self, *_: Any, **more: Any) -> None:
        if self._predicts:
            self._training.predict_end()

    def _begin_evaluation_batch(self, model: Any, inputs: Any, *_: Any, **more: Any) -> None:
        (self._training.predict_batch_start if self._predicts else self._training.eval_batch_start)(inputs)

    def _end_evaluation_batch(self, *_: Any, **more: Any) -> None:
        (self._training.predict_batch_end if self._predicts else self._training.eval_batch_end)()

    def _fire(self, events: Iterable[Event]) -> None:
        for event in events:
            self._training.fire(event)

    def _firing(self, *events: Event) -> Callable[..., None]:
        def fire(*_: Any, **more: Any) -> None:
            if not self.detached and not self._training.requested_events.isdisjoint(events):
                self._fire(events)

        return fire


def _config(trainer: Any) -> dict[str, Any]:
    arguments = trainer.args.to_dict()
    # to_dict() shows "<HUB_TOKEN>" also where none is given.
    given = {name: value for name, value in arguments.items() if getattr(trainer.args, name, None) is not None}
    return {"trainer": type(trainer).__name__, "transformers": __version__, **given}
