"""Evaluation with an exponential moving average of the weights."""

from typing import Any

from torch.optim.swa_utils import get_ema_multi_avg_fn

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.bus.types.time import Time, TimeInput, TimeUnit
from offloop.trainer.algorithms.common import check_point, check_update_interval, has_reached, update_event
from offloop.trainer.algorithms.weight_average import WeightAverage
from offloop.trainer.arguments.checks import check_number
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


class EMA(Algorithm):
    """Evaluates and predicts with an exponential moving average of the weights, ``smoothing * average + (1 - smoothing)
    * weights`` at each update; the training itself is the same as without.

    Parameters and buffers of floats are averaged. The average begins as a copy of the weights, at the first batch or
    epoch that ends after ``ema_start``, and takes the memory of one more set of weights. Checkpoints hold the trained
    weights under ``model`` and the average with this algorithm.

    Args:
        half_life: after which time weights count half as much, in batches or epochs: ``smoothing`` is
            ``2 ** (-update_interval / half_life)``.
        smoothing: the share of the average that stays at each update, in place of a half life, which is ``None`` then.
        ema_start: when to begin: a share of the training, or a count such as ``3ep``.
        update_interval: how often to update, in batches or epochs, in the unit of the half life; 1 by default.

    Papers: Polyak & Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging"; Tarvainen & Valpola 2017,
    "Mean teachers are better role models", arXiv:1703.01780. Reference: ``composer/algorithms/ema``."""

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
        self.update_interval = check_update_interval("update_interval", interval)
        self.ema_start = check_point("ema_start", ema_start)
        if smoothing is None:
            if self.update_interval.unit is not span.unit:
                raise ConfigurationError(
                    f"half_life {span} and update_interval {self.update_interval} have different units: "
                    "give both in batches or both in epochs"
                )
            smoothing = 2 ** (-self.update_interval.value / span.value)
        self.smoothing = check_number(smoothing, "smoothing", most=1)
        self._event = update_event(self.update_interval)
        self._mix = get_ema_multi_avg_fn(self.smoothing)  # type: ignore[no-untyped-call]
        self._average: WeightAverage | None = None
        self._state: State | None = None

    def match(self, event: Event, state: State) -> bool:
        if event is self._event:
            return self._average is not None or has_reached(state, self.ema_start)
        return event is Event.INIT or (self._average is not None and event in _SWAP_EVENTS)

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        if event is Event.INIT:
            self._state = state
        elif self._average is None:
            self._average = _average_of(state)
        elif event is not self._event:
            self._average.swap()
        elif int(state.timestamp.get(self.update_interval.unit)) % int(self.update_interval) == 0:
            self._average.update(self._mix, 1)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._average is None else {"average": self._average.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._average = None
        if "average" in state:
            assert self._state is not None  # since INIT
            self._average = _average_of(self._state)
            self._average.load_state_dict(state["average"])


def _average_of(state: State) -> WeightAverage:
    return WeightAverage(state.model, with_buffers=True)
