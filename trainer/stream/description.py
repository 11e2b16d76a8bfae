"""Facts that a run publishes once: its machine, the sizes of its data, its hyperparameters."""

import contextlib
import enum
import functools
import inspect
import numbers
import os
import platform
import shlex
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from os import PathLike, fspath
from typing import Any

import torch

from offloop.bus.redaction import is_named_tuple, redact
from offloop.bus.strict_json import flatten
from offloop.bus.types.hyperparameters import MOST
from offloop.bus.types.metrics import GOALS, Mode, direction_of
from offloop.bus.types.time import Time
from offloop.trainer.arguments.values import optimizer_names, unique_names
from offloop.trainer.distributed.ranks import local_world_size
from offloop.trainer.engine.state import State
from offloop.trainer.schedulers import TimeAwareScheduler


def describe_system(state: State) -> dict[str, Any]:
    """Return facts about this rank's machine and software, without unknown ones."""
    on_gpu = state.device.name == "gpu"
    ranks_here = local_world_size(state.world_size)
    facts = {
        "host": socket.gethostname(),
        "operating_system": f"{platform.system()} {platform.release()}",
        "cpu_threads": os.cpu_count(),
        "nodes": max(state.world_size // ranks_here, 1),
        "accelerators": ranks_here if on_gpu else 0,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_gpu else None,
    }
    with contextlib.suppress(PackageNotFoundError):
        facts["offloop"] = version("offloop")
    return {name: value for name, value in facts.items() if value is not None}


def describe_sizes(state: State) -> dict[str, Any]:
    """Return seed, batch sizes, numbers of samples, and the earlier time of evaluations, without unknown ones."""
    batch = getattr(state.train_dataloader, "batch_size", None)
    batch = batch if type(batch) is int else None
    # Of an attached training the evaluations to come are unknown.
    evaluators = getattr(state, "evaluators", None)
    evaluated = [_samples(evaluator.dataloader) for evaluator in evaluators or ()]
    facts = {
        "seed": state.seed,
        "global_train_batch_size": None if batch is None else batch * state.world_size,
        "device_train_microbatch_size": state.device_train_microbatch_size or batch,
        "train_samples": _samples(state.train_dataloader),
        "evaluators": None if evaluators is None else [one.label for one in evaluators],
        "eval_samples": None if evaluators is None or None in evaluated else sum(filter(None, evaluated)),
        "total_eval_wct": state.total_eval_wct or None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _samples(dataloader: Any) -> int | None:
    # Streaming datasets have no length, or one that raises.
    with contextlib.suppress(TypeError, NotImplementedError, AttributeError):
        return len(dataloader.dataset)
    return None


_LONGEST_NAME = 200
_LONGEST_TEXT = 1000
_LONGEST_READ = 1 << 16
_LONGEST_LIST = 32
_MOST_GROUPS = 8
_DEEPEST = 8
_LARGEST = 2**63 - 1

_VERSIONS = ("python", "torch", "cuda", "offloop")
_NO_ARGUMENTS = ("optimizer", "last_epoch", "verbose", "params")
_NOT_OPTIONS = ("params", "param_names", "initial_lr")
_NOT_CHOSEN = ("total_eval_wct",)


def describe_hyperparameters(state: State, system: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the present hyperparameters by name, such as ``optimizer/lr``, without unknown ones.

    Values are numbers, texts, booleans and short lists. Secrets are removed, see :func:`offloop.bus.redaction.redact`.
    Nothing is read from a GPU.

    Args:
        state: of the training.
        system: the result of ``describe_system``.
        info: the run's description: ``config``, ``command``, ``git_commit``, ``git_dirty``, ``versions``."""
    sizes = {name: value for name, value in describe_sizes(state).items() if name not in _NOT_CHOSEN}
    versions = {name: version for name, version in {**info.get("versions", {}), **system}.items() if name in _VERSIONS}
    found = {
        "model": _model(state.model),
        **_optimizers(state.optimizers),
        **_schedulers(state.schedulers),
        **sizes,
        "train_batches": state.dataloader_len if state.train_dataloader is not None else None,
        "max_duration": state.max_duration,
        "precision": state.precision,
        "device": str(state.device.torch_device.type),
        "world_size": state.world_size,
        **_algorithms(state.algorithms),
        GOALS: _goals(state),
        "config": info.get("config", {}),
        "command": shlex.join(redact([str(word) for word in info.get("command", ())])) or None,
        "git": {"commit": info.get("git_commit"), "dirty": info.get("git_dirty")},
        "version": {**info.get("versions", {}), **versions},
        "machine": {
            "device": state.device.model_name,
            **{name: value for name, value in system.items() if name not in _VERSIONS},
        },
    }
    flat = flatten(plain_value(found))
    named = ((_text(name, _LONGEST_NAME), value) for name, value in flat.items() if value is not None)
    return dict(islice(named, MOST))


def _model(model: torch.nn.Module) -> dict[str, Any]:
    parameters = list(model.parameters())
    return {
        "name": type(model).__name__,
        **_arguments(model),
        "parameters": sum(one.numel() for one in parameters),
        "trainable_parameters": sum(one.numel() for one in parameters if one.requires_grad),
    }


def _optimizers(optimizers: Sequence[Any]) -> dict[str, Any]:
    names = optimizer_names(list(optimizers))
    return {
        prefix: {"name": type(optimizer).__name__, **_groups(optimizer.param_groups)}
        for prefix, optimizer in _prefixed("optimizer", names, optimizers)
    }


def _groups(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    options = [_options(group) for group in groups[:_MOST_GROUPS]]
    if len(groups) == 1:
        return options[0]
    others = {
        f"group{number}": {name: value for name, value in group.items() if options[0].get(name) != value}
        for number, group in enumerate(options[1:], 1)
    }
    return {**options[0], "groups": len(groups), **others}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    # A schedule has changed the rate already, and keeps the given one.
    rate = {"lr": group["initial_lr"]} if "initial_lr" in group else {}
    return {str(name): _plain(value) for name, value in {**group, **rate}.items() if name not in _NOT_OPTIONS}


def _schedulers(schedulers: Sequence[Any]) -> dict[str, Any]:
    # One schedule may serve several optimizers.
    chosen = {id(one): one for one in map(_schedule, schedulers)}.values()
    names = unique_names(map(_name_of, chosen))
    described = {
        prefix: {"name": _name_of(one), **_arguments(one)}
        for prefix, one in _prefixed("scheduler", names, list(chosen))
    }
    ratios = {one.scale_schedule_ratio for one in schedulers if isinstance(one, TimeAwareScheduler)} - {1.0}
    return {**described, **({"scale_schedule_ratio": ratios.pop()} if ratios else {})}


def _schedule(scheduler: Any) -> Any:
    return scheduler.schedule if isinstance(scheduler, TimeAwareScheduler) else scheduler


def _algorithms(algorithms: Sequence[Any]) -> dict[str, Any]:
    names = unique_names(type(one).__name__ for one in algorithms)
    arguments = {name: _arguments(one) for name, one in zip(names, algorithms, strict=True)}
    return {"algorithms": names, "algorithm": arguments} if names else {}


def _goals(state: State) -> dict[str, Mode]:
    groups = {"train": state.train_metrics, **state.eval_metrics}
    named = {f"metrics/{group}/{name}": metric for group, own in groups.items() for name, metric in own.items()}
    knows: dict[Any, Mode] = {True: "max", False: "min"}
    said = {name: knows.get(getattr(metric, "higher_is_better", None)) for name, metric in named.items()}
    return {name: goal for name, goal in said.items() if goal is not None and direction_of(name) != goal}


def _prefixed(prefix: str, names: Sequence[str], things: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for name, thing in zip(names, things, strict=True):
        yield (prefix if len(things) == 1 else f"{prefix}/{name}"), thing


def _arguments(made: Any) -> dict[str, Any]:
    if inspect.isroutine(made) or isinstance(made, functools.partial):
        return {}
    try:
        names = list(inspect.signature(type(made).__init__).parameters)[1:]
    except (TypeError, ValueError):
        return {}
    # From __dict__: a property may compute anything.
    kept = _kept(made)
    arguments = {name: kept[name] for name in names if name in kept and name not in _NO_ARGUMENTS}
    return {name: value for name, value in arguments.items() if _is_describable(value)}


def _kept(made: Any) -> dict[str, Any]:
    values = getattr(made, "__dict__", {})
    modules = values.get("_modules") if isinstance(made, torch.nn.Module) else None
    return {name.removeprefix("_"): value for name, value in values.items()} | values | (modules or {})


def _is_describable(value: Any) -> bool:
    if isinstance(value, Mapping | torch.Tensor):
        return False
    return not isinstance(value, Iterable) or isinstance(value, str | list | tuple | torch.nn.Module)


# -- values -----------------------------------------------------------------------------------------------------------


def plain_value(value: Any) -> Any:
    """Convert a value to numbers, texts, booleans, lists and maps, without secrets; other objects to their names."""
    # In this order: redaction recognises a secret only as a whole, and by its name.
    return _shortened(redact(_plain(value)))


def _plain(value: Any, depth: int = 0) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, numbers.Integral):
        return whole if abs(whole := int(value)) <= _LARGEST else str(whole)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, torch.Tensor):
        # Reading a tensor on a device would wait for it.
        on_host = value.device.type == "cpu" and value.numel() == 1
        return value.item() if on_host else f"tensor of shape {list(value.shape)}"
    if is_named_tuple(value):
        value = value._asdict()
    if isinstance(value, Mapping) and depth < _DEEPEST:
        return {str(name): _plain(part, depth + 1) for name, part in islice(value.items(), MOST)}
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    if isinstance(value, list | tuple) and depth < _DEEPEST:
        return [_plain(part, depth + 1) for part in islice(value, _LONGEST_LIST + 1)]
    return str(value)[:_LONGEST_READ] if isinstance(value, str) else _name_of(value)


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {_text(name, _LONGEST_NAME): _shortened(part) for name, part in value.items()}
    if isinstance(value, list):
        parts = [_shortened(part) for part in value]
        if len(parts) <= _LONGEST_LIST and not any(isinstance(part, dict) for part in parts):
            return parts
        value = ", ".join(map(str, parts))
    return _text(value, _LONGEST_TEXT) if isinstance(value, str) else value


def _name_of(value: Any) -> str:
    if isinstance(value, Time | torch.dtype | torch.device):
        return str(value)
    if isinstance(value, PathLike):
        return str(fspath(value))
    if isinstance(value, functools.partial):
        return _name_of(value.func)
    if isinstance(value, type) or inspect.isroutine(value):
        return value.__qualname__.replace("<locals>.", "").replace("<lambda>", "lambda")
    return type(value).__name__


def _text(value: Any, longest: int) -> str:
    # Only UTF-8 can be sent.
    text = str(value).encode(errors="backslashreplace").decode()
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
