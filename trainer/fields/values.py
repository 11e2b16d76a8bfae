"""Values of fields as they are sent: numbers on a GPU are read when they have arrived by themselves."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.frames import check_plain, pack_map
from offloop.bus.types.deferred import is_deferred
from offloop.trainer.arguments.values import to_builtin
from offloop.trainer.device.batch import map_tensors
from offloop.trainer.device.device import DeferredNumbers, Device

MAX_BYTES = 1024 * 1024
"""Largest size of a field as it is sent."""


class DeferredTree:
    """Lists and maps with numbers in them that are on their way, all in one copy."""

    def __init__(self, tree: Any, numbers: DeferredNumbers[list[float]]) -> None:
        self._tree = tree
        self._numbers = numbers

    def ready(self) -> bool:
        return self._numbers.ready()

    def value(self) -> Any:
        return _filled(self._tree, self._numbers.value())


class _Span(NamedTuple):
    """Place of a tensor's numbers among all numbers that are read."""

    start: int
    shape: tuple[int, ...]
    kind: type[float | int | bool]


class _Tensors:
    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._tensors: list[Tensor] = []
        self.count = 0

    def taken_from(self, value: Any) -> Any:
        """The value with a :class:`_Span` for each tensor; the rest as numbers, text, lists and maps."""
        if isinstance(value, Tensor):
            if value.device.type == self._device_type:
                return self._take(value)
            _check_on_host(value)
        if isinstance(value, Mapping):
            return {str(key): self.taken_from(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [self.taken_from(part) for part in value]
        return to_builtin(value)

    def joined(self) -> Tensor:
        """All numbers in a row, in as few steps of the device as possible."""
        tensors = self._tensors
        is_plain = all(tensor.is_floating_point() and not tensor.ndim for tensor in tensors)
        if is_plain and len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1:
            return torch.stack(tensors)
        # A model may be spread over several GPUs.
        tensors = [one.to(tensors[0].device, non_blocking=True) for one in tensors]
        # Doubles hold whole numbers up to 2**53.
        return torch.cat([(one if one.is_floating_point() else one.double()).reshape(-1) for one in tensors])

    def _take(self, tensor: Tensor) -> _Span:
        if tensor.is_complex() or tensor.layout is not torch.strided:
            raise ConfigurationError(
                f"a tensor of {tensor.dtype} with {tensor.layout} cannot be sent: send one of real numbers, dense"
            )
        whole = bool if tensor.dtype is torch.bool else int
        span = _Span(self.count, tuple(tensor.shape), float if tensor.is_floating_point() else whole)
        self._tensors.append(tensor.detach())
        self.count += tensor.numel()
        return span


def sendable(value: Any, device: Device) -> Any:
    """A field's value for the stream. All of its tensors on a GPU are read in one copy without any wait."""
    if is_deferred(value):
        return value
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return device.read_later(value.detach().reshape(()))
    if device.name != "gpu":
        map_tensors(value, _check_on_host)
        return _checked(to_builtin(value))
    tensors = _Tensors(device.torch_device.type)
    tree = tensors.taken_from(value)
    if not tensors.count:
        return _checked(_filled(tree, []))
    _check_size(9 * tensors.count)
    _checked(_filled(tree, [0.0] * tensors.count))
    numbers = device.read_many_later(tensors.joined())
    return _filled(tree, numbers) if isinstance(numbers, list) else DeferredTree(tree, numbers)


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


def _checked(value: Any) -> Any:
    try:
        check_plain({"field": value})
    except ValueError as error:
        raise ConfigurationError(f"its {error}: send it flat") from None
    _check_size(memoryview(pack_map({"field": value})).nbytes)
    return value


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise ConfigurationError(f"it has {size:,} bytes, at most {MAX_BYTES:,} are allowed: send less of it")
