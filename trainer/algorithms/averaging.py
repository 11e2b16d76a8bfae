"""Averages of a model's weights over the training, to evaluate with or to end on."""

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn

from offloop.bus.errors import CheckpointError, ConfigurationError
from offloop.bus.types.event import Event
from offloop.bus.types.time import Time, TimeInput, TimeUnit
from offloop.trainer.algorithms.common import check_point, check_update_interval, has_reached, update_event
from offloop.trainer.arguments.checks import check_choice, check_count, check_number
from offloop.trainer.arguments.values import set_rate
from offloop.trainer.device.device import autocast
from offloop.trainer.engine.state import Algorithm, AlgorithmLogger, State

_SWAP_EVENTS = frozenset(
    {
        Event.EVAL_BEFORE_ALL,
        Event.EVAL_AFTER_ALL,
        Event.EVAL_STANDALONE_START,
        Event.EVAL_STANDALONE_END,
        Event.PREDICT_START,
        Event.PREDICT_END,
    }
)


class WeightAverage:
    """A running average of a model's weights; at first it equals them.

    Args:
        model: the model; its parameters and buffers must stay the same objects.
        with_buffers: also average the model's float buffers, such as the statistics of batch normalization. Buffers
            that are not part of the model's ``state_dict()`` are left out."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, *, with_buffers: bool = False) -> None:
        self._weights = _weights_of(model, with_buffers)
        self._average = {name: weight.clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def update(self, average: Callable[[list[Tensor], list[Tensor], int], Any], count: int) -> None:
        """Add the model's weights to the average of ``count`` ones, by a function of ``torch.optim.swa_utils``."""
        # Sharded and whole tensors cannot be averaged in one call.
        for is_spread in (False, True):
            names = [name for name, weight in self._weights.items() if hasattr(weight, "placements") is is_spread]
            if names:
                average([self._average[name] for name in names], [self._weights[name] for name in names], count)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the model's weights and the average; a second call restores every bit."""
        for name, weight in self._weights.items():
            average = self._average[name]
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def state_dict(self) -> dict[str, Tensor]:
        return self._average

    def load_state_dict(self, average: Mapping[str, Tensor]) -> None:
        if average.keys() != self._average.keys():
            odd = ", ".join(sorted(average.keys() ^ self._average.keys())[:3])
            raise CheckpointError(f"the averaged weights are those of another model: the two differ by {odd}")
        for name, value in average.items():
            self._average[name].copy_(value)


def _weights_of(model: nn.Module, with_buffers: bool) -> dict[str, Tensor]:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    weights = dict[str, Tensor](model.named_parameters())
    if with_buffers:
        persistent = model.state_dict().keys()
        weights |= {
            name: buffer for name, buffer in model.named_buffers() if name in persistent and buffer.is_floating_point()
        }
    return weights


class _Averaging(Algorithm):
    """Keeps an average of the weights; a subclass decides when."""

    with_buffers = False
    _average: WeightAverage | None = None
    _state: State | None = None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._average = None
        if "average" in state:
            self._begin_average().load_state_dict(state["average"])

    def _begin_average(self) -> WeightAverage:
        assert self._state is not None  # since INIT
        self._average = WeightAverage(self._state.model, with_buffers=self.with_buffers)
        return self._average


class EMA(_Averaging):
    """Evaluates and predicts with an exponential moving average of the weights. The training is the same as without.

    The average is ``smoothing * average + (1 - smoothing) * weights`` at each update, over parameters and float
    buffers. It starts as a copy of the weights, at the end of the first batch or epoch after ``ema_start``, and takes
    the memory of one more set of weights. Checkpoints hold the trained weights under ``model`` and the average with
    this algorithm.

    Args:
        half_life: the time after which weights count half as much, in batches or epochs: ``smoothing`` is
            ``2 ** (-update_interval / half_life)``.
        smoothing: the share of the average that stays at each update, instead of a half life, which must be ``None``
            then.
        ema_start: when to start: a share of the training, or a count such as ``3ep``.
        update_interval: how often to update, in batches or epochs, in the unit of the half life; 1 by default.

    Papers: Polyak & Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging"; Tarvainen & Valpola 2017,
    "Mean teachers are better role models", arXiv:1703.01780. Reference: ``composer/algorithms/ema``."""

    with_buffers = True

    def __init__(
        self,
        half_life: TimeInput | None = "1000ba",
        smoothing: float | None = None,
        ema_start: TimeInput = "0.0dur",
        update_interval: TimeInput | None = None,
    ) -> None:
        if (half_life is None) == (smoothing is None):
            raise ConfigurationError(
                f"half_life {half_life!r} and smoothing {smoothing!r}: give one of them, and None for the other"
            )
        span = Time(1, TimeUnit.BATCH) if half_life is None else check_update_interval("half_life", half_life)
        interval = Time(1, span.unit) if update_interval is None else update_interval
        self.update_interval: Time = check_update_interval("update_interval", interval)
        self.ema_start: Time = check_point("ema_start", ema_start)
        if smoothing is None:
            if self.update_interval.unit is not span.unit:
                raise ConfigurationError(
                    f"half_life {span} and update_interval {self.update_interval} have different units: "
                    "give both in batches or both in epochs"
                )
            smoothing = 2 ** (-self.update_interval.value / span.value)
        self.smoothing: float = check_number(smoothing, "smoothing", most=1)
        self._event = update_event(self.update_interval)
        self._mix = get_ema_multi_avg_fn(self.smoothing)  # type: ignore[no-untyped-call]

    def match(self, event: Event, state: State) -> bool:
        if event is self._event:
            return self._average is not None or has_reached(state, self.ema_start)
        return event is Event.INIT or (self._average is not None and event in _SWAP_EVENTS)

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        if event is Event.INIT:
            self._state = state
        elif self._average is None:
            self._begin_average()
        elif event is not self._event:
            self._average.swap()
        elif int(state.timestamp.get(self.update_interval.unit)) % int(self.update_interval) == 0:
            self._average.update(self._mix, 1)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._average is None else {"average": self._average.state_dict()}


class SWA(_Averaging):
    """Stochastic weight averaging: replaces the weights by their mean over several moments near the end.

    The first weights are added at the end of the first batch or epoch at ``swa_start`` or later. At the first end of
    one at ``swa_end`` or later, or at the end of the training, the mean replaces the model's weights, and the
    statistics of batch normalization are computed again in one pass over the training data. With several ranks, each
    computes them from its own part. It takes the memory of one more set of weights.

    Args:
        swa_start, swa_end: when averaging starts and when the mean replaces the weights: shares of the training, or
            counts such as ``3ep``, both in the same unit.
        update_interval: how often weights are added, in batches or epochs.
        schedule_swa_lr: move the learning rates to ``swa_lr`` and keep them there while weights are averaged,
            overriding the schedulers.
        anneal_strategy: how the learning rates move: ``linear`` or ``cos``.
        anneal_steps: after how many updates they arrive.
        swa_lr: the final learning rate; ``None`` keeps the rates of ``swa_start``.

    Paper: Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima and Better Generalization", arXiv:1803.05407.
    Reference: ``composer/algorithms/swa``; the rates are those of ``torch.optim.swa_utils.SWALR``."""

    def __init__(
        self,
        swa_start: TimeInput = "0.7dur",
        swa_end: TimeInput = "0.97dur",
        update_interval: TimeInput = "1ep",
        schedule_swa_lr: bool = False,
        anneal_strategy: str = "linear",
        anneal_steps: int = 10,
        swa_lr: float | None = None,
    ) -> None:
        self.swa_start: Time = check_point("swa_start", swa_start)
        self.swa_end: Time = check_point("swa_end", swa_end)
        if self.swa_start.unit is not self.swa_end.unit or self.swa_start >= self.swa_end:
            raise ConfigurationError(
                f"swa_start {self.swa_start} is not before swa_end {self.swa_end}: "
                "use two points of the training in order and in the same unit, such as 0.7dur and 0.97dur"
            )
        self.update_interval: Time = check_update_interval("update_interval", update_interval)
        self.schedule_swa_lr = schedule_swa_lr
        self.anneal_strategy: str = check_choice(anneal_strategy, "anneal_strategy", ("linear", "cos"))
        self.anneal_steps: int = check_count(anneal_steps, "anneal_steps")
        self.swa_lr: float | None = None if swa_lr is None else check_number(swa_lr, "swa_lr")
        if swa_lr is not None and not schedule_swa_lr:
            raise ConfigurationError(f"swa_lr {swa_lr!r} has no effect without schedule_swa_lr=True: add that")
        self._event = update_event(self.update_interval)
        self._mix = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        self._first_rates: list[list[float]] = []
        self._intervals = 0
        self._updates = 0
        self._is_over = False

    def match(self, event: Event, state: State) -> bool:
        if event is self._event:
            return not self._is_over and has_reached(state, self.swa_start)
        if event is Event.BATCH_START:
            return self.schedule_swa_lr and self._average is not None
        if event is Event.FIT_END:
            return self._average is not None and has_reached(state, self.swa_end)
        return event in (Event.INIT, Event.FIT_START)

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        if event is Event.INIT:
            self._state = state
        elif event is Event.FIT_START:
            self._check_dataloader(state)
        elif event is Event.BATCH_START:
            self._set_rates(state)
        else:
            if event is self._event:
                self._add_weights(state)
            if has_reached(state, self.swa_end):
                self._replace_weights(state)

    def state_dict(self) -> dict[str, Any]:
        if self._is_over:
            return {"is_over": True}
        if self._average is None:
            return {}
        return {
            "is_over": False,
            "average": self._average.state_dict(),
            "intervals": self._intervals,
            "updates": self._updates,
            "first_rates": self._first_rates,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._is_over = state.get("is_over", False)
        self._intervals, self._updates = state.get("intervals", 0), state.get("updates", 0)
        self._first_rates = [list(rates) for rates in state.get("first_rates", [])]
        super().load_state_dict(state)

    def _add_weights(self, state: State) -> None:
        if self._average is None:
            self._first_rates = [[float(group["lr"]) for group in one.param_groups] for one in state.optimizers]
            self._begin_average()
            self._updates = 1
        elif self._intervals % int(self.update_interval) == 0:
            self._average.update(self._mix, self._updates)
            self._updates += 1
        self._intervals += 1
        if self.schedule_swa_lr:
            self._set_rates(state)

    def _replace_weights(self, state: State) -> None:
        assert self._average is not None  # swa_end comes after swa_start
        self._average.swap()
        self._average = None
        self._is_over = True
        with autocast(state.precision, state.device):
            update_bn(_batches(state), state.model)

    def _set_rates(self, state: State) -> None:
        progress = min(1.0, self._updates / self.anneal_steps)
        share = progress if self.anneal_strategy == "linear" else (1 - math.cos(math.pi * progress)) / 2
        for optimizer, rates in zip(state.optimizers, self._first_rates, strict=True):
            for group, first in zip(optimizer.param_groups, rates, strict=True):
                set_rate(group, first if self.swa_lr is None else (1 - share) * first + share * self.swa_lr)

    def _check_dataloader(self, state: State) -> None:
        dataloader = state.train_dataloader
        keeps_place = getattr(dataloader, "persistent_workers", False) or hasattr(dataloader, "load_state_dict")
        normalizes = any(isinstance(module, _BatchNorm) for module in state.model.modules())
        if keeps_place and self.update_interval.unit is TimeUnit.BATCH and normalizes:
            raise ConfigurationError(
                f"SWA with update_interval {self.update_interval} goes through the training data in the middle of an "
                "epoch, to compute the statistics of batch normalization, which a dataloader with persistent workers "
                "or a place of its own cannot do: use update_interval='1ep', or a plain DataLoader"
            )


def _batches(state: State) -> Iterator[list[Any]]:
    data, _, subset = state.dataloader_in_use
    assert data is not None  # it is trained on
    size = state.device_train_microbatch_size
    for batch in islice(data.dataloader, subset if subset >= 0 else None):
        batch = data.prepare(batch, state.device)
        for part in [batch] if size is None else data.split_batch(batch, size):
            yield [part]
