"""One attempt of a run: the model that dashboards draw from."""

import contextlib
import functools
import itertools
import math
import os
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offloop.bus.errors import OffloopError, ProtocolError, require
from offloop.bus.protocol.frames import EventBody, decode_head, decode_whole_event
from offloop.bus.protocol.host_windows import HostWindow
from offloop.bus.protocol.order import CheckpointMark, Ending, StreamOrder
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import RunStream
from offloop.bus.recording.summary import MAX_METRICS, Summarizer, Summary
from offloop.bus.runs.console import last_traceback, list_ranks
from offloop.bus.runs.directory import RunInfo, read_run
from offloop.bus.subscriber.commands import sent_by
from offloop.bus.types.actor import ACTOR, actor_in, is_actor
from offloop.bus.types.commands import Argument, Outcome
from offloop.bus.types.event import Event
from offloop.bus.types.health import Health
from offloop.bus.types.hyperparameters import MOST
from offloop.bus.types.metrics import MetricNames
from offloop.bus.types.phases import read_phases
from offloop.consumers.api.logger import Images, LoggerDestination, Row, RunContext, Text
from offloop.consumers.api.optional import np
from offloop.consumers.dashboard.view.images import ImageHistory
from offloop.consumers.dashboard.view.log import LogEntry, RunLog, event_text
from offloop.consumers.dashboard.view.marks import ATTEMPT, CHECKPOINT, EVALUATION, Marks, Placed, PlacedMark
from offloop.consumers.dashboard.view.metrics import MAX_POINTS, Metrics
from offloop.consumers.dashboard.view.phases import PhaseView, PublishingView, RankPhases
from offloop.consumers.dashboard.view.progress import ProgressView, RunProgress, progress_of
from offloop.consumers.dashboard.view.ranks import RankMap, RankTiming
from offloop.consumers.dashboard.view.series import Axis, Series

if TYPE_CHECKING:
    from offloop.consumers.dashboard.view.history import History
    from offloop.consumers.dashboard.view.own_events import OwnEvents
    from offloop.consumers.dashboard.view.spans import Spans
    from offloop.consumers.dashboard.view.tables import TableStore

_COUNTED: tuple[Axis, ...] = ("sample", "epoch")
_KNOWN_OUTCOMES = 1000
_COUNTING_SECONDS = 0.25
_NAMED_ACTORS = 1000
_BATCH_END = Event.BATCH_END


class RunView(LoggerDestination):
    """Everything that a dashboard shows of one attempt of a run. Logged values come to it as to a destination.

    For any thread. Its size is bounded: ``max_points`` of all series together, :data:`MAX_METRICS`,
    :data:`offloop.consumers.dashboard.view.images.MAX_BYTES` of images, 1,000 hyperparameters, the last 2,000 lines of
    the log. With ``wants``, only metrics for whose names it returns true have values. Losses, learning rates, metrics
    and throughput come from the events of the first rank, under the names of the callbacks ``metrics``, ``lr`` and
    ``speed``."""

    def __init__(
        self,
        run_name: str,
        attempt: int = 1,
        max_points: int = MAX_POINTS,
        wants: Callable[[str], bool] | None = None,
    ) -> None:
        require("a dashboard", "dashboard", "numpy")
        self.run_name: str = run_name
        self.attempt: int = attempt
        self.version: int = 0  # grows with each change
        self.refined: int = 0  # grows with each refine
        self.error: str | None = None  # the text of the failure that ended the run
        self.reason: str | None = None  # the reason of a stop, and its sender
        self.trouble: str | None = None  # why watching has failed
        self.key: str = secrets.token_hex(8)  # its name in the addresses of its images and files
        self.command: Callable[..., Outcome] | None = None  # sends a command to the training; None for a recording
        self.run_dir: Path | None = None  # its directory, if on this machine
        self.history: History | None = None  # the recording behind the summary
        self.stream: RunStream | None = None  # the stream that feeds it, known once that begins
        self.own: dict[str, int] = {}  # numbers of events and rows of the training's own, see Summary.own
        self.actors: dict[int, str] = {}  # names, by the number in the place of a rank
        self.tables: TableStore | None = None  # of all runs of its page, at the first run
        self.spans: Spans | None = None
        self.health: OwnEvents | None = None  # once a page has shown that a rank delays the others
        self.console_ranks: list[int] = []  # ranks with captured output on this machine
        self.traceback: str = ""  # of the failure that ended the run, from its output
        self._summary: Summary | None = None
        self._counted_bytes = -1
        self._counting = threading.Lock()
        self._status = "waiting"
        self._lock = threading.RLock()
        self._metrics = Metrics(self._lock, max_points, wants)
        self._progress = RunProgress()
        self._phases: defaultdict[int, RankPhases] = defaultdict(RankPhases)
        self._ranks = RankTiming()
        self._log = RunLog()
        self._marks = Marks()
        self.images: ImageHistory = ImageHistory()
        self._alerts: set[str] = set()
        self._hyperparameters: dict[str, Any] = {}
        self._first_ns = 0
        self._evaluation_began: int | None = None
        self._paused_at: int | None = None
        self._has_begun = self._is_over = False
        self._ended_before: Ending | None = None
        self._reached: ProgressView | None = None
        self._said_left_out = False
        self._loads = 0
        self._names: tuple[str, ...] = ()
        self._context = RunContext(run_name, attempt, None)
        self._outcomes_read = self._checkpoints_read = 0
        self._known_outcomes: deque[str] = deque(maxlen=_KNOWN_OUTCOMES)

    def see(self, state: Snapshot) -> None:
        # From the body: accessors make objects at each call, and a million events are to load in seconds.
        body = state._body
        with self._lock:
            self.version += 1
            if self._first_ns == 0:
                self._first_ns = body.time
            seconds = (body.time - self._first_ns) / 1e9
            if state.event is _BATCH_END:
                self._ranks.batch_end(state)
                if state.rank == 0:
                    self._progress.batch_end(state)
                    self._metrics.batch_end(body, seconds)
                    if self._status != "live" and (self._paused_at is None or body.timestamp.batch > self._paused_at):
                        self._go_on()
                if "phases" in body.fields:
                    self._see_phases(state.rank, body)
            elif state.rank == 0:
                # Not with every batch, for speed; other events are frequent enough for a log in order.
                self._take_outcomes()
                self._progress.event(state)
                self._see_event(state, seconds)
            elif is_actor(state.rank) and ACTOR in body.fields:
                actor = actor_in(body.fields)
                self._log.add(state.time, 0, "actor", f"{actor} joined")
                if actor is not None and len(self.actors) < _NAMED_ACTORS:
                    self.actors[state.rank] = actor.name
            if state.rank == 0 or is_actor(state.rank):
                self._metrics.logged(body.fields)

    def take_windows(self, windows: Sequence[HostWindow]) -> None:
        with self._lock:
            self.version += 1
            self._ranks.add_windows(window for window in windows if window.attempt == self.attempt)

    def begin_within(self, began_ns: int, is_imported: bool) -> None:
        with self._lock:
            self._first_ns, self._metrics.is_imported = began_ns, is_imported

    def load(self, summary: Summary, until: int | None = None) -> None:
        """Add a summary of the run: as its history before the offset ``until``, or as a preview until events come."""
        with self._lock:
            self.version += 1
            self._loads += 1
            self._first_ns = self._progress.first_ns = summary.began
            self._metrics.load(summary, math.inf if until is None else until)
            if until is not None:
                self._load_events(summary, until)
            with contextlib.suppress(ProtocolError):
                self._progress.last = Snapshot(_BATCH_END, summary.run, 0, decode_whole_event(summary.last))

    def count_own(self) -> None:
        """Count what the recording has of the training's own events and tables, a quarter of a second at a time."""
        stream = self.stream
        if stream is None or stream.recording is None or not self._counting.acquire(blocking=False):
            return
        try:
            size = stream.recording.stat().st_size
            if size != self._counted_bytes:
                of_run = stream.recording, stream.run_name, stream.attempt, stream.run_id
                with contextlib.closing(Summarizer(*of_run, self._summary)) as summarizer:
                    if summarizer.work(time.monotonic() + _COUNTING_SECONDS, saves=False):
                        self._counted_bytes = size
                    found = summarizer.summary
                # Without the metrics, which take memory.
                about = found.version, found.run, found.attempt, found.id, found.offset
                self._summary = Summary(*about, own=found.own, counted=found.counted)
                self.own = dict(found.own)
        except (OSError, OffloopError):
            pass  # another attempt may have removed it
        finally:
            self._counting.release()

    def look_at_console(self) -> None:
        """Find the ranks with captured output, and the traceback of a failure."""
        if self.run_dir is None:
            return
        self.console_ranks = list_ranks(self.run_dir, self.attempt)
        if not self.traceback and self._status in ("failed", "lost"):
            self.traceback = last_traceback(self.run_dir, self.attempt, self.error or "")
            self.version += bool(self.traceback)

    def _load_events(self, summary: Summary, until: int) -> None:
        order = StreamOrder(summary.run, summary.attempt, None)
        kept: list[tuple[int, str, bytes]] = []
        for name, of_kind in summary.events.items():
            for event in of_kind.events.values():
                with contextlib.suppress(ProtocolError):
                    if event.offset < until:
                        kept.append((decode_head(event.body).seq, name, event.body))
        for _, name, recorded in sorted(kept):
            found = order.from_record(f"{summary.run}/{name}/0", recorded)
            if isinstance(found, CheckpointMark):
                self._mark_checkpoint(found)
            elif found is None:
                for outcome in order.outcomes:
                    self.take_outcome(outcome)
                order.outcomes.clear()
            elif found.event is _BATCH_END:
                self._see_phases(0, found._body)
            else:
                self.see(found)

    def open(self, context: RunContext) -> None:
        with self._lock:
            self.run_name, self.attempt, self._context = context.run_name, context.attempt, context
            self.command, self.run_dir = context.command, context.run_dir
        # A recording may lie anywhere.
        with contextlib.suppress(OffloopError):
            run = None if context.run_dir is None else read_run(context.run_dir)
            if run is not None and run.id == context.run_id:
                self.expect(run)

    def log_rows(self, rows: Sequence[Row], state: Snapshot | None = None) -> None:
        with self._lock:
            self.version += 1
            self._metrics.rows(rows, None if state is None else state.event)

    def log_images(self, entry: Images, state: Snapshot | None = None) -> None:
        self.images.take(entry)
        with self._lock:
            self.version += 1

    def log_text(self, entry: Text, state: Snapshot | None = None) -> None:
        with self._lock:
            self.version += 1
            self._log.add(entry.time, 0, "text", f"{entry.name}: {entry.text}")

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any], state: Snapshot | None = None) -> None:
        with self._lock:
            self.version += 1
            known = self._hyperparameters
            known.update((name, value) for name, value in hyperparameters.items() if name in known or len(known) < MOST)

    def take_outcome(self, outcome: Outcome) -> None:
        """Add the outcome of a command; after a final one, further ones are ignored."""
        with self._lock:
            identity = outcome.command.id
            if identity and identity in self._known_outcomes:
                return
            self.version += 1
            if outcome.event is not None or outcome.error is not None:
                # Its sender may have stopped waiting for it.
                self._known_outcomes.append(identity)
            answered = self._time if outcome.time_ns is None else outcome.time_ns / 1e9
            self._log.add(answered, 0, "command", outcome.with_reason)
            if outcome.batch is not None and (outcome.event is not None or outcome.error is not None):
                self._marks.add(outcome.command.name, outcome.batch, answered, outcome.with_reason)
            if outcome.error is None and outcome.event is not None and self._status in ("waiting", "live", "paused"):
                if outcome.command.name == "pause":
                    self._status, self._paused_at = "paused", outcome.batch
                elif outcome.command.name in ("resume", "stop"):
                    self._go_on()

    def note(self, kind: str, text: str) -> None:
        with self._lock:
            self.version += 1
            self._log.add(self._time, 0, kind, text)

    def take_own(self, state: Snapshot, text: str) -> None:
        """Add an event of the training's own to the log."""
        with self._lock:
            self.version += 1
            actor = self.actors.get(state.rank)
            self._log.add(state.time, 0 if actor else state.rank, "event", f"{actor} {text}" if actor else text)

    def take_health(self, state: Snapshot) -> None:
        health = Health.of(state.fields)
        with self._lock:
            if health is not None:
                self._ranks.add_health(health)

    def take_alert(self, identity: str, time: float, text: str) -> None:
        """Add an alert of a consumer to the log, once for each identity."""
        with self._lock:
            if identity in self._alerts:
                return
            self.version += 1
            self._alerts.add(identity)
            self._log.add(time, 0, "alert", text)

    def expect(self, run: RunInfo) -> None:
        attempt = next((one for one in run.attempts if one.number == self.attempt), None)
        if attempt is None or attempt.status == "running" or (attempt is run.last and run.away):
            return
        took = None if attempt.ended is None else max(attempt.ended - attempt.started, 0.0)
        reached = None if attempt.reached is None or took is None else progress_of(attempt.reached, took)
        self.expect_end(Ending(attempt.status, attempt.error, attempt.reason), reached)

    def expect_end(self, ending: Ending, reached: ProgressView | None = None) -> None:
        """Set the ending and the progress before the history has been read."""
        with self._lock:
            if self._is_over:
                return
            self.version += 1
            self._ended_before, self._reached = ending, reached
            self._status, self.error, self.reason = ending.status, ending.error, ending.reason

    def end(self, ending: Ending | None) -> None:
        """Set the ending; ``None`` when only the watching ends."""
        with self._lock:
            self.version += 1
            self._take_outcomes()
            self._reached = None
            if ending is None:
                return
            self._is_over = True
            self._status, self.error, self.reason = ending.status, ending.error, ending.reason
            self._log.add(self._time, 0, "end", f"the run {'was ' if ending.status == 'lost' else ''}{ending}")

    @property
    def name(self) -> str:
        """The name of the run's directory: recordings keep the name before a renaming."""
        return self.run_name if self.run_dir is None else os.path.basename(os.path.abspath(self.run_dir))

    @property
    def can_command(self) -> bool:
        return self.command is not None and self.status in ("live", "paused")

    def send(self, name: str, *arguments: Argument, sender: str = "the web page") -> Outcome:
        if self.command is None or not self.can_command:
            raise OffloopError(f"run {self.run_name} takes no commands: it is {self.status}")
        return self.command(name, *arguments, reason=sent_by(sender))

    @property
    def status(self) -> str:
        """``waiting`` for the first event, ``live``, ``paused``, ``finished``, ``stopped``, ``failed`` or ``lost``."""
        with self._lock:
            self._take_outcomes()
            return self._status

    @property
    def hyperparameters(self) -> dict[str, Any]:
        with self._lock:
            return dict(self._hyperparameters)

    def progress(self) -> ProgressView:
        with self._lock:
            if self._reached is not None:
                return self._reached
            return self._progress.view()

    def batches_at(self, x: Axis, first: float, last: float) -> tuple[float, float]:
        with self._lock:
            self._metrics.settle()
            begin, end = self._metrics.clock.steps_at(np.array([first, last]), x).tolist()
            return begin, end

    def refine(self, part: "RunView") -> None:
        with self._lock:
            self.version += 1
            self.refined += 1
            self._metrics.refine(part._metrics)
            for rank, phases in part._phases.items():
                self._phases[rank].refine(phases)

    def names(self) -> tuple[str, ...]:
        with self._lock:
            self._metrics.settle()
            if len(self._names) != len(self._metrics.series) + len(self._metrics.others):
                self._names = tuple(sorted({*self._metrics.series, *self._metrics.others}))
            return self._names

    @property
    def drawn(self) -> frozenset[str]:
        """The metrics that have all points."""
        with self._lock:
            return frozenset(self._metrics.series)

    def series(self, name: str) -> Series:
        """Return the series of a metric, which has all points from now on. Raises KeyError."""
        with self._lock:
            return self._metrics.find(name)

    def phases(self, rank: int = 0, width: int | None = None) -> PhaseView:
        with self._lock:
            return self._phases.get(rank, RankPhases()).view(width)

    @property
    def phase_ranks(self) -> list[int]:
        with self._lock:
            return sorted(rank for rank, phases in self._phases.items() if len(phases))

    def publishing(self) -> PublishingView:
        with self._lock:
            return self._phases.get(0, RankPhases()).publishing()

    @property
    def rank_count(self) -> int:
        with self._lock:
            return self._ranks.count

    def rank_map(self) -> RankMap:
        with self._lock:
            return self._ranks.map(is_live=self._status in ("waiting", "live"))

    def log(self, after: int = 0) -> list[LogEntry]:
        with self._lock:
            self._take_outcomes()
            if self._metrics.first_left_out is not None and not self._said_left_out:
                self._said_left_out = True
                name = self._metrics.first_left_out
                self.note("note", f"more than {MAX_METRICS:,} metrics: {name} and others are left out")
            return self._log.after(after)

    def marks(self, after: int = 0) -> Placed:
        """Return the later marks with their places on each axis, as far as the batches up to them are known."""
        with self._lock:
            self._take_outcomes()
            self._metrics.settle()
            clock = self._metrics.clock
            reached = math.inf if self._is_over else clock.reached
            found = list(itertools.takewhile(lambda one: one.batch <= reached, self._marks.after(after)))
            samples, epochs = (clock.places([one.batch for one in found], axis) for axis in _COUNTED)
            began = self._first_ns / 1e9
            placed = [
                PlacedMark(mark, sample, epoch, max(mark.time - began, 0.0))
                for mark, sample, epoch in zip(found, samples, epochs, strict=True)
            ]
            return Placed((self._marks.generation, self._loads), placed)

    @property
    def _time(self) -> float:
        last = self._progress.last
        return 0.0 if last is None else last.time

    def _go_on(self) -> None:
        if self._ended_before is None:
            self._status, self._paused_at = "live", None

    def _see_event(self, state: Snapshot, seconds: float) -> None:
        event = state.event
        if self._status == "waiting":
            self._status = "live"
        if event is Event.EVAL_BEFORE_ALL:
            self._evaluation_began = state.time_ns
        elif event is Event.EVAL_AFTER_ALL and self._evaluation_began is not None:
            self._phases[0].add_evaluation((state.time_ns - self._evaluation_began) / 1e9)
            self._evaluation_began = None
        self._metrics.event(state, seconds)
        text = event_text(state)
        batch = state._body.timestamp.batch
        if event is Event.EVAL_END:
            self._marks.add(EVALUATION, batch, state.time, text or "")
        elif event is Event.FIT_START and (batch or self.attempt > 1):
            begins = f"attempt {self.attempt} begins" if not self._has_begun else "training continues"
            self._marks.add(ATTEMPT, batch, state.time, begins)
        self._has_begun = self._has_begun or event is Event.FIT_START
        if text is not None:
            self._log.add(state.time, state.rank, "begin" if event is Event.EVAL_START else "event", text)

    def _see_phases(self, rank: int, body: EventBody) -> None:
        batch, phases = body.timestamp.batch, read_phases(body.fields["phases"])
        if phases is not None:
            self._phases[rank].see(batch, body.time, phases, 1000 * body.timestamp.batch_wct)

    def _take_outcomes(self) -> None:
        for outcome in self._context.answered()[self._outcomes_read :]:
            self._outcomes_read += 1
            self.take_outcome(outcome)
        for mark in self._context.checkpoints()[self._checkpoints_read :]:
            self._checkpoints_read += 1
            self._mark_checkpoint(mark)

    def _mark_checkpoint(self, mark: CheckpointMark) -> None:
        self.version += 1
        source = "" if mark.run == self.run_name else f" of {mark.run}"
        text = "checkpoint saved" if mark.action == "save" else f"checkpoint{source} loaded"
        self._marks.add(CHECKPOINT, mark.timestamp.values.batch, mark.time_ns / 1e9, text)


def labels_of(runs: Sequence[RunView]) -> list[str]:
    """Return the names of runs, with the attempt if there are several of one run."""
    names = [(run.name, run.attempt) for run in runs]
    several = {name for name, attempt in names if attempt > 1}
    return [f"{name} #{attempt}" if name in several else name for name, attempt in names]


@functools.lru_cache(maxsize=16)
def names_of(names: tuple[str, ...]) -> MetricNames:
    return MetricNames(names)
