"""Stacks of a run's ranks, and the places where they are: why a training hangs."""

import ctypes
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from offloop.bus import processes
from offloop.bus.broker.rank import LiveRank
from offloop.bus.files import atomic_replace
from offloop.bus.tensors.shared_memory import open_memory

ANSWER_SECONDS = 3.0  # longest wait for a rank's stacks
NATIVE_SECONDS = 20.0  # longest wait for the native frames of all ranks

_POLL_SECONDS = 0.1
_MOST_BYTES = 4 << 20
_MOST_PLACES = 6
_FRAME = re.compile(r'  File "(.*)", line (\S+) in (.*)')
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_OWN = str(Path(__file__).parents[2]) + os.sep
_PLURALS = {"waits": "wait", "is": "are", "has": "have", "does": "do"}
_STATES = {"D": ": it waits for a disk or another device", "T": ": it is stopped"}


class Frame(NamedTuple):
    """A call in a stack."""

    file: str
    line: str
    function: str

    @property
    def is_public(self) -> bool:
        """Whether the function's name is a public one."""
        return not self.function.startswith("_") or self.function.endswith("__")

    @property
    def is_own(self) -> bool:
        """Whether the code is offloop's."""
        return self.file.startswith(_OWN)

    @property
    def is_users(self) -> bool:
        """Whether the code is the user's: neither installed, nor Python's, nor offloop's."""
        packages = (f"{os.sep}{one}-packages{os.sep}" for one in ("site", "dist"))
        is_installed = any(one in self.file for one in packages) or self.file.startswith(_STANDARD_LIBRARY)
        return not (is_installed or self.is_own or self.file.startswith("<frozen"))


def write_stacks(path: Path, head: str, detail: str, ranks: Iterable[LiveRank]) -> str:
    """Write the stacks of these ranks; return the verdict, see :func:`verdict_of`.

    A rank that does not answer costs :data:`ANSWER_SECONDS`, all of them together."""
    asked = [_RankStacks(rank) for rank in sorted(ranks, key=lambda one: one.rank)]
    deadline = time.monotonic() + ANSWER_SECONDS
    while any(one.is_pending() for one in asked) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    for one in asked:
        one.finish()
    py_spy, deadline = shutil.which("py-spy"), time.monotonic() + NATIVE_SECONDS
    parts = [one.describe(py_spy, deadline) for one in asked]
    verdict = verdict_of({one.rank.rank: one.place for one in asked})
    if dumps := [one.nccl for one in asked if one.nccl is not None]:
        verdict += f"; NCCL records of torch: {', '.join(map(str, dumps))}"
    at = time.strftime("%Y-%m-%d %H:%M:%S %z")
    with atomic_replace(path) as draft:
        draft.write_text("\n".join([_plain(verdict), _plain(f"{head}, {at}: {detail}"), *parts]))
    return verdict


def verdict_of(places: Mapping[int, str]) -> str:
    """Group ranks by their places: ``ranks 0-11, 13 wait in all_reduce (a.py:4 in step); rank 12 is in load (b.py:2)``.

    A place is a verb in the singular and the rest."""
    groups: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        groups.setdefault(place, []).append(rank)
    ordered = sorted(groups.items(), key=lambda one: -len(one[1]))
    texts = []
    for place, ranks in ordered[:_MOST_PLACES]:
        verb, _, rest = place.partition(" ")
        is_one = len(ranks) == 1
        texts.append(f"rank{'' if is_one else 's'} {_ranges(ranks)} {verb if is_one else _PLURALS[verb]} {rest}")
    if left := ordered[_MOST_PLACES:]:
        texts.append(f"{sum(len(ranks) for _, ranks in left)} ranks are at {len(left)} other places")
    return "; ".join(texts)


def place_of(stack: list[Frame]) -> str:
    """Return where a stack is, innermost frame first: an open collective, or what the user's code has called."""
    users = [number for number, frame in enumerate(stack) if frame.is_users]
    own = [number for number, frame in enumerate(stack) if frame.is_own]
    at = (users or own or [len(stack) - 1])[0]
    frame, called = stack[at], stack[:at]
    collective = next((one for one in called if one.file.endswith(_COLLECTIVES) and one.is_public), None)
    place = f"{os.path.basename(frame.file)}:{frame.line}"
    if not called:
        return f"is in {frame.function} ({place})"
    name = (collective or next((one for one in reversed(called) if one.is_public), called[0])).function
    return f"{'is' if collective is None else 'waits'} in {name} ({place} in {frame.function})"


def _ranges(ranks: list[int]) -> str:
    """Return ascending numbers as text, such as ``0-3, 5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)


def _plain(text: str) -> str:
    return re.sub(r"[^\n\x20-\x7e]", "?", text)


class _RankStacks:
    """Stacks of one rank, requested by a signal when this is made."""

    def __init__(self, rank: LiveRank) -> None:
        self.rank = rank
        self.place = "has ended" if rank.ended else "has no stacks that this broker can read"
        self.nccl: Path | None = None
        self.text = ""
        self._descriptor = -1
        self._begin = self._size = 0
        self._is_pending = False
        if rank.pid is None or rank.stacks is None or rank.ended:
            return
        memory = rank.stacks
        with suppress(OSError):  # it has just ended
            self._descriptor = open_memory(rank.pid, memory.fd, memory.token)
            is_same = os.pread(self._descriptor, len(memory.token), 0) == memory.token
            self._begin = os.fstat(self._descriptor).st_size
            # Without its handler the signal would end the process.
            if is_same and processes.is_running(rank.pid, rank.started) and processes.catches(rank.pid, memory.signal):
                self.nccl = _request_nccl(rank.rank, *memory.nccl)
                self._is_pending = not ctypes.CDLL(None).tgkill(rank.pid, memory.thread, memory.signal)
                self.place = "has no thread that trains any more"

    def is_pending(self) -> bool:
        """Return whether the stacks are still incomplete."""
        if self._is_pending:
            before, self._size = self._size, os.fstat(self._descriptor).st_size
            self._is_pending = self._size != before or not self._stack()
        return self._is_pending

    def _stack(self) -> list[Frame]:
        """Read the newest stack, innermost frame first."""
        self.text = _plain(os.pread(self._descriptor, _MOST_BYTES, self._begin).decode("latin-1"))
        return [Frame(*found) for found in _FRAME.findall(self.text.rpartition("Stack (most recent")[2])]

    def finish(self) -> None:
        """Set :attr:`place`, and free the memory."""
        if self._descriptor < 0:
            return
        if stack := self._stack():
            self.place = place_of(stack)
        elif not processes.is_running(self.rank.pid, self.rank.started):
            self.place = "has ended"
        elif self._is_pending and self.rank.pid is not None:
            state = processes.state(self.rank.pid)
            self.place = f"does not answer within {ANSWER_SECONDS:g} s{_STATES.get(state, '')}"
        os.close(self._descriptor)

    def describe(self, py_spy: str | None, deadline: float) -> str:
        """Return everything known; with ``py_spy``, if it can read the process before ``deadline``, all threads too."""
        text = f"\n== rank {self.rank.rank}, process {self.rank.pid} {self.place}\n\n{self.text}"
        if py_spy is not None and self.text and (left := deadline - time.monotonic()) > 0:
            command = [py_spy, "dump", "--native", "--pid", str(self.rank.pid)]
            with suppress(OSError, subprocess.TimeoutExpired):
                found = subprocess.run(command, capture_output=True, timeout=left, check=False)
                if not found.returncode:
                    text += f"\n-- all threads, by py-spy\n\n{_plain(found.stdout.decode('latin-1'))}"
        return text


def _request_nccl(rank: int, dump: str, pipe: str) -> Path | None:
    """Have torch write its record of NCCL's collectives; return its path if it exists, or was requested."""
    is_requested = False
    if pipe:
        with suppress(OSError):
            descriptor = os.open(f"{pipe}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                is_requested = stat.S_ISFIFO(os.fstat(descriptor).st_mode) and os.write(descriptor, b"1") == 1
            finally:
                os.close(descriptor)
    path = Path(f"{dump}{rank}")
    return path if dump and (is_requested or path.is_file()) else None
