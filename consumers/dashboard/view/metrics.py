"""The metrics of a run as series, from its events and from values that callbacks log."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from offloop.bus.errors import ProtocolError
from offloop.bus.protocol.frames import EventBody, decode_whole_event
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.summary import MAX_METRICS, Metric, Summary, most_buckets
from offloop.bus.types.event import Event
from offloop.bus.types.metrics import is_of_evaluation, logged_in, logged_name, shown_step
from offloop.bus.types.source import Source
from offloop.consumers.api.logger import Row
from offloop.consumers.api.optional import np
from offloop.consumers.callbacks.speed_monitor import peak_flops
from offloop.consumers.dashboard.view.series import Clock, Floats, NumericTable, Series

MAX_POINTS = 8_000_000  # points of all series together, at 16 bytes each; beyond, the longest is thinned

MAX_SERIES = 500  # of more metrics, those that are looked at have all points, and the others buckets

SPEED_WINDOW = 100  # batches over which throughput is measured, as by SpeedMonitor

_SETTLE_EVERY = 4096
_NAN = float("nan")
_COLUMNS = 7
_BATCH, _SAMPLE, _EPOCH, _SECONDS, _TOKEN, _TRAINED, _FLOPS = range(_COLUMNS)
_CLOCK_COLUMNS = 4


class Metrics:
    """The metrics of the first rank. The caller holds the lock that the series share."""

    def __init__(
        self, lock: "threading.RLock", max_points: int = MAX_POINTS, wants: Callable[[str], bool] | None = None
    ) -> None:
        self.series: dict[str, Series] = {}
        self.others: dict[str, Metric | None] = {}  # metrics without a series; None if unwanted
        self.clock: Clock = Clock()
        self.is_imported: bool = False
        self.first_left_out: str | None = None  # the first name beyond the limit
        self._lock = lock
        self._max_points = max_points
        self._wants = wants
        self._loss: Series | None = None
        self._rates: dict[Any, list[Series]] = {}
        self._known: dict[str, dict[Any, Series | Metric | None]] = {}  # by prefix and name
        # Columns: batch, samples, epochs, seconds since the start; tokens, microseconds of training, FLOPs.
        self._batches = NumericTable(_COLUMNS)
        self._appends = tuple(self._batches.appends)
        self._window: Floats | None = None  # rows of the last SPEED_WINDOW batches
        self._last: EventBody | None = None
        self._unsettled = 0

    def batch_end(self, body: EventBody, seconds: float) -> None:
        timestamp, fields, context = body.timestamp, body.fields, body.context
        batch, epoch, flops = timestamp.batch, float(timestamp.epoch), fields.get("flops_per_batch")
        add_batch, add_sample, add_epoch, add_seconds, add_token, add_trained, add_flops = self._appends
        length = fields["dataloader_len"] if "dataloader_len" in fields else context.get("dataloader_len")
        if length.__class__ is int and length > 0:
            epoch += timestamp.batch_in_epoch / length
        add_batch(batch)
        add_sample(timestamp.sample)
        add_epoch(epoch)
        add_seconds(seconds)
        add_token(timestamp.token)
        add_trained(timestamp.total_wct)
        add_flops(flops if isinstance(flops, float | int) else _NAN)
        step = batch if body.previous is None else body.previous.batch
        try:
            self._loss.append_value(fields["loss"])  # type: ignore[union-attr]
            self._loss.append_step(step)  # type: ignore[union-attr]
        except (AttributeError, KeyError, TypeError):
            self._take_loss(step, fields.get("loss"))
        rates_of = fields.get("lr")
        for optimizer, rates in rates_of.items() if rates_of.__class__ is dict else ():
            try:
                for series, rate in zip(self._rates[optimizer], rates, strict=True):
                    series.append_value(rate)
                    series.append_step(batch)
            except (KeyError, TypeError, ValueError):
                self._take_rates(optimizer, rates, batch)
        if "losses" in fields:
            self._take("loss/train/", fields["losses"], step)
        if "train_metrics" in fields:
            self._take("metrics/train/", fields["train_metrics"], step)
        self._last = body
        self._unsettled += 1
        if self._unsettled >= _SETTLE_EVERY:
            self.settle()

    def load(self, summary: Summary, until: float) -> None:
        self.is_imported = summary.is_imported
        ticks = [tick for _, tick in sorted(summary.clock.items()) if tick.offset < until]
        rows = np.array(
            [
                (
                    *(one.batch, one.sample, one.epoch, (one.time - summary.began) / 1e9),
                    one.token,
                    one.total_wct,
                    one.flops,
                )
                for one in ticks
            ],
            dtype=np.float64,
        ).reshape(len(ticks), _COLUMNS)
        self.clock.replace(rows[:, :_CLOCK_COLUMNS])
        if len(summary.metrics) > MAX_SERIES:
            self.others = {name: metric for name, metric in summary.metrics.items() if name not in self.series}
            self._known.clear()
        for name, metric in list(summary.metrics.items()):
            if name not in self.others:
                self._load(name, metric)
        self.first_left_out = self.first_left_out or min(summary.left_out, default=None)
        with contextlib.suppress(ProtocolError):
            self._last = decode_whole_event(summary.last)
        first = int(np.searchsorted(rows[:, _BATCH], SPEED_WINDOW))
        now, before = rows[first + 1 :], rows[first:-1]
        self._measure_speed(now, before, (now[:, _BATCH] - before[:, _BATCH]) * now[:, _FLOPS])

    def _load(self, name: str, metric: Metric) -> None:
        shown = [(shown_step(name, step), value) for step, value in metric.points()]
        if shown:
            self._extend(name, np.array(shown, dtype=np.float64))

    def find(self, name: str) -> Series:
        """Return the series of a metric, which has all further points. Raises KeyError."""
        metric = self.others.get(name)
        if metric is not None:
            del self.others[name]
            self._known.clear()
            self._new_series(name)
            self._load(name, metric)
        return self.series[name]

    def refine(self, other: "Metrics") -> None:
        self.settle()
        other.settle()
        self.clock.refine(other.clock)
        for name, part in other.series.items():
            if name not in self.others:
                self._new_series(name).refine(part)
        self.settle()

    def event(self, state: Snapshot, seconds: float) -> None:
        body, event = state._body, state.event
        batch = body.timestamp.batch
        if event is Event.INIT:
            self.is_imported = Source.of(body.fields).is_imported
        elif event is Event.FIT_START and not len(self.clock):
            self.clock.add(np.array([[batch, body.timestamp.sample, body.timestamp.epoch, seconds]], dtype=np.float64))
        elif event is Event.EPOCH_END:
            self._take("metrics/train/", body.fields.get("train_metrics"), batch)
        elif event is Event.EVAL_END:
            label, metrics = state.dataloader_label, body.fields.get("eval_metrics")
            if label is not None and isinstance(metrics, Mapping):
                self._take(f"metrics/{label}/", metrics.get(label), batch)

    def logged(self, fields: Mapping[str, Any]) -> None:
        for step, values in logged_in(fields):
            self._take("", values, step)

    def rows(self, rows: Sequence[Row], during: Event | None = None) -> None:
        """Take rows that callbacks logged during an event."""
        evaluates = during is None or during.is_eval
        for row in rows:
            for name, value in row.metrics.items():
                if not isinstance(value, str):
                    self._append(name, self._shown(name, row.step) if evaluates else row.step, value)
        self._unsettled += len(rows)
        if self._unsettled >= _SETTLE_EVERY:
            self.settle()

    def settle(self) -> None:
        """Compute pending values, and limit the size."""
        self._unsettled = 0
        self._settle_batches()
        while sum(len(one.settle()) for one in self.series.values()) > self._max_points:
            max(self.series.values(), key=len).thin()

    def _take_loss(self, step: int, loss: Any) -> None:
        for name, value in _numbers("loss/train/total", loss):
            self._append(name, step, value)
        self._loss = self.series.get("loss/train/total")

    def _take_rates(self, optimizer: Any, rates: Any, batch: int) -> None:
        names = [f"lr-{optimizer}/group{group}" for group in range(len(rates))] if isinstance(rates, list) else []
        for place, name in enumerate(names):
            for part, value in _numbers(name, rates[place]):
                self._append(part, batch, value)
        known = [series for name in names if (series := self.series.get(name)) is not None]
        self._rates[optimizer] = known if len(known) == len(names) else []

    def _take(self, prefix: str, values: Any, step: int) -> None:
        known = self._known.setdefault(prefix, {})
        shown = self._shown(prefix, step)
        for name, value in values.items() if isinstance(values, Mapping) else ():
            if value.__class__ is not float:
                for part, number in _numbers(str(name), value):
                    self._append(prefix + part, shown, number)
                continue
            try:
                series = known[name]
            except KeyError:
                series = self._find(f"{prefix}{name}")
                if len(known) < MAX_METRICS:
                    known[name] = series
            if series.__class__ is Series:
                series.append_value(value)
                series.append_step(shown)
            elif isinstance(series, Metric):
                self._add(series, f"{prefix}{name}", shown, value)

    def _append(self, name: str, shown: int, value: float) -> None:
        found = self._find(name)
        if isinstance(found, Series):
            found.append(shown, value)
        elif found is not None:
            self._add(found, name, shown, value)

    def _add(self, metric: Metric, name: str, shown: int, value: float) -> None:
        # As in a summary, see _load().
        if metric.add(shown + is_of_evaluation(name), value):
            metric.widen(most_buckets(name, len(self.others)))

    def _shown(self, name: str, step: int) -> int:
        return step if self.is_imported else shown_step(name, step)

    def _find(self, name: str) -> Series | Metric | None:
        name = logged_name(name)
        if name in self.series:
            return self.series[name]
        if name not in self.others:
            if len(self.series) + len(self.others) >= MAX_METRICS:
                self.first_left_out = self.first_left_out or name
                return None
            if len(self.series) < MAX_SERIES if self._wants is None else self._wants(name):
                return self._new_series(name)
            self.others[name] = Metric() if self._wants is None else None
        return self.others[name]

    def _new_series(self, name: str) -> Series:
        if name not in self.series:
            self.series[name] = Series(name, self.clock, self._lock, self._settle_batches)
        return self.series[name]

    def _extend(self, name: str, points: Floats) -> None:
        if name in self.others and self.others[name] is None:
            return
        self.others.pop(name, None)
        series = self._new_series(name)
        series.settle()
        series.extend(points)

    def _settle_batches(self) -> None:
        if self._batches.gathered:
            self._take_batches(self._batches.take_gathered())

    def _take_batches(self, rows: Floats) -> None:
        self.clock.add(rows[:, :_CLOCK_COLUMNS])
        window = rows if self._window is None else np.concatenate([self._window, rows])
        if len(window) > SPEED_WINDOW:
            flops = np.lib.stride_tricks.sliding_window_view(window[1:, _FLOPS], SPEED_WINDOW).sum(axis=1)
            self._measure_speed(window[SPEED_WINDOW:], window[:-SPEED_WINDOW], flops)
        self._window = window[-SPEED_WINDOW:].copy()

    def _measure_speed(self, now: Floats, before: Floats, flops: Floats) -> None:
        elapsed = now[:, _TRAINED] / 1e6 - before[:, _TRAINED] / 1e6
        good = elapsed > 0
        if not good.any():
            return
        steps, elapsed = now[good, _BATCH], elapsed[good]

        def extend(name: str, amounts: Any, chosen: Any = slice(None)) -> None:
            self._extend(f"throughput/{name}", np.column_stack([steps, amounts / elapsed])[chosen])

        batches = (now[:, _BATCH] - before[:, _BATCH])[good]
        extend("batches_per_sec", np.where(batches == 0, SPEED_WINDOW, batches))
        extend("samples_per_sec", (now[:, _SAMPLE] - before[:, _SAMPLE])[good])
        tokens = (now[:, _TOKEN] - before[:, _TOKEN])[good]
        if tokens.any():
            extend("tokens_per_sec", tokens, tokens > 0)
        flops, known = flops[good], flops[good] > 0
        if self._last is not None and known.any():
            context = {**self._last.context, **self._last.fields}
            extend("flops_per_sec", flops, known)
            peak = peak_flops(context.get("device_name"), context.get("precision"))
            if peak:
                extend("device/mfu", flops / (context.get("world_size") or 1) / peak, known)


def _numbers(prefix: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers in a value, or in its maps and lists, each with its path as its name."""
    if isinstance(value, float | int):
        yield prefix, float(value)
    elif isinstance(value, Mapping | list):
        for part, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _numbers(f"{prefix}/{part}" if prefix else str(part), one)
