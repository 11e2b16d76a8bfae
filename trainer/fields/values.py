"""Converts values of fields for sending; numbers on a GPU are read once they have arrived."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.frames import check_plain, pack_map
from offloop.bus.types.deferred import is_deferred
from offloop.trainer.arguments.values import to_builtin
from offloop.trainer.device.batch import map_tensors
from offloop.trainer.device.device import Device

MAX_BYTES = 1024 * 1024  # limit of the size of a field in an event


class _Span(NamedTuple):
    """Place of a tensor's numbers among all numbers that are read."""

    start: int
    shape: tuple[int, ...]
    kind: type[float | int | bool]


def read_tree_later(value: Any, device: Device, check: Callable[[Any], object] = bool) -> Any:
    """Convert the tensors in a value of tensors, numbers, text, lists and maps to numbers.

    If some are on a GPU, the result is a promise: they are read in one copy, without waiting. ``check`` is called
    first, with a value of the same form."""
    tensors: list[Tensor] = []
    count = 0

    def place(tensor: Tensor) -> Any:
        nonlocal count
        if tensor.device.type != device.torch_device.type:
            _check_on_host(tensor)
            return tensor.tolist()
        if tensor.is_complex() or tensor.layout is not torch.strided:
            raise ConfigurationError(
                f"a tensor of {tensor.dtype} with {tensor.layout} cannot be sent: send one of real numbers, dense"
            )
        whole = bool if tensor.dtype is torch.bool else int
        span = _Span(count, tuple(tensor.shape), float if tensor.is_floating_point() else whole)
        tensors.append(tensor.detach())
        count += tensor.numel()
        return span

    tree = to_builtin(value, place) if device.name == "gpu" else to_builtin(value)
    if not tensors:
        check(tree)
        return tree
    _check_size(9 * count)
    check(_filled(tree, [0.0] * count))
    return device.read_many_later(_joined(tensors), partial(_filled, tree))


def sendable(value: Any, device: Device) -> Any:
    if is_deferred(value):
        return value
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return device.read_later(value.detach().reshape(()))
    if device.name != "gpu":
        map_tensors(value, _check_on_host)
    return read_tree_later(value, device, _check)


def _joined(tensors: list[Tensor]) -> Tensor:
    is_plain = all(tensor.is_floating_point() and not tensor.ndim for tensor in tensors)
    if is_plain and len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1:
        return torch.stack(tensors)
    # A model may be spread over several GPUs.
    tensors = [one.to(tensors[0].device, non_blocking=True) for one in tensors]
    # Doubles hold whole numbers up to 2**53.
    return torch.cat([(one if one.is_floating_point() else one.double()).reshape(-1) for one in tensors])


def _filled(tree: Any, numbers: list[float]) -> Any:
    if isinstance(tree, _Span):
        end = tree.start + math.prod(tree.shape)
        return _shaped([tree.kind(number) for number in numbers[tree.start : end]], tree.shape)
    if isinstance(tree, dict):
        return {key: _filled(part, numbers) for key, part in tree.items()}
    return [_filled(part, numbers) for part in tree] if isinstance(tree, list) else tree


def _shaped(numbers: list[Any], shape: tuple[int, ...]) -> Any:
    if not shape:
        return numbers[0]
    size = math.prod(shape[1:])
    return [_shaped(numbers[index * size : (index + 1) * size], shape[1:]) for index in range(shape[0])]


def _check_on_host(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ConfigurationError(
            f"it has a tensor on {tensor.device}, which is neither the host nor where this training runs: move it"
        )


def _check(value: Any) -> None:
    try:
        check_plain({"field": value})
    except ValueError as error:
        raise ConfigurationError(f"its {error}: send it flat") from None
    _check_size(memoryview(pack_map({"field": value})).nbytes)


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise ConfigurationError(f"it has {size:,} bytes, at most {MAX_BYTES:,} are allowed: send less of it")
