"""Results that consumers add to a run after its end: recordings beside those of the run."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from offloop.bus.errors import OffloopError, RunDirectoryError
from offloop.bus.protocol import frames
from offloop.bus.protocol.frames import EventBody, Topic
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.types.actor import ACTOR, DERIVED, FIRST_ACTOR, actor_in
from offloop.bus.types.demand import BASE_EVENTS
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp, TrainingTime

_IS_DERIVED = re.compile(r"derived-(\d+)-([A-Za-z0-9_][A-Za-z0-9._-]{0,99})\.mcap").fullmatch
_FLUSH_EVENTS = 1000
_BASE = frozenset(event.value for event in BASE_EVENTS)
# Behind the numbers that brokers assign.
_RANK = FIRST_ACTOR + (1 << 19)


def derived_path(run_dir: Path, attempt: int, name: str) -> Path:
    return run_dir / f"derived-{attempt}-{name}.mcap"


def derived_recordings(run_dir: Path | None, attempts: Iterable[int] | None = None) -> list[Recording]:
    """Return the readable recordings of results beside a run's, of these attempts, in order of attempt and name."""
    try:
        names = sorted(os.listdir(run_dir)) if run_dir is not None else []
    except OSError:
        return []
    chosen = None if attempts is None else set(attempts)
    found: list[tuple[int, Recording]] = []
    for match in filter(None, map(_IS_DERIVED, names)):
        attempt = int(match[1])
        if run_dir is not None and (chosen is None or attempt in chosen):
            try:
                found.append((attempt, Recording(run_dir / match[0])))
            except OffloopError:
                continue
    return [recording for _, recording in sorted(found, key=lambda one: one[0])]


def count_derived(recording: Recording, name: str) -> int:
    """Return the number of events that actors of a name have in a recording, without the first one of each."""
    ranks: set[int] = set()
    count = 0
    for snapshot in recording:
        actor = actor_in(snapshot.fields)
        if actor is not None and actor.name == name:
            ranks.add(snapshot.rank)
        elif snapshot.rank in ranks:
            count += 1
    return count


class DerivedWriter:
    """Writes the results of one name beside a run's recording; continues the file, if there is one.

    Raises RunDirectoryError if it cannot be written, RecordingError if it is another run's."""

    def __init__(self, run_dir: Path, run: str, attempt: int, run_id: str | None, name: str) -> None:
        self.path: Path = derived_path(run_dir, attempt, name)
        self._writer = RecordingWriter(self.path, run, attempt, run_id, resume=self.path.exists())
        self._run, self._attempt, self._name = run, attempt, name
        at = self._writer.positions.get(_RANK)
        self._seq, self._base_seq, self._time = (0, 0, 0) if at is None else (at.seq, at.base_seq, at.time)

    @property
    def count(self) -> int:
        """Events in the file, without the first."""
        return max(0, self._seq - 1)

    def put(self, event: Event, time_ns: int, timestamp: TrainingTime, fields: dict[str, Any]) -> None:
        if not self._seq:
            self._append(Event.INIT.value, time_ns, Timestamp().values, {ACTOR: {"name": self._name, "role": DERIVED}})
        self._append(event.value, time_ns, timestamp, fields)
        if self._seq % _FLUSH_EVENTS == 0:
            self._writer.flush()

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        try:
            self._writer.close()
        except OSError as error:
            raise RunDirectoryError(f"{self._writer.path} cannot be written: {error.strerror}") from None

    def _append(self, name: str, time_ns: int, timestamp: TrainingTime, fields: dict[str, Any]) -> None:
        topic = Topic(self._run, name, _RANK).encode()[:-1]
        is_base = name in _BASE
        seq, base_seq, time_ns = self._seq + 1, self._base_seq + is_base, max(time_ns, self._time)
        event = EventBody(1, self._attempt, seq, base_seq, time_ns, timestamp, None, fields, {})
        self._writer.append(topic, seq, base_seq, time_ns, frames.encode_body(event))
        self._seq, self._base_seq, self._time = seq, base_seq, time_ns
