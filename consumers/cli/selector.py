"""What the command ``consumer`` reads: which run or recording its options name, and the streams of that."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import click

from offloop.bus.cli.options import ReplayChoice
from offloop.bus.errors import ConfigurationError, RunNotFoundError
from offloop.bus.recording.recording import Recording
from offloop.bus.replay.pace import Pace
from offloop.bus.replay.replay import Replay
from offloop.bus.runs.directory import find_run
from offloop.consumers.api.callback import Callback
from offloop.consumers.delivery.commit import CommitStore
from offloop.consumers.runner.checkpoint_states import STATE_DIR
from offloop.consumers.runner.entries import Subscription, requested_events
from offloop.consumers.runner.places import FoundRun, NatsRuns, Stream, place_of
from offloop.consumers.runner.state_file import StateFile
from offloop.consumers.runner.streams import choose_ranks, find_or_wait, live_or_wait, newest_run

Found: TypeAlias = FoundRun | Recording


@dataclass(frozen=True)
class RunSelector:
    """The options that name a run or a recording, as they were given."""

    run: str | None
    runs_dir: str | None
    stream: str | None
    replay: Path | None
    wait: bool
    last: bool
    ranks: tuple[int, ...] = ()

    @property
    def is_file(self) -> bool:
        """Whether they name a recording."""
        return self.replay is not None or (self.run is not None and not self.stream and Path(self.run).is_file())

    @property
    def names_nothing(self) -> bool:
        """Whether they leave open which run of the folder is meant."""
        return not (self.run or self.replay or self.stream or self.wait or self.last)

    def check(self) -> None:
        """Raises :class:`click.UsageError` for options that do not go together."""
        if self.replay and (self.run or self.wait):
            raise click.UsageError("--replay reads a file: it goes with neither --run nor --wait")
        if self.last and (self.replay or self.run or self.wait):
            raise click.UsageError(
                "--last takes the newest run there is: it goes with none of --replay, --run and --wait"
            )
        if self.stream and self.replay:
            raise click.UsageError("--stream reads runs from NATS: it does not go with --replay")
        if self.ranks and not (self.stream and self.run):
            raise click.UsageError("--ranks chooses ranks of a run in NATS: name them with --stream and --run")

    def find(self, say: Callable[[str], None]) -> Found:
        """What they name, once it is there; without a name the run that is live, once one is. The next attempt of a
        named run that is just being started again is waited for. ``say`` is told what is waited for.

        Raises:
            RunNotFoundError: there is no such run, and they do not say to wait.
            RecordingError: the recording cannot be read.
            BrokerError: the NATS servers do not answer.
        """
        if self.replay is not None and not self.replay.exists():
            # What is no run's name either is told of as a file.
            with contextlib.suppress(RunNotFoundError, ConfigurationError):
                return Recording(find_run(str(self.replay), self.runs_dir).recording)
        if self.is_file:
            return Recording(self.replay or Path(str(self.run)))
        place = place_of(self.runs_dir, self.stream)
        if self.run:
            found = find_or_wait(place, self.run, self.wait, say)
            return choose_ranks(found, self.ranks, self.wait, say) if self.ranks else found
        return (newest_run if self.last else live_or_wait)(place, say)


class SourceStreams:
    """The streams of what was found, for a consumer called ``name``, whose events may be ``max_delay`` seconds
    late. A recording is replayed where ``choice`` says how, and else read."""

    def __init__(self, found: Found, choice: ReplayChoice, name: str | None, max_delay: float | None) -> None:
        self._found = found
        self._choice = choice
        self._pace = Pace(choice.rate_or_max)
        self._name = name
        self._max_delay = max_delay
        self._replays: list[Replay] = []

    @property
    def gave_nothing(self) -> bool:
        """Whether what was replayed had no event that callbacks with streams of their own request. The first stream is
        the others', and brings what the run says of itself too."""
        return bool(self._replays) and not any(replay.given for replay in self._replays[1:])

    def open(self, callbacks: Sequence[Callback], after: Mapping[int, tuple[int, int]] | None) -> Stream:
        """The stream for these callbacks, as :data:`offloop.consumers.runner.session.OpenStream` has it.

        Raises:
            RunError: another attempt of the run has begun meanwhile.
        """
        found, choice = self._found, self._choice
        if isinstance(found, Recording) and choice.option:
            events = requested_events(callbacks)
            recording = Recording(found.path)
            replay = Replay(recording, self._pace, choice.start, choice.until, events=events, after=after)
            self._replays.append(replay)
            return replay
        if isinstance(found, Recording):
            return Recording(found.path)
        return found.attach(Subscription.of(callbacks, self._name, after, self._max_delay))

    def rewind(self) -> None:
        """Lets the replay begin again."""
        self._pace.rewind()
        self._replays.clear()


def open_state(
    directory: Path | None, name: str, found: Found, say: Callable[[str], None]
) -> contextlib.AbstractContextManager[CommitStore]:
    """Where the consumer ``name`` keeps how far it is: in ``directory``, or else in the run's own; of a run in NATS,
    there. ``say`` is given what is waited for.

    Raises:
        ConfigurationError: a consumer of that name is at work.
        RunDirectoryError: the directory cannot be made or written.
        BrokerError: NATS does not answer.
    """
    if isinstance(found, Recording):
        return StateFile(directory or found.path.parent / STATE_DIR, name, found.run_name, found.attempt)
    if directory is None and isinstance(found.place, NatsRuns):
        from offloop.consumers.runner.state_bucket import StateBucket

        return StateBucket(found.place.address, name, found.name, found.attempt, say)
    return StateFile(directory or Path(found.key) / STATE_DIR, name, found.name, found.attempt)
