"""The states of callbacks at the training's checkpoints, for attempts that resume from one."""

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from offloop.bus.errors import ConfigurationError, OffloopError, RecordingError, RunDirectoryError
from offloop.bus.printing import say
from offloop.bus.protocol.order import CheckpointMark
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.protocol.stream import RunStream, in_turns
from offloop.bus.recording.recording import Recording
from offloop.bus.runs.directory import read_run
from offloop.bus.types.event import Event
from offloop.consumers.api.logger import RunContext
from offloop.consumers.delivery.commit import seal, unseal
from offloop.consumers.delivery.fanout import Fanout
from offloop.consumers.runner.dispatcher import Dispatcher, Handling
from offloop.consumers.runner.entries import CallbackEntry
from offloop.consumers.runner.state_file import read_state, write_state

STATE_DIR = "consumers"  # folder in a run's directory for the states of consumers

_KEPT = 100


class CheckpointStates:
    """Keeps a consumer's states, a file for each checkpoint, and restores them where one was loaded.

    The files are in ``directory``, by default in the run's directory; checkpoints of a run beside this one work
    too. Only callbacks with a state that resume take part.

    A consumer that had not reached the checkpoint continues from an earlier state, or from the beginning, and
    handles the events in between from the recording of the attempt, without logging. Where that is impossible, the
    callbacks begin anew, with a message."""

    def __init__(self, name: str, directory: Path | None = None) -> None:
        self._name = name
        self._directory = directory
        self._lock = threading.Lock()  # background callbacks call this from their threads
        self._problems: set[str] = set()

    def take(self, mark: CheckpointMark, dispatcher: Dispatcher) -> None:
        """Keep the states of a dispatcher's callbacks at a saved checkpoint; restore them at a loaded one."""
        entries = [one for one in dispatcher.entries if one.callback.resumes and one.callback.has_state]
        if entries and mark.action == "save":
            self._keep(mark, dispatcher, entries)
        elif entries:
            self._restore(mark, dispatcher, entries)

    def _keep(self, mark: CheckpointMark, dispatcher: Dispatcher, entries: Sequence[CallbackEntry]) -> None:
        states = dispatcher.callback_states(entries)
        path = self._path(mark, dispatcher.context)
        if states is None or path is None:
            return
        try:
            with self._lock:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                # Other dispatchers of this consumer have kept their states at the same checkpoint.
                known = {**self._read(path), **{name: state for name, _, _, state in states}}
                write_state(path, seal(known))
                files = sorted(path.parent.glob("*.state"), key=lambda file: file.stat().st_mtime_ns)
                for surplus in files[:-_KEPT]:
                    surplus.unlink(missing_ok=True)
        except (OSError, ConfigurationError) as error:
            what = error.strerror if isinstance(error, OSError) else str(error)
            self._say_once(f"the state of {self._name} for checkpoints cannot be kept in {path.parent}: {what}")

    def _restore(self, mark: CheckpointMark, dispatcher: Dispatcher, entries: Sequence[CallbackEntry]) -> None:
        missing = self._load(mark, dispatcher, entries)
        if missing:
            missing = self._catch_up(mark, dispatcher, missing)
        if missing:
            names = ", ".join(entry.name for entry in missing)
            where = "" if dispatcher.context.run_dir else ": the run's directory is on another machine"
            say(
                f"{names} begin{'s' if len(missing) == 1 else ''} anew: no state was kept for the checkpoint at batch "
                f"{mark.timestamp.values.batch} of run {mark.run}, and no recording of that checkpoint was "
                f"found{where}; checkpoints saved without a stream, or by a consumer, have no states",
                err=True,
            )

    def _load(
        self, mark: CheckpointMark, dispatcher: Dispatcher, entries: Sequence[CallbackEntry]
    ) -> list[CallbackEntry]:
        """Restore the states kept at a mark; return the callbacks without one."""
        states = self._read(self._path(mark, dispatcher.context))
        for entry in entries:
            if entry.name in states:
                dispatcher.load_state(entry, states[entry.name])
        return [entry for entry in entries if entry.name not in states]

    def _catch_up(
        self, mark: CheckpointMark, dispatcher: Dispatcher, entries: Sequence[CallbackEntry]
    ) -> list[CallbackEntry]:
        """Pass the recording up to a checkpoint through callbacks; return those for which that failed."""
        found = self._find(mark, dispatcher.context)
        if found is None:
            return list(entries)
        recording, marks = found
        say(
            f"{self._name}: reading {recording.path} up to the checkpoint at batch {mark.timestamp.values.batch}, to "
            "continue from there",
            err=True,
        )
        # The newest mark before it at which all of them have a state.
        first = next((one for one in reversed(marks[:-1]) if self._has(one, dispatcher.context, entries)), None)
        if first is not None:
            self._load(first, dispatcher, entries)
        part = _Part(recording, first, marks[-1], lambda: dispatcher.stopping)
        catching_up = Dispatcher(
            part,
            [(entry.name, entry.callback) for entry in entries],
            Fanout({}, dispatcher.fail),
            Handling(at_checkpoint=self.take),
        )
        _run_to_end(catching_up)
        for entry, done in zip(entries, catching_up.entries, strict=True):
            entry.errors += done.errors
        return []

    def _has(self, mark: CheckpointMark, context: RunContext, entries: Sequence[CallbackEntry]) -> bool:
        states = {} if mark.action == "load" else self._read(self._path(mark, context))
        return all(entry.name in states for entry in entries)

    def _find(self, mark: CheckpointMark, context: RunContext) -> tuple[Recording, list[CheckpointMark]] | None:
        run_dir = _run_dir(mark, context)
        try:
            attempts = [] if run_dir is None else read_run(run_dir).attempts
        except OffloopError:
            return None
        for attempt in reversed(attempts):
            if run_dir == context.run_dir and attempt.number >= context.attempt:
                continue
            try:
                recording = Recording(attempt.recording)
                marks = recording.read_checkpoints()
            except (RecordingError, RunDirectoryError):
                continue
            for last in range(len(marks), 0, -1):
                if marks[last - 1].action == "save" and marks[last - 1].timestamp.values == mark.timestamp.values:
                    return recording, marks[:last]
        return None

    def _read(self, path: Path | None) -> dict[str, dict[str, Any]]:
        try:
            packed = None if path is None else read_state(path)
            return {} if packed is None else unseal(packed, dict[str, dict[str, Any]])
        except (OSError, RecordingError) as error:
            what = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
            self._say_once(f"the state of {self._name} in {path} {what}")
            return {}

    def _path(self, mark: CheckpointMark, context: RunContext) -> Path | None:
        run_dir = _run_dir(mark, context)
        directory = self._directory or (None if run_dir is None else run_dir / STATE_DIR)
        if directory is None:
            return None
        values = mark.timestamp.values
        # The whole training time, because a batch that is trained again has another one.
        digest = hashlib.sha256(repr(values[:14]).encode()).hexdigest()[:16]
        return directory / f"{self._name}.checkpoints" / f"ba{values.batch}-{digest}.state"

    def _say_once(self, problem: str) -> None:
        if problem not in self._problems:
            self._problems.add(problem)
            say(f"{problem}", err=True)


class _Part(RunStream):
    def __init__(
        self, recording: Recording, first: CheckpointMark | None, last: CheckpointMark, leaves: Callable[[], bool]
    ) -> None:
        self.run_name, self.attempt, self.run_dir = recording.run_name, recording.attempt, recording.run_dir
        self._recording = recording
        self._first = first
        self._last = last
        self._leaves = leaves

    def read(
        self, events: Collection[Event], after: Mapping[int, tuple[int, int]]
    ) -> AsyncGenerator[Sequence[Snapshot], None]:
        return in_turns(self._batches(events), 1)

    def _batches(self, events: Collection[Event]) -> Iterator[list[Snapshot]]:
        begun, ended = self._first is None, False

        def see(mark: CheckpointMark) -> None:
            nonlocal begun, ended
            if begun and not ended:
                self.on_checkpoint(mark)
            begun = begun or mark == self._first
            ended = ended or mark == self._last

        self._recording.on_checkpoint = see
        for batch in self._recording.batches(events):
            if ended or self._leaves():
                return
            if begun:
                yield batch


def _run_to_end(dispatcher: Dispatcher) -> None:
    """Run it in a new thread: an event loop runs here already, and callbacks may be asynchronous."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            asyncio.run(dispatcher.consume())
        except Exception as error:  # noqa: BLE001  whatever it is, it is raised where the others run
            errors.append(error)

    thread = threading.Thread(target=run, name="offloop-catch-up", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _run_dir(mark: CheckpointMark, context: RunContext) -> Path | None:
    if context.run_dir is None or mark.run == context.run_name or mark.run in _earlier_names(context):
        return context.run_dir
    return context.run_dir.parent / mark.run


def _earlier_names(context: RunContext) -> Iterator[str]:
    """Names of the run in the recordings of its earlier attempts: it may have been renamed since."""
    try:
        attempts = [] if context.run_dir is None else read_run(context.run_dir).attempts
    except OffloopError:
        return
    for attempt in attempts:
        if attempt.number < context.attempt:
            with contextlib.suppress(OffloopError):
                yield Recording(attempt.recording).run_name
