"""A model with the weights of a training, in a process that has neither the training nor its model."""

import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from offloop.bus.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from offloop.bus.tensors.view import TensorView


ModelSource: TypeAlias = str | Callable[[], Any]
"""Source of a model: a class or function that builds it, or ``package.module:function``."""

# What safetensors calls them, and what torch does.
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}

_HOW = "give a class or a function without arguments that builds it, or package.module:function"


def builder_of(model: ModelSource) -> Callable[[], Any]:
    """The function that builds the model.

    Raises:
        ConfigurationError: it is none, or cannot be found.
    """
    found: Any = _resolve(model) if isinstance(model, str) else model
    # A module can be called too, and would be pickled with weights that nobody needs.
    if not callable(found) or (hasattr(found, "state_dict") and not isinstance(found, type)):
        raise ConfigurationError(f"model is a {type(found).__name__}: {_HOW}")
    builder: Callable[[], Any] = found
    return builder


def build(model: ModelSource) -> "torch.nn.Module":
    """Builds the model, on the host.

    Raises:
        ConfigurationError: what comes of it is no module.
    """
    import torch

    built = builder_of(model)()
    if not isinstance(built, torch.nn.Module):
        raise ConfigurationError(f"model {model!r} returned a {type(built).__name__}: return a torch.nn.Module")
    return built.cpu()


def _resolve(name: str) -> Any:
    if name.count(":") != 1:
        raise ConfigurationError(f"model {name!r} is no place of a function: {_HOW}")
    # An installed command does not look for modules where it is called, and `python -m` does.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError, SyntaxError) as error:
        raise ConfigurationError(f"model {name!r} cannot be imported: {type(error).__name__}: {error}") from error


def load_weights(module: "torch.nn.Module", weights: "Mapping[str, TensorView]") -> str:
    """Copies weights into a module: those of the same names, or, when the module is a part of the model that was
    trained, those of that part. Returns what stands before the part's names, ``"net."`` for example; "" for the whole.

    Raises:
        ConfigurationError: they do not fit.
    """
    import torch

    own = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    shapes = {name: tuple(value.shape) for name, value in own.items()}
    given = {name: view.shape for name, view in weights.items()}
    fitting = [prefix for prefix in _prefixes(shapes, given) if _below(prefix, given) == shapes]
    if len(fitting) != 1:
        raise ConfigurationError(_misfit(type(module).__name__, shapes, given, fitting))
    for name, value in own.items():
        _copy(weights[fitting[0] + name], value)
    return fitting[0]


Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def _prefixes(own: Shapes, given: Shapes) -> list[str]:
    first = next(iter(own), "")
    ends = [name.removesuffix(first) for name in given if name.endswith(first)]
    return [prefix for prefix in ends if not prefix or prefix.endswith(".")]


def _below(prefix: str, given: Shapes) -> dict[str, tuple[int, ...]]:
    return {name.removeprefix(prefix): shape for name, shape in given.items() if name.startswith(prefix)}


def _misfit(model: str, own: Shapes, given: Shapes, fitting: list[str]) -> str:
    if fitting:
        return f"the model {model} fits several parts of the trained one ({', '.join(fitting)}): build the whole one"
    name = next((name for name in (*own, *given) if own.get(name) != given.get(name)), "")
    return (
        f"the trained weights do not fit the model {model}: {name} is {own.get(name, 'missing')}, trained is "
        f"{given.get(name, 'missing')}; build the architecture that is trained, or a part of it"
    )


def _copy(view: "TensorView", target: "torch.Tensor") -> None:
    import torch

    dtype = getattr(torch, _DTYPES[view.dtype])
    is_same = target.dtype == dtype and target.is_contiguous() and target.device.type == "cpu"
    written = target if is_same else torch.empty(view.shape, dtype=dtype)
    written.detach().reshape(-1).view(torch.uint8).numpy().data[:] = view.data.cast("B")
    if written is not target:
        with torch.no_grad():
            target.copy_(written)
