"""Rows of tables about the texts of a training: samples of its batches, and completions that TRL has gathered."""

import io
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch

from offloop.bus.types.image import Image
from offloop.trainer.device.device import Device

_ROWS = 4  # of a batch
_NO_LOSS = -100  # of a label
_LARGEST_SIDE = 512  # of an image, in pixels


class BatchSamples:
    """Decodes the first rows of batches, without waiting for a GPU.

    Args:
        decode: makes a text of a list of token ids.
        device: that of the batches.
        kinds: names of the equal parts of a batch, such as chosen and rejected; empty for one part."""

    def __init__(self, decode: Callable[[list[int]], str], device: Device, kinds: tuple[str, ...]) -> None:
        self._decode, self._device, self._kinds = decode, device, kinds
        self._arriving: deque[tuple[int, list[torch.Size], Any]] = deque()

    def __len__(self) -> int:
        """Return the number of batches that have not arrived."""
        return len(self._arriving)

    def take(self, batch: Any, step: int) -> None:
        """Begin to read rows of a batch, if it has token ids."""
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            return
        attended, labels, scored = (batch.get(name) for name in ("attention_mask", "labels", "completion_mask"))
        tensors = [ids, attended if _is_like(attended, ids) else torch.ones_like(ids)]
        if isinstance(labels, torch.Tensor) and labels.ndim == 2 and len(labels) == len(ids):
            tensors.append(labels)
        elif _is_like(scored, ids):
            tensors.append(ids.where(scored.bool(), _NO_LOSS))
        parts = max(1, len(self._kinds))
        size, most = len(ids) // parts, _ROWS // parts
        picked = [torch.cat([one[k * size :][: min(size, most)] for k in range(parts)]).long() for one in tensors]
        numbers = self._device.read_many_later(torch.cat([one.flatten() for one in picked]))
        self._arriving.append((step, [one.shape for one in picked], numbers))

    def arrived(self, wait: bool = False) -> Iterator[tuple[int, Callable[[], list[dict[str, Any]]]]]:
        """Yield the step and a function for the rows of each batch that was read, or with ``wait`` of all."""
        while self._arriving:
            step, shapes, numbers = self._arriving[0]
            if not isinstance(numbers, list):
                if not wait and not numbers.ready():
                    return
                numbers = numbers.value()
            self._arriving.popleft()
            yield step, partial(self._rows, shapes, iter(numbers))

    def _rows(self, shapes: list[torch.Size], numbers: Iterator[int]) -> list[dict[str, Any]]:
        ids, attended, *labels = ([list(islice(numbers, shape[1])) for _ in range(shape[0])] for shape in shapes)
        rows: list[dict[str, Any]] = []
        for index, row in enumerate(ids):
            tokens = [one for one, counts in zip(row, attended[index], strict=True) if counts]
            kind = {"kind": self._kinds[index * len(self._kinds) // len(ids)]} if self._kinds else {}
            rows.append({**kind, "text": self._decode(tokens), "tokens": len(tokens)})
            for all_labels in labels:
                learned = [one for one in all_labels[index] if one != _NO_LOSS]
                rows[-1] |= {"loss_text": self._decode(learned), "loss_tokens": len(learned)}
        return rows


def _is_like(tensor: Any, ids: torch.Tensor) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.shape == ids.shape


class Completions:
    """The rows that a trainer of TRL adds to its own log from now on, gathered from all ranks.

    ``logs`` is the trainer's ``_logs``, if :meth:`supports` returns true: columns of the last generation, and maps of
    such columns."""

    def __init__(self, logs: dict[str, Any]) -> None:
        self._logs = logs
        for columns in (logs, *(one for one in logs.values() if isinstance(one, dict))):
            for name, column in columns.items():
                if isinstance(column, deque):
                    columns[name] = _Column(column, column.maxlen)

    @staticmethod
    def supports(logs: Any) -> bool:
        return isinstance(logs, dict) and all(isinstance(logs.get(name), deque) for name in ("prompt", "completion"))

    @property
    def dropped(self) -> int:
        """Number of added rows that the log has no place for."""
        prompts: _Column = self._logs["prompt"]
        return prompts.new - _added(prompts)

    def rows(self) -> list[dict[str, Any]]:
        """Return the added rows, with TRL's names of columns."""
        logs = self._logs
        columns = {name: logs[name] for name in ("prompt", "completion")}
        columns |= {**logs.get("rewards", {}), **logs.get("extra", {})}
        columns |= {name: logs[key] for name, key in (("advantage", "advantages"), ("image", "images")) if key in logs}
        count = _added(logs["prompt"])
        # TRL adds to some columns only where there are values.
        shown = {name: islice(one, len(one) - count, None) for name, one in columns.items() if _added(one) == count}
        images: dict[int, Image] = {}
        cells = ([_as_cell(one, images) for one in column] for column in shown.values())
        return [dict(zip(shown, row, strict=True)) for row in zip(*cells, strict=True)]


class _Column(deque[Any]):
    """A column that counts what is added to it, and is otherwise the one that it replaces."""

    new = 0

    def extend(self, values: Iterable[Any]) -> None:
        values = list(values)
        self.new += len(values)
        super().extend(values)


def _added(column: deque[Any]) -> int:
    return min(column.new, len(column)) if isinstance(column, _Column) else len(column)


def _as_cell(value: Any, images: dict[int, Image]) -> Any:
    if isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(one, Mapping) for one in value)):
        # Messages of a conversation, perhaps with images.
        return json.dumps(value, ensure_ascii=False, default=lambda one: f"<{type(one).__name__}>")
    if isinstance(value, list | tuple):
        return [_as_cell(one, images) for one in value]
    if not hasattr(value, "thumbnail"):
        return value
    # One of Pillow's. All completions of a prompt have the same.
    if id(value) not in images:
        small, file = value.convert("RGB"), io.BytesIO()
        small.thumbnail((_LARGEST_SIDE, _LARGEST_SIDE))
        small.save(file, "PNG", compress_level=1)
        images[id(value)] = Image(file.getvalue())
    return images[id(value)]
