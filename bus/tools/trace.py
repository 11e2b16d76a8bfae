"""A run as a timeline: Chrome trace JSON, for Perfetto and chrome://tracing."""

import math
from collections import Counter
from datetime import UTC, datetime
from typing import Any, NamedTuple, TextIO

from offloop.bus.protocol.order import Ending
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.strict_json import json_text
from offloop.bus.types.actor import actor_in
from offloop.bus.types.commands import Outcome
from offloop.bus.types.event import Event
from offloop.bus.types.health import HEALTH, Health
from offloop.bus.types.phases import PHASES, read_phases
from offloop.bus.types.span import SPAN, read_span

_TRACKS = ("events", "epochs", "batches", *PHASES, "evaluation", "prediction")
_TIDS_A_PROCESS = 10_000
_MOST_WAITING = 10_000


class _Span(NamedTuple):
    id: int
    name: str
    began: int
    ended: int
    args: dict[str, Any]


class TraceWriter:
    """Writes the events of a run as a trace.

    The format is the `Trace Event Format
    <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>`_. Each rank is a process, and
    each phase a track. Epochs, batches, phases and evaluations are spans; loss, learning rates and throughput are
    counters of the first rank, and so is the health of its host; commands, checkpoints, ends of epochs and the run's
    beginning and end are instants on its track ``events``. Spans of the training's own are on tracks ``spans``, its
    other events are instants. Times are microseconds from the first event, by each host's clock."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._separator = "[\n"
        self._base: int | None = None
        self._last = 0
        self._ranks: set[int] = set()
        self._tids: dict[tuple[int, str], int] = {}
        self._tracks = list(_TRACKS)
        # For each track: the end of the last span, and the number of open spans.
        self._free_from: dict[tuple[int, str], int] = {}
        self._open: Counter[tuple[int, str]] = Counter()
        self._batch_began: dict[int, int] = {}
        self._rates: dict[str, Any] = {}
        # By rank: spans whose parent has not ended, by the parent, and when each track is free.
        self._children: dict[int, dict[int, list[_Span]]] = {}
        self._free_tracks: dict[int, list[int]] = {}

    def see(self, state: Snapshot) -> None:
        rank, values = state.rank, state.timestamp.values
        now = self._at(state.time_ns)
        if rank not in self._ranks:
            self._ranks.add(rank)
            self._batch_began[rank] = now
            self._name_rank(state)
        place = {"epoch": values.epoch, "batch": values.batch}
        if state.event is HEALTH:
            health = Health.of(state.fields)
            for name, value in health.metrics(each=False).items() if health is not None else ():
                self._counter(f"system/{name}", {"value": value}, now)
            return
        if state.event.is_custom:
            self._draw_own(state, now, place)
            return
        match state.event:
            case Event.FIT_START:
                self._batch_began[rank] = now
                if values.batch_in_epoch:
                    # A resumed epoch began in another attempt.
                    self._begin(rank, "epochs", f"epoch {values.epoch + 1}", now, {"resumed at batch": values.batch})
            case Event.EPOCH_START:
                self._begin(rank, "epochs", f"epoch {values.epoch + 1}", now)
            case Event.EPOCH_END:
                self._end(rank, "epochs", now)
                if rank == 0:
                    self._instant(0, f"epoch {values.epoch} ends", now, place)
            case Event.FIT_END:
                # Ends the epoch in which the training stopped.
                self._end(rank, "epochs", now)
            case Event.BATCH_END:
                self._draw_batch(state, self._batch_began[rank], now)
                self._batch_began[rank] = now
            case Event.EVAL_BEFORE_ALL | Event.EVAL_STANDALONE_START:
                self._begin(rank, "evaluation", "evaluation", now, place)
            case Event.EVAL_START:
                self._begin(rank, "evaluation", str(state.dataloader_label), now)
            case Event.EVAL_END:
                metrics = state.fields.get("eval_metrics")
                own = metrics.get(state.dataloader_label) if isinstance(metrics, dict) else None
                self._end(rank, "evaluation", now, own if isinstance(own, dict) else None)
            case Event.EVAL_AFTER_ALL | Event.EVAL_STANDALONE_END:
                self._end(rank, "evaluation", now)
                self._batch_began[rank] = now
            case Event.PREDICT_START:
                self._begin(rank, "prediction", "prediction", now)
            case Event.PREDICT_END:
                self._end(rank, "prediction", now)
            case Event.BATCH_CHECKPOINT | Event.EPOCH_CHECKPOINT | Event.ITERATION_CHECKPOINT if rank == 0:
                # BATCH_CHECKPOINT may occur at every batch; it is a checkpoint where a consumer requested the weights.
                if state.event is not Event.BATCH_CHECKPOINT or state.on_demand:
                    self._instant(0, state.event.value, now, place)

    def _draw_own(self, state: Snapshot, now: int, place: dict[str, Any]) -> None:
        name, rank = state.event.value[1:], state.rank
        args = {**place, **{key: value for key, value in state._body.fields.items() if key != SPAN}}
        found = read_span(state.fields)
        if found is None:
            self._instant(rank, name, now, args)
            return
        span = _Span(found.id, name, now - found.duration, now, args)
        waiting = self._children.setdefault(rank, {})
        if found.parent:
            waiting.setdefault(found.parent, []).append(span)
            if sum(map(len, waiting.values())) > _MOST_WAITING:
                self._draw_orphans(rank)
        else:
            self._draw_tree(rank, span)

    def _draw_tree(self, rank: int, span: "_Span", index: int | None = None) -> None:
        """Draw a span and those within it, on one track unless they overlap."""
        tracks = self._free_tracks.setdefault(rank, [])
        if index is None:
            index = next((place for place, free in enumerate(tracks) if free <= span.began), len(tracks))
            tracks[index:] = tracks[index:] or [0]
        track = "spans" if not index else f"spans {index + 1}"
        self._put("X", rank, track, max(0, span.began), span.args, name=span.name, dur=(span.ended - span.began) / 1000)
        tracks[index] = max(tracks[index], span.ended)
        free = span.began
        for child in sorted(self._children[rank].pop(span.id, ()), key=lambda one: one.began):
            self._draw_tree(rank, child, index if child.began >= free and child.ended <= span.ended else None)
            free = max(free, child.ended)

    def _draw_orphans(self, rank: int) -> None:
        """Draw spans whose parent was not published, or has not ended."""
        waiting = self._children[rank]
        ids = {span.id for spans in waiting.values() for span in spans}
        for parent in [parent for parent in waiting if parent not in ids]:
            for span in waiting.pop(parent, ()):
                self._draw_tree(rank, span)

    def command(self, outcome: Outcome, time_ns: int) -> None:
        args = {"batch": outcome.batch, "event": outcome.event}
        if outcome.error is not None:
            args["error"] = outcome.error
        refused = " refused" if outcome.error is not None else ""
        self._instant(0, f"command {outcome.command}{refused}", self._at(time_ns), args)

    def close(self, ending: Ending | None = None) -> None:
        for rank in self._children:
            self._draw_orphans(rank)
        if ending is not None and self._ranks:
            for (rank, track), count in self._open.items():
                for _ in range(count):
                    self._put("E", rank, track, self._last)
            why = {name: text for name in ("error", "reason") if (text := getattr(ending, name))}
            self._instant(min(self._ranks), f"run {ending.status}", self._last, why)
        self._file.write("\n]\n" if self._ranks else "[\n]\n")

    def _draw_batch(self, state: Snapshot, began: int, now: int) -> None:
        rank, values = state.rank, state.timestamp.values
        self._span(rank, "batches", f"batch {values.batch}", began, now)
        phases = read_phases(state.fields.get("phases"))
        if phases is not None:
            origin = self._at(phases.began_ns)
            for phase, start, duration in phases.spans:
                self._span(rank, phase, phase, origin + start, origin + start + duration, {"batch": values.batch})
        if rank:
            return
        self._counter("training", {"loss": state.loss}, now)
        # A user's loop may send any value under that name.
        lr = state.fields.get("lr")
        rates = {
            f"{name}/group{group}": rate
            for name, groups in (lr.items() if isinstance(lr, dict) else ())
            if isinstance(groups, list)
            for group, rate in enumerate(groups)
        }
        if rates != self._rates:
            self._rates = rates
            self._counter("learning rate", rates, now)
        previous = state.previous_timestamp
        if previous is not None and now > began:
            for name, unit in (("batches", "batch"), ("samples", "sample"), ("tokens", "token")):
                if count := getattr(values, unit) - getattr(previous.values, unit):
                    self._counter(name, {"per second": count / (now - began) * 1e9}, now)

    def _name_rank(self, state: Snapshot) -> None:
        rank, system = state.rank, state.fields.get("system")
        host = system.get("host") if isinstance(system, dict) else None
        actor = actor_in(state.fields)
        name = f"rank {rank} ({host})" if host else f"rank {rank}"
        self._metadata(rank, "process_name", {"name": name if actor is None else str(actor)})
        self._metadata(rank, "process_sort_index", {"sort_index": rank})
        if rank == 0:
            base = self._base or 0
            began = {"began": datetime.fromtimestamp(base // 10**9, UTC).isoformat(), "began_ns": str(base)}
            self._instant(0, f"run {state.run_name}, attempt {state.attempt}", 0, began)

    def _at(self, time_ns: int) -> int:
        if self._base is None:
            self._base = time_ns
        self._last = max(self._last, time_ns - self._base)
        return max(0, time_ns - self._base)

    def _span(
        self, rank: int, track: str, name: str, began: int, ended: int, args: dict[str, Any] | None = None
    ) -> None:
        began = self._free(rank, track, began)
        ended = self._free(rank, track, ended)
        self._put("X", rank, track, began, args, name=name, dur=(ended - began) / 1000)

    def _begin(self, rank: int, track: str, name: str, at: int, args: dict[str, Any] | None = None) -> None:
        self._put("B", rank, track, self._free(rank, track, at), args, name=name)
        self._open[rank, track] += 1

    def _end(self, rank: int, track: str, at: int, args: dict[str, Any] | None = None) -> None:
        if self._open[rank, track]:
            self._open[rank, track] -= 1
            self._put("E", rank, track, self._free(rank, track, at), args)

    def _free(self, rank: int, track: str, at: int) -> int:
        """Return the time, or the end of the last span: Perfetto omits overlapping ones, as of a GPU that lags."""
        at = self._free_from[rank, track] = max(at, self._free_from.get((rank, track), 0))
        return at

    def _instant(self, rank: int, name: str, at: int, args: dict[str, Any]) -> None:
        self._put("i", rank, "events", at, args, name=name, s="t")

    def _counter(self, name: str, values: dict[str, Any], at: int) -> None:
        numbers = {
            series: value for series, value in values.items() if isinstance(value, float | int) and math.isfinite(value)
        }
        if numbers:
            self._put("C", 0, "events", at, numbers, name=name)

    def _put(self, kind: str, rank: int, track: str, at: int, args: dict[str, Any] | None = None, **more: Any) -> None:
        tid = self._tids.get((rank, track))
        if tid is None:
            if track not in self._tracks:
                self._tracks.append(track)
            index = self._tracks.index(track) + 1
            # Perfetto identifies a track by its number alone, and sorts tracks by number.
            tid = self._tids[rank, track] = (rank + 1) * _TIDS_A_PROCESS + index
            self._metadata(rank, "thread_name", {"name": track}, tid)
            self._metadata(rank, "thread_sort_index", {"sort_index": index}, tid)
        self._write({"ph": kind, "pid": rank, "tid": tid, "ts": at / 1000, **more, **({"args": args} if args else {})})

    def _metadata(self, rank: int, name: str, args: dict[str, Any], tid: int | None = None) -> None:
        tid = (rank + 1) * _TIDS_A_PROCESS if tid is None else tid
        self._write({"ph": "M", "pid": rank, "tid": tid, "ts": 0, "name": name, "args": args})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(self._separator + json_text(event))
        self._separator = ",\n"
