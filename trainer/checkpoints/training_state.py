"""The contents of a checkpoint: everything that determines how a training continues."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offloop.bus.errors import CheckpointError
from offloop.bus.types.timestamp import Timestamp
from offloop.trainer.arguments.values import optimizer_names
from offloop.trainer.data.resume import generator_states, restore_generators
from offloop.trainer.engine.state import State

_PARTS = ("algorithms", "optimizers", "schedulers", "scaler", "metrics", "microbatch_size", "timestamp", "evaluation")


def weights_tree(state: State) -> dict[str, Any]:
    return {"model": state.model.state_dict(), "timestamp": list(state.timestamp.values), "run": _run(state)}


def training_tree(state: State) -> dict[str, Any]:
    """Return the whole training except its position in the data, as maps and lists of tensors, numbers and text."""
    names = optimizer_names(state.optimizers)
    return {
        **weights_tree(state),
        "optimizers": {name: one.state_dict() for name, one in zip(names, state.optimizers, strict=True)},
        "schedulers": [[type(one).__name__, _plain_scheduler(one)] for one in state.schedulers],
        "scaler": None if state.scaler is None else _scaler_state(state.scaler),
        "microbatch_size": state.device_train_microbatch_size,
        "algorithms": [[type(one).__name__, one.state_dict()] for one in state.algorithms],
        "metrics": {name: dict(metric.metric_state) for name, metric in state.train_metrics.items()},
        "evaluation": {
            "values": state.eval_metric_values,
            "total_wct": state.total_eval_wct,
            "last_batches": state.evaluated_at,
            "generators": {one.label: generator_states(one.dataloader) for one in state.evaluators},
        },
    }


def load_model(state: State, weights: Mapping[str, Any], path: Any, strict: bool = True) -> None:
    own = state.model.state_dict()
    wrong = [
        f"{name} is {_shape(weights[name])} there and {_shape(own[name])} here"
        for name in own
        if name in weights and _shape(weights[name]) != _shape(own[name])
    ]
    missing, unknown = [name for name in own if name not in weights], [name for name in weights if name not in own]
    if strict:
        wrong += [f"it lacks {_some(missing)}"] if missing else []
        wrong += [f"it has {_some(unknown)}, unknown to the model"] if unknown else []
    if wrong:
        raise CheckpointError(
            f"checkpoint {path} belongs to another model than {type(state.model).__name__}: {'; '.join(wrong[:4])}; "
            "make the model as it was, or load what fits with load_strict_model_weights=False (--load-what-fits)",
            path=path,
        )
    try:
        state.model.load_state_dict(dict(weights), strict=strict)
    except RuntimeError as error:
        raise CheckpointError(f"the weights in checkpoint {path} do not fit: {error}", path=path) from None


def load_training(state: State, tree: Mapping[str, Any], path: Any) -> None:
    """Restore everything except the model and the schedulers from :func:`training_tree`."""
    for key in _PARTS:
        if key not in tree:
            raise CheckpointError(
                f"checkpoint {path} has no {key!r}, so it is not of a whole training: "
                "load its weights with load_weights_only=True",
                path=path,
            )
    # Before the optimizers: an algorithm may have changed their parameters.
    _load_algorithms(state, tree["algorithms"], path)
    _load_optimizers(state, tree["optimizers"], path)
    if state.scaler is not None and tree["scaler"]:
        numbers = tree["scaler"].items()
        state.scaler.load_state_dict(
            {name: one.item() if isinstance(one, torch.Tensor) else one for name, one in numbers}
        )
    for name, values in tree["metrics"].items():
        if name in state.train_metrics:
            for key, value in values.items():
                setattr(state.train_metrics[name], key, value)
            state.train_metrics[name].to(state.device.torch_device)
    state.timestamp = Timestamp.from_values(tree["timestamp"])
    seen = tree["evaluation"]
    state.eval_metric_values = seen["values"]
    state.total_eval_wct = seen.get("total_wct", 0)
    state.evaluated_at = seen["last_batches"]
    for evaluator in state.evaluators:
        restore_generators(evaluator.dataloader, seen["generators"].get(evaluator.label, ()))


def _scaler_state(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    # Tensors on a GPU stay tensors: state_dict() would wait for it.
    if scaler._scale is None:
        return scaler.state_dict()
    return {
        "scale": scaler._scale,
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "_growth_tracker": scaler._growth_tracker,
    }


def _run(state: State) -> dict[str, Any]:
    return {
        "name": state.run_name,
        "seed": state.seed,
        "world_size": state.world_size,
        "precision": state.precision,
        "model": type(state.model).__name__,
        "torch": torch.__version__,
    }


def _load_optimizers(state: State, saved: Mapping[str, Any], path: Any) -> None:
    names = optimizer_names(state.optimizers)
    _check_same("optimizers", sorted(saved), sorted(names), path)
    for name, optimizer in zip(names, state.optimizers, strict=True):
        try:
            optimizer.load_state_dict(saved[name])
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the state of optimizer {name} in checkpoint {path} does not fit: {error}", path=path
            ) from None


def load_schedulers(state: State, saved: Sequence[Any], path: Any) -> None:
    names = [type(scheduler).__name__ for scheduler in state.schedulers]
    _check_same("schedulers", [name for name, _ in saved], names, path)
    for scheduler, (_, values) in zip(state.schedulers, saved, strict=True):
        kinds = vars(scheduler)
        # MultiStepLR keeps a Counter, which is a plain map in a file.
        values = {
            name: type(kinds[name])(value) if isinstance(value, dict) and isinstance(kinds.get(name), dict) else value
            for name, value in values.items()
        }
        scheduler.load_state_dict(values)


def _load_algorithms(state: State, saved: Sequence[Any], path: Any) -> None:
    rest = list(saved)
    for algorithm in state.algorithms:
        name = type(algorithm).__name__
        found = next((one for one in rest if one[0] == name), None)
        if found is None:
            if algorithm.state_dict():
                raise CheckpointError(
                    f"checkpoint {path} was made without the algorithm {name}, which has a state to restore: "
                    "leave it out, or start anew with load_weights_only=True",
                    path=path,
                )
            continue
        rest.remove(found)
        algorithm.load_state_dict(found[1])
    lost = [name for name, values in rest if values]
    if lost:
        raise CheckpointError(
            f"checkpoint {path} was made with the algorithms {_some(lost)}, which the trainer does not have: "
            "add them, or load the weights with load_weights_only=True",
            path=path,
        )


def _check_same(what: str, saved: Sequence[str], own: Sequence[str], path: Any) -> None:
    if saved != own:
        raise CheckpointError(
            f"checkpoint {path} was made with the {what} {_some(saved)}, the trainer has {_some(own)}: "
            "use the same ones, or load_weights_only=True",
            path=path,
        )


def _plain_scheduler(scheduler: Any) -> dict[str, Any]:
    values: dict[str, Any] = scheduler.state_dict()
    return {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}


def _shape(tensor: Any) -> tuple[int, ...] | str:
    return tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3]) or "none"
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
