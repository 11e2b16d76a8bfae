"""Applies commands from outside, between two batches of the training loop.

publisher -> waiting -> a boundary of the loop -> applied, on every rank -> answered by the first one"""

import os
import time
import weakref
from collections.abc import Callable

from offloop.bus.errors import ConfigurationError, OffloopError
from offloop.bus.publisher.publisher import Publisher
from offloop.bus.types.commands import Command, Outcome
from offloop.bus.types.event import Event
from offloop.trainer.control.settings import Settings
from offloop.trainer.distributed.ranks import Ranks
from offloop.trainer.engine.state import State

IDLE_SECONDS = 0.02
IDLE_SECONDS_OF_RANKS = 0.25
MAX_WAITING = 100

LATER = object()  # returned by checkpoint if the framework writes the file a little later


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
        if done is LATER:
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
        elif command.name == "set":
            self._settings.apply(self._state, *command.arguments)
        else:
            raise ConfigurationError(f"command {command.name!r} is unknown to this training: update its offloop")
        return None

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
    if not isinstance(path, str | os.PathLike) or not os.path.exists(path):
        return None
    return os.path.abspath(os.fsdecode(path)).encode(errors="backslashreplace").decode()
