"""The marks in the charts of a run: commands, checkpoints, evaluations, and starts of attempts."""

from dataclasses import dataclass, field
from typing import NamedTuple

from offloop.bus.types.commands import COMMANDS

MOST_OF_A_KIND = 256  # of more marks of a kind, every second one is removed, repeatedly

EVALUATION, CHECKPOINT, ATTEMPT, COMMAND = "evaluation", "checkpoint", "attempt", "command"
"""Kinds beside the names of commands; the last one is for unknown commands."""

_LONGEST = 300


class Mark(NamedTuple):
    number: int  # counts the marks of a run from 1
    kind: str  # A command's name, command, checkpoint, evaluation or attempt
    batch: int  # number of trained batches
    time: float  # seconds since 1970, UTC
    text: str


class PlacedMark(NamedTuple):
    mark: Mark
    sample: float
    epoch: float
    seconds: float  # since the run's start


class Placed(NamedTuple):
    generation: object  # changes when earlier marks are removed or move: the caller requests all again
    marks: list[PlacedMark]


@dataclass
class _Kind:
    marks: list[Mark] = field(default_factory=list)
    count: int = 0
    stride: int = 1


class Marks:
    def __init__(self) -> None:
        self.generation: int = 0  # grows when marks are removed
        self._kinds: dict[str, _Kind] = {}
        self._count = 0

    def add(self, kind: str, batch: int, time: float, text: str) -> None:
        if kind not in (EVALUATION, CHECKPOINT, ATTEMPT, *COMMANDS):
            kind = COMMAND
        known = self._kinds.setdefault(kind, _Kind())
        known.count += 1
        if (known.count - 1) % known.stride:
            return
        self._count += 1
        known.marks.append(Mark(self._count, kind, batch, time, " ".join(text.split())[:_LONGEST]))
        if len(known.marks) > MOST_OF_A_KIND:
            known.marks = known.marks[::2]
            known.stride *= 2
            self.generation += 1

    def after(self, number: int) -> list[Mark]:
        return sorted(mark for known in self._kinds.values() for mark in known.marks if mark.number > number)
