"""What the command ``consumer`` reads: which run or recording its options name, and the streams of that."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import click

from offloop.bus.cli.options import ReplayChoice
from offloop.bus.errors import ConfigurationError, RunNotFoundError
from offloop.bus.net.curve import client_security
from offloop.bus.net.nats_addresses import is_nats
from offloop.bus.recording.recording import Recording
from offloop.bus.replay.pace import Pace
from offloop.bus.replay.replay import Replay
from offloop.bus.runs.directory import RunInfo, find_run
from offloop.consumers.api.callback import Callback
from offloop.consumers.delivery.commit import CommitStore
from offloop.consumers.runner.checkpoint_states import STATE_DIR
from offloop.consumers.runner.entries import Subscription, requested_events
from offloop.consumers.runner.state_file import StateFile
from offloop.consumers.runner.streams import (
    RemoteRunInfo,
    Stream,
    attach,
    choose_ranks,
    find_or_wait,
    find_remote,
    live_or_wait,
    live_remote_or_wait,
    newest_remote,
    newest_run,
)

Found: TypeAlias = RunInfo | RemoteRunInfo | Recording


@dataclass(frozen=True)
class RunSelector:
    """The options that name a run or a recording, as they were given."""

    run: str | None
    runs_dir: str | None
    broker: str | None
    key: str | None
    broker_key: str | None
    replay: Path | None
    wait: bool
    last: bool
    ranks: tuple[int, ...] = ()

    @property
    def is_file(self) -> bool:
        """Whether they name a recording."""
        return self.replay is not None or (self.run is not None and Path(self.run).is_file())

    @property
    def names_nothing(self) -> bool:
        """Whether they leave open which run of the folder is meant."""
        return not (self.run or self.replay or self.broker or self.wait or self.last)

    def check(self) -> None:
        """Raises :class:`click.UsageError` for options that do not go together."""
        if self.replay and (self.run or self.wait):
            raise click.UsageError("--replay reads a file: it goes with neither --run nor --wait")
        if self.last and (self.replay or self.run or self.wait):
            raise click.UsageError(
                "--last takes the newest run there is: it goes with none of --replay, --run and --wait"
            )
        if self.broker and (self.replay or self.runs_dir):
            raise click.UsageError("--broker reads everything through it: it goes with neither --replay nor --runs-dir")
        if self.ranks and not (self.broker and is_nats(self.broker) and self.run):
            raise click.UsageError("--ranks chooses ranks of a run in NATS: name them with --stream and --run")
        if (self.key or self.broker_key) and not self.broker:
            raise click.UsageError("--key and --broker-key are for a broker elsewhere: name it with --broker")

    def find(self, say: Callable[[str], None], *, as_it_is: bool = False) -> Found:
        """What they name, once it is there; without a name the run that is live, once one is. The next attempt of a
        named run that is just being started again is waited for, unless the run is requested ``as_it_is``. ``say`` is
        told what is waited for.

        Raises:
            RunNotFoundError: there is no such run, and they do not say to wait.
            RecordingError: the recording cannot be read.
            BrokerError: no broker answers at that address.
        """
        if self.broker:
            security = client_security(self.key, self.broker_key)
            if self.run:
                found = find_remote(self.broker, self.run, security, self.wait, say)
                return choose_ranks(found, self.ranks, self.wait, say) if self.ranks else found
            return (newest_remote if self.last else live_remote_or_wait)(self.broker, security, say)
        if self.replay is not None and not self.replay.exists():
            # What is no run's name either is told of as a file.
            with contextlib.suppress(RunNotFoundError, ConfigurationError):
                return Recording(find_run(str(self.replay), self.runs_dir).recording)
        if self.is_file:
            return Recording(self.replay or Path(str(self.run)))
        if self.run:
            return find_or_wait(self.run, self.runs_dir, self.wait, say, as_it_is=as_it_is)
        return (newest_run if self.last else live_or_wait)(self.runs_dir, say)


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
        return attach(found, Subscription.of(callbacks, self._name, after, self._max_delay))

    def rewind(self) -> None:
        """Lets the replay begin again."""
        self._pace.rewind()
        self._replays.clear()


def open_state(
    directory: Path | None, name: str, found: Found, say: Callable[[str], None]
) -> contextlib.AbstractContextManager[CommitStore]:
    """Where the consumer ``name`` keeps how far it is: in ``directory``, which a run at a broker elsewhere needs, or in
    the run's own; of a run at NATS, there. ``say`` is given what is waited for.

    Raises:
        ConfigurationError: a consumer of that name is at work.
        RunDirectoryError: the directory cannot be made or written.
        BrokerError: NATS does not answer.
    """
    if isinstance(found, RemoteRunInfo):
        if directory is not None:
            return StateFile(directory, name, found.name, found.attempt)
        from offloop.consumers.runner.state_bucket import StateBucket

        return StateBucket(found.broker, name, found.name, found.attempt, say)
    if isinstance(found, Recording):
        return StateFile(directory or found.path.parent / STATE_DIR, name, found.run_name, found.attempt)
    return StateFile(directory or found.path / STATE_DIR, name, found.name, found.last.number)
