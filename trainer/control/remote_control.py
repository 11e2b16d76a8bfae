"""Applies commands from outside, between two batches of the training loop.

publisher -> waiting -> a boundary of the loop -> applied, on every rank -> answered by the first one"""

import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from offloop.bus.errors import ConfigurationError, OffloopError
from offloop.bus.publisher.publisher import Publisher
from offloop.bus.types.commands import PROFILE, Command, Outcome
from offloop.bus.types.event import Event
from offloop.trainer.control.profiling import Profile
from offloop.trainer.control.settings import Settings
from offloop.trainer.distributed.ranks import Ranks
from offloop.trainer.engine.state import State

IDLE_SECONDS = 0.02
IDLE_SECONDS_OF_RANKS = 0.25
MAX_WAITING = 100

LATER = object()  # returned by checkpoint if the framework writes the file a little later
_AGAIN = object()  # returned while a command is to be applied at the next boundary, too


class RemoteControl:
    """Receives the commands of a training, and applies them at a boundary of the loop.

    With several ranks the first one receives them, and all apply the same ones at the same boundary. A command that
    fails changes nothing and does not end the training: its sender receives the error.

    Args:
        state: of the training.
        settings: the values of ``set``.
        ranks: all ranks, if there are several.
        say: shows a line in the training's output."""

    def __init__(
        self,
        state: State,
        settings: Settings,
        ranks: Ranks | None = None,
        say: Callable[[str], object] = str,
    ) -> None:
        self.waiting: list[Command] = []  # commands that have not been applied; the loop checks it after each batch
        self.checkpoint: Callable[[], object] | None = None
        """Called for the command ``checkpoint`` during a training.

        It may return the path of the file, or :data:`LATER` for a file that is yet to be written."""
        self._unwritten: list[tuple[Command, Event]] = []
        self._profile: Profile | None = None
        self._publisher: weakref.ref[Publisher] | None = None
        self._state = state
        self._settings = settings
        self._ranks = ranks
        self._say = say
        self._paused = False

    def answer_through(self, publisher: Publisher | None) -> None:
        # Weak, because the publisher refers to this object: a dropped trainer is freed at once.
        self._publisher = None if publisher is None else weakref.ref(publisher)

    def take(self, command: Command) -> None:
        """Receive a command, at any event."""
        if self._state.rank > 0:
            return
        if len(self.waiting) >= MAX_WAITING:
            self._answer(command, Event.BATCH_END, f"{MAX_WAITING} commands wait already: send it later")
            return
        self.waiting.append(command)

    @property
    def is_asked_to_stop(self) -> bool:
        return self._state.stop_requested or any(one.name == "stop" for one in self.waiting)

    def apply(self, event: Event) -> None:
        """Apply the pending commands. All ranks must call it at the same event."""
        while True:
            for command in self._take_waiting():
                self._apply(command, event)
            if not self._paused:
                return
            self._idle()

    def checkpoint_written(self, path: str | os.PathLike[str]) -> None:
        waiting, self._unwritten = self._unwritten, []
        for command, event in waiting:
            self._answer(command, event, done=_path_text(path))

    def reject_pending(self) -> None:
        """Reject the commands that are still pending when the training has finished."""
        self.end_profile()
        waiting, self._unwritten = self._unwritten, []
        for command, event in waiting:
            self._answer(command, event, "the training finished before the checkpoint was written")
        rest = [*self.waiting]
        self.waiting.clear()
        for command in rest:
            # A finished training has stopped, too.
            error = None if command.name == "stop" else "the training has finished"
            self._answer(command, Event.FIT_END, error)

    def apply_stops(self, event: Event) -> None:
        """Apply the pending stops, within a batch or an evaluation. All ranks must call it at the same event."""
        if self.waiting or self._ranks is not None:
            for command in self._take_waiting(stops_only=True):
                self._apply(command, event)

    def _take_waiting(self, stops_only: bool = False) -> list[Command]:
        commands = [one for one in self.waiting if one.name == "stop" or not stops_only]
        taken = set(map(id, commands))
        self.waiting[:] = [one for one in self.waiting if id(one) not in taken]
        if self._ranks is not None:
            commands = [Command.from_wire(one) for one in self._ranks.share([one.to_wire() for one in commands])]
        return commands

    def _apply(self, command: Command, event: Event) -> None:
        error = done = None
        try:
            done = self._do(command)
        except OffloopError as trouble:
            error = str(trouble)
        # A user's setting may raise anything, and must not end the training.
        except Exception as trouble:  # noqa: BLE001
            error = f"{type(trouble).__name__}: {trouble}"
        if done is _AGAIN:
            if self._state.rank == 0:
                self.waiting.append(command)
        elif done is LATER:
            self._unwritten.append((command, event))
        else:
            self._answer(command, event, error, _path_text(done))

    def _answer(self, command: Command, event: Event, error: str | None = None, done: str | None = None) -> None:
        self._say(Outcome(command, event.value, self._state.timestamp.values.batch, error, done=done).with_reason)
        publisher = None if self._publisher is None else self._publisher()
        if publisher is not None and self._state.rank == 0:
            publisher.answer(command, event, self._state.timestamp.values, error, done)

    def _do(self, command: Command) -> object:
        if command.name == "stop":
            if not self._state.fitting:
                raise ConfigurationError("the training has finished")
            self._paused = False
            self._state.stop_now(command.reason or "command 'stop'")
        elif command.name == "pause":
            if self._paused:
                raise ConfigurationError("the training is paused already")
            self._paused = True
        elif command.name == "resume":
            if not self._paused:
                raise ConfigurationError("the training is not paused")
            self._paused = False
        elif command.name == "checkpoint":
            if self.checkpoint is None:
                raise ConfigurationError("no training is running")
            return self.checkpoint()
        elif command.name == PROFILE:
            return self._profile_batches(command)
        elif command.name == "set":
            self._settings.apply(self._state, *command.arguments)
        else:
            raise ConfigurationError(f"command {command.name!r} is unknown to this training: update its offloop")
        return None

    def _profile_batches(self, command: Command) -> object:
        """Begin a profile, or continue it at the end of a batch. All ranks know its end, and report to each other."""
        profile, batch = self._profile, self._state.timestamp.values.batch
        publisher = None if self._publisher is None else self._publisher()
        if publisher is None or not self._state.fitting:
            raise ConfigurationError("no training is running")
        if profile is None:
            profile = self._profile = Profile(command, batch, self._state.world_size)
            try:
                self._each(lambda: profile.begin(publisher, self._state.rank), profile.ranks)
            except OffloopError:
                self.end_profile()
                raise
        elif profile.id != command.id:
            raise ConfigurationError(f"a profile is being made, until batch {profile.until}: send it later")
        elif batch < profile.until:
            profile.batch_end(batch)
        else:
            self._profile = None
            return [path for path in self._each(profile.write, profile.ranks) if path]
        return _AGAIN

    def _each(self, do: Callable[[], object], among: Sequence[int]) -> list[Any]:
        return [do()] if self._ranks is None else self._ranks.each(do, among)

    def end_profile(self) -> None:
        """End a running profile without a result."""
        profile, self._profile = self._profile, None
        if profile is not None:
            try:
                profile.end()
            except OffloopError as error:
                self._say(str(error))

    def _idle(self) -> None:
        stop = self._state.stop_requested
        if self._ranks is not None:
            stop = self._ranks.agree(0, stop)[1]
        if stop:
            self._paused = False
            return
        time.sleep(IDLE_SECONDS if self._ranks is None else IDLE_SECONDS_OF_RANKS)
        publisher = None if self._publisher is None else self._publisher()
        if publisher is not None:
            publisher.poll()


def _path_text(path: object) -> str | None:
    if isinstance(path, list):
        return ", ".join(path)
    if not isinstance(path, str | os.PathLike) or not os.path.exists(path):
        return None
    return os.path.abspath(os.fsdecode(path)).encode(errors="backslashreplace").decode()
