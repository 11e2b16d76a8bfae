"""The formats that a trained model can be exported in."""

import importlib.util
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from offloop.bus.errors import ConfigurationError, RunDirectoryError

if TYPE_CHECKING:
    import torch


ExportFormat: TypeAlias = Literal["torch.export", "torchscript", "onnx"]

_log = logging.getLogger("offloop")

Names: TypeAlias = Sequence[str] | None
"""Names of inputs or outputs in the file."""

_TORCH = ["torch", "numpy"]
_PACKAGES = {"torch.export": _TORCH, "torchscript": _TORCH, "onnx": [*_TORCH, "onnx", "onnxscript"]}


def check_installed(save_format: ExportFormat) -> None:
    """Raises :class:`offloop.bus.errors.ConfigurationError` when a format needs a package that is not installed."""
    for package in _PACKAGES[save_format]:
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(
                f"{package} is needed for {save_format}: install it with pip install 'offloop[export]'"
            )


def export_module(
    module: "torch.nn.Module",
    arguments: tuple[Any, ...],
    save_format: ExportFormat,
    path: Path,
    input_names: Names = None,
    output_names: Names = None,
) -> None:
    """Writes a module, in the mode that it is in, so that it can be run without its code.

    ``arguments`` are those of a call of it. Batches of the file's model may be of another size than theirs: the first
    dimension of each tensor is left open where the module itself does not set it. ``path`` is replaced in one step.

    Raises:
        ConfigurationError: the module cannot be exported in that format.
        RunDirectoryError: the file cannot be written.
    """
    import torch

    with _replacing(path) as draft, torch.no_grad():
        try:
            _WRITERS[save_format](module, arguments, draft, input_names, output_names)
        except OSError:
            raise
        except Exception as error:
            # Compilers raise anything, with pages of advice for their own authors.
            lines = str(error).strip().splitlines()
            raise ConfigurationError(
                f"the model {type(module).__name__} cannot be exported as {save_format}: {type(error).__name__}: "
                f"{lines[0] if lines else 'no reason is given'}"
            ) from error


def _write_program(module: "torch.nn.Module", arguments: Any, path: Path, inputs: Names, outputs: Names) -> None:
    import torch

    torch.export.save(_captured(module, arguments), path)


def _write_onnx(module: "torch.nn.Module", arguments: Any, path: Path, inputs: Names, outputs: Names) -> None:
    import torch

    torch.onnx.export(
        _captured(module, arguments),
        (),
        path,
        dynamo=True,
        input_names=inputs,
        output_names=outputs,
        # One file, unless the model has more than the 2 GB that one can have.
        external_data=False,
        verbose=False,
    )


def _captured(module: "torch.nn.Module", arguments: tuple[Any, ...]) -> "torch.export.ExportedProgram":
    import torch

    sizes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for tensor in tensors_in(arguments):
        if tensor.ndim:
            sizes[tensor] = {0: torch.export.Dim.AUTO}
    shapes = sizes.dynamic_shapes(module, arguments)  # type: ignore[no-untyped-call]
    return torch.export.export(module, arguments, dynamic_shapes=shapes)


def _write_torchscript(module: "torch.nn.Module", arguments: Any, path: Path, inputs: Names, outputs: Names) -> None:
    import torch

    try:
        script = torch.jit.script(module)
        # Annotations may promise more of a batch than there is without targets.
        script(*arguments)
    except Exception as error:  # noqa: BLE001  its compiler raises anything for Python that it does not know
        _log.info("the model %s is traced, as its code cannot be TorchScript: %s", type(module).__name__, error)
        script = torch.jit.trace(module, arguments)  # type: ignore[no-untyped-call]
    torch.jit.save(script, path)


_WRITERS: dict[str, Callable[["torch.nn.Module", Any, Path, Names, Names], None]] = {
    "torch.export": _write_program,
    "torchscript": _write_torchscript,
    "onnx": _write_onnx,
}


def tensors_in(value: Any) -> "Iterator[torch.Tensor]":
    """Every tensor in nested tuples, lists and maps."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_in(one)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Gives a path to write to; when the block ends, what is there takes the place of ``path``, in one step."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        workplace = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        workplace.mkdir()
        try:
            yield workplace / path.name
            # Weights that stand beside a model come first: it is of no use without them.
            for file in sorted(workplace.iterdir(), key=lambda file: file.name == path.name):
                with file.open("rb") as written:
                    os.fsync(written.fileno())
                file.replace(path.with_name(file.name))
        finally:
            shutil.rmtree(workplace, ignore_errors=True)
    except OSError as error:
        raise RunDirectoryError(f"cannot write {path}: {error.strerror or error}") from error
