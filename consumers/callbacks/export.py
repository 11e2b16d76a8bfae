"""Exports the trained model for inference."""

import logging
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from offloop.bus.errors import (
    CheckpointError,
    ConfigurationError,
    FieldNotAvailableError,
    RunDirectoryError,
    check_choice,
    require,
)
from offloop.bus.files import atomic_replace, sync
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.tensors.view import TensorView
from offloop.bus.types.demand import Demand, EventDemand
from offloop.bus.types.event import Event
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger
from offloop.consumers.api.optional import np, torch

Sample: TypeAlias = "dict[str, np.ndarray[Any, Any]]"
ExportFormat: TypeAlias = Literal["torch.export", "torchscript", "onnx"]

_log = logging.getLogger("offloop")

ModelSource: TypeAlias = str | Callable[[], Any]  # A class or function that builds a model, or package.module:function

Names: TypeAlias = Sequence[str] | None

# Kinds of numbers as safetensors names them, and as torch does; the width follows.
_KINDS = {"BF": "bfloat", "F": "float", "I": "int", "U": "uint", "C": "complex"}
_DTYPES = {"BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu"}

_HOW = "give a class or a function without arguments that builds it, or package.module:function"

_TORCH = ["torch", "numpy"]
_PACKAGES = {"torch.export": _TORCH, "torchscript": _TORCH, "onnx": [*_TORCH, "onnx", "onnxscript"]}


def _write(
    module: "torch.nn.Module", arguments: tuple[Any, ...], save_format: ExportFormat, path: Path, **names: Any
) -> None:
    """Write a module in its current mode, so that it can be run without its code.

    ``arguments`` are those of a call. Batches of the file's model may have another size, unless the module fixes it."""
    if save_format == "torchscript":
        try:
            script = torch.jit.script(module)
            # Annotations may promise parts of a batch that a batch without targets lacks.
            script(*arguments)
        except Exception as error:  # noqa: BLE001  its compiler raises anything for Python that it does not know
            _log.info("the model %s is traced, as its code cannot be TorchScript: %s", type(module).__name__, error)
            script = torch.jit.trace(module, arguments)  # type: ignore[no-untyped-call]
        torch.jit.save(script, path)
        return
    sizes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in _tensors_in(arguments):
        if tensor.ndim:
            sizes[tensor] = {0: torch.export.Dim.AUTO}
    shapes = sizes.dynamic_shapes(module, arguments)  # type: ignore[no-untyped-call]
    program = torch.export.export(module, arguments, dynamic_shapes=shapes)
    if save_format == "onnx":
        # One file, unless the model exceeds 2 GB, the limit of one file.
        torch.onnx.export(program, (), path, dynamo=True, external_data=False, verbose=False, **names)
    else:
        torch.export.save(program, path)


def _tensors_in(value: Any) -> "Iterator[torch.Tensor]":
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_in(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors_in(one)


Transform: TypeAlias = Callable[[Any], Any]


class ExportForInferenceCallback(Callback):
    """Writes the trained model at ``FIT_END`` so that it runs without its code: with torch.export, TorchScript or ONNX.

    ``model`` builds one of the same architecture in this process, which gets the trained weights and is put into
    evaluation mode; or the part of the trained model that takes plain tensors, such as the module in a
    ``offloop.trainer.Classifier``, whose weights are found by their names. The file is replaced in one step, and passed
    to the loggers that keep files.

    Args:
        save_format: ``torch.export`` (read with ``torch.export.load``), ``torchscript`` (``torch.jit.load``; scripted,
            or traced where its code is not TorchScript) or ``onnx``.
        save_path: the file, relative to the working directory of the callback's process.
        model: a class or function without arguments, or ``package.module:function``.
        sample_input: arguments of a call of the model, as a tuple, or its only argument. By default two rows of the
            last batch: a whole model gets a batch without its targets, a part of one its inputs. The exported model
            takes any number of rows unless its code fixes it.
        transforms: functions that receive the model and return the one to write, such as a quantization.
        input_names, output_names: names of inputs and outputs in an ONNX file.

    Raises :class:`offloop.bus.errors.ConfigurationError` for invalid arguments and a missing package; at ``FIT_END``
    for weights that do not fit and a model that cannot be called or exported. Weights that went through shared memory
    are not recorded, so a replay has nothing to export. Needs ``pip install 'offloop[export]'``. Reference:
    ``composer/callbacks/export_for_inference.py``."""

    background: bool = True

    def __init__(
        self,
        save_format: ExportFormat,
        save_path: str | Path,
        *,
        model: ModelSource,
        sample_input: object | None = None,
        transforms: Sequence[Transform] | None = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
    ) -> None:
        check_choice("save_format", save_format, _PACKAGES)
        if "://" in str(save_path):
            raise ConfigurationError(
                f"save_path {str(save_path)!r} is not a path on this machine: loggers that keep files upload the file"
            )
        if save_format != "onnx" and (input_names or output_names):
            raise ConfigurationError(f"input_names and output_names are for save_format onnx, not {save_format}")
        if transforms is not None and not all(map(callable, transforms)):
            raise ConfigurationError(
                "transforms are not all functions: give functions that receive a model and return one"
            )
        require(f"save_format {save_format}", "export", *_PACKAGES[save_format])
        builder_of(model)
        self._save_format = save_format
        self._save_path = Path(save_path)
        self._model = model
        self._sample_input = sample_input
        self._transforms = tuple(transforms or ())
        self._names: dict[str, Any] = {"input_names": input_names, "output_names": output_names}
        self._sample: Sample = {}

    def demand(self) -> Demand:
        requests = {Event.FIT_END: EventDemand(fields={"weights": 1})}
        if self._sample_input is None:
            # At its end: the last batch is not known before, and a training may stop after it.
            requests[Event.BATCH_END] = EventDemand(fields={"inputs": "end"})
            requests[Event.BATCH_START] = EventDemand("1ep", {"inputs": "1ep"})
        return Demand(requests)

    def state_dict(self) -> dict[str, Any]:
        return {
            "sample": {
                name: [array.dtype.str, list(array.shape), array.tobytes()] for name, array in self._sample.items()
            }
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["sample"]:
            self._sample = {
                name: np.frombuffer(data, dtype).reshape(shape).copy()
                for name, (dtype, shape, data) in state["sample"].items()
            }

    def batch_start(self, state: Snapshot, logger: Logger) -> None:
        if "inputs" not in state.on_demand:
            return
        try:
            inputs = state.inputs
        except FieldNotAvailableError:
            # Their memory is reused by now, and the inputs of another batch will do.
            return
        arrays = {name: view.numpy() for name, view in inputs.items()}
        rows = next((len(array) for array in arrays.values() if array.ndim), 0)
        # Two rows even of a batch of one: a model exported with one row accepts only batches of one.
        self._sample = {
            name: array[[0, -1]] if rows and array.ndim and len(array) == rows else array.copy()
            for name, array in arrays.items()
        }

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        self.batch_start(state, logger)

    def fit_end(self, state: Snapshot, logger: Logger) -> None:
        module = build(self._model)
        prefix = load_weights(module, state.weights)
        module.eval()
        for transform in self._transforms:
            module = transform(module)
        arguments = self._arguments(module, is_whole=not prefix)
        self._export(module, arguments)
        logger.upload_file(self._save_path.name, self._save_path, overwrite=True)

    def _export(self, module: "torch.nn.Module", arguments: tuple[Any, ...]) -> None:
        path = self._save_path
        try:
            with atomic_replace(path) as draft, torch.no_grad():
                _write(module, arguments, self._save_format, draft, **self._names)
                for weights in draft.parent.iterdir():
                    # Weights beside a model are replaced first: it does not work without them.
                    if weights != draft:
                        sync(weights)
                        weights.replace(path.with_name(weights.name))
        except CheckpointError as error:
            raise RunDirectoryError(str(error)) from error
        except Exception as error:
            # Compilers raise anything, with pages of advice for their own authors.
            lines = str(error).strip().splitlines()
            raise ConfigurationError(
                f"the model {type(module).__name__} cannot be exported as {self._save_format}: "
                f"{type(error).__name__}: {lines[0] if lines else 'unknown error'}"
            ) from error

    def _arguments(self, module: "torch.nn.Module", is_whole: bool) -> tuple[Any, ...]:
        if self._sample_input is not None:
            given = self._sample_input
            candidates = [given if isinstance(given, tuple) else (given,)]
        elif self._sample:
            candidates = _calls(_nested(self._sample), is_whole)
        else:
            raise ConfigurationError(
                "no inputs of a batch came before the training ended: attach before its last batch, with 'consumer "
                "--wait' before it begins, or give a sample_input"
            )
        for arguments in candidates:
            try:
                with torch.no_grad():
                    module(*arguments)
            except Exception as error:  # noqa: BLE001  other people's code, which may raise anything
                trouble = error
            else:
                return arguments
        raise ConfigurationError(
            f"the model {type(module).__name__} cannot be called with the sample input ({type(trouble).__name__}: "
            f"{str(trouble).partition(chr(10))[0]}): give its arguments as sample_input"
        ) from trouble


def _calls(inputs: Any, is_whole: bool) -> list[tuple[Any, ...]]:
    """Return possible arguments of a call with the inputs of a batch, the likelier first."""
    if isinstance(inputs, dict):
        return [(inputs,)]
    as_batch = ((inputs,),)
    # The first row of a tensor could be taken for the first part of a batch, but hardly the other way round.
    return [as_batch, (inputs,)] if is_whole else [inputs if isinstance(inputs, tuple) else (inputs,), as_batch]


def _nested(sample: "Mapping[str, np.ndarray[Any, Any]]") -> Any:
    """Restore the inputs of the batch: a tensor, or tuples and maps by the dotted paths."""
    if list(sample) == ["inputs"]:
        return torch.from_numpy(sample["inputs"])
    tree: dict[str, Any] = {}
    # Their order in the batch is not known, and the exported model requires one: alphabetical order.
    for path, array in sorted(sample.items()):
        *parents, name = path.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[name] = torch.from_numpy(array)
    return _with_tuples(tree)


def _with_tuples(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    parts = {name: _with_tuples(part) for name, part in tree.items()}
    if set(parts) == set(map(str, range(len(parts)))):
        return tuple(parts[str(place)] for place in range(len(parts)))
    return parts


def builder_of(model: ModelSource) -> Callable[[], Any]:
    found: Any = _resolve(model) if isinstance(model, str) else model
    # A module can be called too, and would be pickled with its weights.
    if not callable(found) or (hasattr(found, "state_dict") and not isinstance(found, type)):
        raise ConfigurationError(f"model is a {type(found).__name__}: {_HOW}")
    builder: Callable[[], Any] = found
    return builder


def build(model: ModelSource) -> "torch.nn.Module":
    built = builder_of(model)()
    if not isinstance(built, torch.nn.Module):
        raise ConfigurationError(f"model {model!r} returned a {type(built).__name__}: return a torch.nn.Module")
    return built.cpu()


def _resolve(name: str) -> Any:
    if name.count(":") != 1:
        raise ConfigurationError(f"model {name!r} is malformed: {_HOW}")
    # An installed command does not look for modules in the working directory, `python -m` does.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise ConfigurationError(f"model {name!r} cannot be imported: {type(error).__name__}: {error}") from error


def load_weights(module: "torch.nn.Module", weights: Mapping[str, TensorView]) -> str:
    """Copy weights of the same names into a module, or of one part of the trained model.

    Returns the prefix of the part's names, such as ``"net."``; "" for the whole. Raises ConfigurationError when they do
    not fit."""
    own = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    shapes = {name: tuple(value.shape) for name, value in own.items()}
    given = {name: view.shape for name, view in weights.items()}
    first = next(iter(shapes), "")
    fitting = []
    for prefix in [name.removesuffix(first) for name in given if name.endswith(first)]:
        below = {name.removeprefix(prefix): shape for name, shape in given.items() if name.startswith(prefix)}
        if prefix[-1:] in ("", ".") and below == shapes:
            fitting.append(prefix)
    if len(fitting) != 1:
        raise ConfigurationError(_misfit(type(module).__name__, shapes, given, fitting))
    for name, value in own.items():
        _copy(weights[fitting[0] + name], value)
    return fitting[0]


Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def _misfit(model: str, own: Shapes, given: Shapes, fitting: list[str]) -> str:
    if fitting:
        return f"the model {model} fits several parts of the trained one ({', '.join(fitting)}): build the whole one"
    name = next((name for name in (*own, *given) if own.get(name) != given.get(name)), "")
    return (
        f"the trained weights do not fit the model {model}: {name} is {own.get(name, 'missing')}, trained is "
        f"{given.get(name, 'missing')}; build the architecture that is trained, or a part of it"
    )


def _copy(view: TensorView, target: "torch.Tensor") -> None:
    found = re.fullmatch(r"([A-Z]+)(\d.*)", view.dtype)
    name = _DTYPES.get(view.dtype) or (found and _KINDS[found[1]] + found[2].lower())
    dtype = getattr(torch, str(name))
    is_same = target.dtype == dtype and target.is_contiguous() and target.device.type == "cpu"
    written = target if is_same else torch.empty(view.shape, dtype=dtype)
    written.detach().reshape(-1).view(torch.uint8).numpy().data[:] = view.data.cast("B")
    if written is not target:
        with torch.no_grad():
            target.copy_(written)
