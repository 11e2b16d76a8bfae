"""All arguments of ``Trainer``. Does not import torch."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec

from offloop.bus.types.time import TimeInput
from offloop.trainer.arguments.checks import check_function, check_subset
from offloop.trainer.arguments.config import (
    ArgumentGroup,
    CheckpointConfig,
    ComputeConfig,
    EvalConfig,
    Option,
    StreamConfig,
    arguments_of,
    read_duration,
)
from offloop.trainer.arguments.durations import check_iteration_length, check_max_duration

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler

    from offloop.trainer.data.evaluator import Evaluator
    from offloop.trainer.data.spec import DataSpec
    from offloop.trainer.device.device import Device
    from offloop.trainer.engine.state import Algorithm
    from offloop.trainer.loop.optimization import OptimizerFactory, Optimizers
    from offloop.trainer.schedulers import SchedulerFunction


@dataclass(frozen=True)
class _OwnArguments(ArgumentGroup):
    model: "torch.nn.Module"
    train_dataloader: "DataSpec | Iterable[Any] | None" = None
    eval_dataloader: "DataSpec | Iterable[Any] | Evaluator | Sequence[Evaluator] | None" = None
    optimizers: "Optimizers | OptimizerFactory | None" = None
    schedulers: "LRScheduler | SchedulerFunction | Sequence[LRScheduler | SchedulerFunction] | None" = None
    max_duration: Annotated[
        TimeInput | None, check_max_duration, Option("--max-duration -d", metavar="TIME", read=read_duration)
    ] = None
    # For its position: :class:`EvalConfig` declares it.
    eval_interval: TimeInput = "1ep"
    algorithms: "Algorithm | Sequence[Algorithm] | None" = None
    callbacks: Any | Sequence[Any] | None = None
    loggers: Any | Sequence[Any] | None = None
    run_name: Annotated[str | None, Option(metavar="NAME")] = None
    seed: Annotated[int | None, Option(least=0, most=2**32 - 1)] = None
    device: Annotated["str | torch.device | Device", Option(choices=["auto", "cpu", "gpu"], help="where to train.")] = (
        "auto"
    )
    _: KW_ONLY
    train_subset_num_batches: Annotated[
        int, check_subset, Option("--train-batches", metavar="N", least=1, help="batches in an epoch; by default all.")
    ] = -1
    iteration_length: Annotated[
        TimeInput | None, check_iteration_length, Option(metavar="TIME", read=check_iteration_length)
    ] = None
    step_schedulers_every_batch: bool | None = None
    scale_schedule_ratio: float = 1.0
    progress_bar: Annotated[bool, Option("--progress")] = True
    clock: Annotated[Callable[[], int] | None, partial(check_function, call="()")] = None


GROUPS: Sequence[type[ArgumentGroup]] = (EvalConfig, ComputeConfig, CheckpointConfig, StreamConfig)


@dataclass(frozen=True, kw_only=True)
class TrainerArguments(StreamConfig, CheckpointConfig, ComputeConfig, EvalConfig, _OwnArguments):
    """The arguments of :class:`offloop.trainer.Trainer`: its own and those of the groups.

    Args:
        model: an ``nn.Module`` with the methods of :class:`offloop.trainer.data.models.Model`, such as
            :class:`offloop.trainer.Classifier`.
        train_dataloader: a dataloader, or a :class:`offloop.trainer.DataSpec` that counts and splits its batches.
        eval_dataloader: a dataloader (its label is ``eval``), a :class:`offloop.trainer.Evaluator` or a list of them.
        optimizers: one or several torch optimizers of the model's parameters, or a function that makes them from the
            model. It is called after ``INIT``, when algorithms have changed the model.
        schedulers: one schedule of :mod:`offloop.trainer.schedulers`, or a function ``(state, ssr)`` that returns a
            factor of the base rate. It follows the training time, for all optimizers. Or one or several of torch's
            schedulers.
        max_duration: how long to train: ``5ep``, ``1000ba``, ``10000sp``, ``1e6tok``, ``1h30m``. A number is epochs.
        algorithms: :class:`offloop.trainer.Algorithm` objects, which run in the loop and may change it.
        callbacks, loggers: objects of the package ``consumers``, or names as for the command ``consumer``, such as
            ``"speed"`` and ``"jsonl"``. They run in a separate process.
        run_name: the run's name, by default a new one.
        seed: for Python's, numpy's and torch's random numbers. By default a new one, which is recorded.
        device: where to train: ``auto``, ``cpu`` or ``gpu``, or torch's device ``cpu`` or ``cuda``.
        train_subset_num_batches: batches in an epoch; -1 for all.
        iteration_length: epochs or tokens in an iteration: ``2ep``, ``1000000tok``.
        step_schedulers_every_batch: whether schedulers step after each batch (``True``) or each epoch (``False``). By
            default schedules that follow the training time step after each batch, torch's after each epoch.
        scale_schedule_ratio: stretches the times of time-aware schedulers, and ``max_duration``.
        progress_bar: whether to show the progress on standard error, on the first rank: the run, its recording, how to
            watch it, and why it was stopped.
        clock: returns nanoseconds since 1970, for tests."""


_Given = ParamSpec("_Given")


def accept_arguments(
    arguments: Callable[_Given, TrainerArguments],
) -> Callable[[Callable[[Any, TrainerArguments], None]], Callable[Concatenate[Any, _Given], None]]:
    """Decorate an ``__init__`` of :class:`TrainerArguments` to accept its arguments."""
    signature = inspect.signature(arguments)

    def decorate(init: Callable[[Any, TrainerArguments], None]) -> Callable[Concatenate[Any, _Given], None]:
        def __init__(self: Any, /, *args: _Given.args, **kwargs: _Given.kwargs) -> None:
            init(self, TrainerArguments(**signature.bind(*args, **kwargs).arguments))

        types = {one.name: one.type for one in arguments_of(TrainerArguments)}
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [one.replace(annotation=types[one.name]) for one in signature.parameters.values()]
        __init__.__signature__ = signature.replace(parameters=[own, *parameters])  # type: ignore[attr-defined]
        return __init__

    return decorate
