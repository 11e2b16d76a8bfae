"""Groups of the arguments of ``Trainer``, with types, checks and command line options. Does not import torch."""

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args, get_origin

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.demand import check_max_delay
from offloop.bus.types.event import Event
from offloop.bus.types.time import TimeInput
from offloop.trainer.arguments.checks import (
    PRECISIONS,
    check_choice,
    check_config,
    check_flag,
    check_flight_recorder,
    check_number,
    check_path,
    check_record,
    check_subset,
    check_text,
)
from offloop.trainer.arguments.durations import check_interval, check_max_duration

PathInput = str | os.PathLike[str]


@dataclass(frozen=True)
class Option:
    """The form of an argument on the command line: by default ``--its-name VALUE``, for a ``bool`` a flag."""

    name: str = ""  # replaces --its-name; several names with spaces
    metavar: str | None = None
    choices: Sequence[str] = ()
    least: int | None = None
    most: int | None = None
    path: Literal["any", "existing"] | None = None  # for a path: existing if it must exist
    read: Callable[[str], Any] | None = None  # reads any other value from text. Raises our errors
    sets: Any = None  # for a flag: the value of the argument when the flag is given
    many: bool = False  # whether the value is a list of names, with commas or given several times
    needs: Sequence[str] = ()  # arguments without which it has no effect
    help: str = ""  # replaces the argument's documentation


class Argument(NamedTuple):
    name: str
    type: Any
    default: Any
    checks: list[Callable[[Any, str], object]]
    options: list[Option]
    help: str


@dataclass(frozen=True)
class ArgumentGroup:
    """Arguments that are checked when the object is made.

    A field's annotation holds the type, its checks (functions of the value and the name) and its options. A ``bool`` is
    always checked; ``None`` is not checked where the type allows it. The docstring's ``Args`` document the fields."""

    heading: ClassVar[str]

    def __post_init__(self) -> None:
        for one in arguments_of(type(self)):
            value = getattr(self, one.name)
            if value is not None or type(None) not in get_args(one.type):
                for check in one.checks:
                    try:
                        check(value, one.name)
                    except ConfigurationError as error:
                        error.name, error.value = one.name, value
                        raise


def arguments_of(group: type[ArgumentGroup]) -> list[Argument]:
    helps: dict[str, str] = {}
    for one in reversed(group.__mro__):
        for names, text in _DOCUMENTED.findall(inspect.cleandoc(one.__doc__ or "")):
            helps |= dict.fromkeys(names.split(", "), _MARKUP.sub(r"\1\2", " ".join(text.split())))
    arguments = []
    for field in fields(group):
        kind, *notes = get_args(field.type) if get_origin(field.type) is Annotated else (field.type,)
        checks = [one for one in notes if not isinstance(one, Option)]
        options = [one for one in notes if isinstance(one, Option)]
        if bool in (kind, *get_args(kind)):
            checks.append(check_flag)
        arguments.append(Argument(field.name, kind, field.default, checks, options, helps.get(field.name, "")))
    return arguments


_DOCUMENTED = re.compile(r"^    (\w+(?:, \w+)*): (.+(?:\n {8}.+)*)", re.MULTILINE)
_MARKUP = re.compile(r":\w+:`~?([^`]*)`|``([^`]*)``")


def _read_interval(text: str) -> TimeInput:
    return 0 if text.strip() == "0" else check_interval(text)


def read_duration(text: str) -> TimeInput:
    duration = check_max_duration(text)
    if duration.value == 0:
        raise ConfigurationError(f"{text} trains nothing: use 1ep or more")
    return duration


def _read_microbatch_size(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) == 0:
        raise ConfigurationError(f"{text!r} is not a number of samples: use 1 or more, or 'auto'")
    return int(text)


@dataclass(frozen=True)
class EvalConfig(ArgumentGroup):
    """When to evaluate, and on how many batches. An :class:`offloop.trainer.Evaluator` may override both.

    Args:
        eval_interval: how often to evaluate: ``1ep``, ``100ba``, or a share such as ``0.25dur``; 0 for never.
        eval_subset_num_batches: batches in an evaluation; -1 for all."""

    heading = "Evaluation"

    eval_interval: Annotated[TimeInput, check_interval, Option(metavar="TIME", read=_read_interval)] = "1ep"
    _: KW_ONLY
    eval_subset_num_batches: Annotated[
        int,
        check_subset,
        Option("--eval-batches", metavar="N", least=1, help="batches in an evaluation; by default all."),
    ] = -1


@dataclass(frozen=True, kw_only=True)
class ComputeConfig(ArgumentGroup):
    """How to compute a batch: precision, microbatches, compilation, several ranks.

    Args:
        precision: precision where 16 bits suffice: ``fp32`` (the default), ``amp_bf16``, or ``amp_fp16``, which scales
            the loss.
        device_train_microbatch_size: splits batches into microbatches of so many samples and adds up their gradients.
            ``auto`` halves them when the memory runs out. By default batches are whole.
        deterministic_mode: makes torch use only deterministic algorithms, and fail where it has none.
        compile_config: keyword arguments of ``torch.compile``, ``{}`` for its defaults; ``None`` does not compile.
        find_unused_parameters: with several ranks, whether a forward pass may leave out parameters, see torch's
            ``DistributedDataParallel``.
        fsdp_config: shards the model over several ranks instead of copying it to each (DDP): keyword arguments of
            :class:`offloop.trainer.distributed.sharding.FullySharded`, which are ``shard``, ``reshard_after_forward``,
            ``mp_policy`` and ``offload_policy``; ``{}`` for the defaults."""

    heading = "Computing"

    precision: Annotated[str | None, partial(check_choice, choices=PRECISIONS), Option(choices=PRECISIONS)] = None
    device_train_microbatch_size: Annotated[
        int | Literal["auto"] | None, Option("--microbatch-size", metavar="N|auto", read=_read_microbatch_size)
    ] = None
    deterministic_mode: Annotated[bool, Option("--deterministic")] = False
    compile_config: Annotated[
        Mapping[str, Any] | None, Option("--compile", sets={}, help="compile the model with torch.compile.")
    ] = None
    find_unused_parameters: bool = False
    fsdp_config: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(ArgumentGroup):
    """Which checkpoints a training writes, and which one it resumes from.

    Args:
        save_folder: where to write checkpoints; without it none are written. ``{run_name}`` and other placeholders are
            filled in.
        save_filename, save_latest_filename: names of checkpoints in it, see :mod:`offloop.trainer.checkpoints.folder`.
        save_interval: how often to write one, besides at the end: ``1ep``, ``100ba``, ``0.1dur``; 0 for never.
        save_num_checkpoints_to_keep: how many of the newest checkpoints to keep; -1 for all.
        save_overwrite: whether to overwrite checkpoints that are in the folder already.
        save_weights_only: whether to write the model alone.
        load_path: a checkpoint to resume from, or a folder of them, of which the latest is used.
        load_weights_only: loads only the model's weights.
        load_strict_model_weights: whether the checkpoint must have all of the model's weights and no others.
        autoresume: resumes from the latest checkpoint in ``save_folder``, if it has one. Needs a ``run_name``. A
            training that can read none of its checkpoints refuses to start.
        from_scratch: starts from the beginning there, beside the checkpoints that cannot be read."""

    heading = "Checkpoints"

    save_folder: Annotated[PathInput | None, check_path, Option(metavar="DIR")] = None
    save_filename: Annotated[str, check_text] = "ep{epoch}-ba{batch}-rank{rank}.safetensors"
    save_latest_filename: Annotated[str | None, check_text] = "latest-rank{rank}.safetensors"
    save_interval: Annotated[
        TimeInput, check_interval, Option(metavar="TIME", read=_read_interval, needs=["save_folder"])
    ] = "1ep"
    save_num_checkpoints_to_keep: Annotated[
        int,
        Option(
            "--keep",
            metavar="N",
            least=1,
            needs=["save_folder"],
            help="how many of the newest checkpoints to keep; by default all.",
        ),
    ] = -1
    save_overwrite: Annotated[bool, Option(needs=["save_folder"])] = False
    save_weights_only: bool = False
    load_path: Annotated[PathInput | None, check_path, Option(metavar="PATH", path="existing")] = None
    load_weights_only: Annotated[bool, Option(needs=["load_path"])] = False
    load_strict_model_weights: Annotated[
        bool,
        Option(
            "--load-what-fits",
            sets=False,
            needs=["load_path"],
            help="load the weights that fit, even if some are missing or unknown.",
        ),
    ] = True
    autoresume: Annotated[bool, Option(needs=["save_folder", "run_name"])] = False
    from_scratch: Annotated[bool, Option(needs=["autoresume"])] = False


@dataclass(frozen=True, kw_only=True)
class StreamConfig(ArgumentGroup):
    """The stream of a training, its recording, and the rights of consumers.

    Args:
        publish: whether to publish and record the training.
        runs_dir: the folder of runs, by default ``$OFFLOOP_RUNS_DIR`` or ``runs``.
        stream_to: where to copy the run, such as ``nats://HOST:4222``, by default ``$OFFLOOP_STREAM``. In a training on
            several hosts each host then has its own broker and recording.
        record: events to record beside the base set, such as ``batch_start``, ``@rollout_end`` or ``@*`` for your own,
            or ``all``. Others are recorded while a
            consumer requests them.
        flight_recorder: how many of the last batches to keep in memory with all events and phases, such as ``200ba``.
            They are written to a separate recording when a rank fails, dies or has a loss that is not finite, and on
            request.
        capture_console: whether to keep what each rank prints, see ``docs/runs.md``. The command ``trainer`` does.
        max_delay: seconds by which the events of batches may be late in a fast loop, see
            :class:`offloop.bus.Publisher`.
        backlog_bytes: bound of the memory for events that the broker has not yet written to disk, by default 64 MiB.
        config: further facts about the run for ``run.json``.
        fields: further fields that consumers can request, by name: functions of the state, which return
            numbers, text, tensors, lists or maps.
        settings: further names for ``offloop send RUN set NAME VALUE``: functions of the state and the value.
        wait_for: names of consumers that may stop the training. The training waits where they decide, so that they
            stop it exactly there. ``callbacks`` stands for those given to the trainer, ``all`` for every such consumer.
        wait_seconds: how long to wait for one consumer at a time."""

    heading = "Stream"

    publish: Annotated[bool, Option()] = True
    runs_dir: Annotated[PathInput | None, check_path, Option(metavar="DIR", path="any")] = None
    stream_to: Annotated[str | None, Option("--stream", metavar="ADDRESS")] = None
    record: Annotated[str | Iterable[Event | str] | None, check_record, Option(metavar="EVENTS")] = None
    flight_recorder: Annotated[
        TimeInput | None, check_flight_recorder, Option(metavar="BATCHES", read=check_flight_recorder)
    ] = None
    capture_console: Annotated[
        bool, Option("--no-console", sets=False, help="do not keep what the training prints.")
    ] = False
    max_delay: Annotated[float, check_max_delay] = 0.05
    backlog_bytes: Annotated[int | None, Option(metavar="N")] = None
    config: Annotated[Mapping[str, Any] | None, check_config] = None
    fields: Mapping[str, Callable[[Any], Any]] | None = None
    settings: Mapping[str, Callable[[Any, Any], object]] | None = None
    wait_for: Annotated[str | Sequence[str] | None, Option(metavar="NAME[,NAME...]", many=True)] = None
    wait_seconds: Annotated[float, partial(check_number, above=0), Option(metavar="S")] = 30.0
