"""The runs of a broker elsewhere, as the table of all runs has those of a folder."""

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from offloop.bus.errors import ConfigurationError, OffloopError
from offloop.bus.index.entry import RunEntry
from offloop.bus.net.requests import list_remote_runs
from offloop.consumers.dashboard.view.run_table import RunTable
from offloop.consumers.dashboard.web.places import RunsElsewhere

_LOOK_SECONDS = 2.0
_RESTS = 10
"""A broker that answers is asked no more than one part in so many of the time."""
_LEAVE_SECONDS = 1.0


class BrokerLibrary:
    """Every run that a broker lists, asked for again and again in a thread: what it tells without its recordings being
    read. Nothing can be said of them, because that lies in their folders."""

    def __init__(self, place: RunsElsewhere) -> None:
        self._place = place
        self._leaves = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="offloop-library", daemon=True)
        self._listed: dict[str, tuple[dict[str, Any], RunEntry]] = {}
        """What the broker told of each run last, and what was made of it."""
        self.table = RunTable({})
        """What is known at this moment; another one when something has changed."""
        self.waiting: int | None = None
        """Zero; ``None`` before the first answer."""
        self.problem: str | None = None
        """Why the broker cannot be asked."""

    def start(self) -> None:
        """Begins to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Ends it. A broker that is away is not waited for."""
        self._leaves.set()
        self._thread.join(_LEAVE_SECONDS)

    def look(self) -> None:
        """Asks once."""
        try:
            listed = list_remote_runs(self._place.address, self._place.security)
        except OffloopError as error:
            # What was known before stays.
            self.waiting, self.problem = 0, str(error)
            return
        known, self._listed = self._listed, {}
        for told in listed:
            name = told.get("run")
            if isinstance(name, str):
                before = known.get(name)
                with contextlib.suppress(msgspec.ValidationError):
                    self._listed[name] = before if before is not None and before[0] == told else (told, entry_of(told))
        entries = {name: entry for name, (_, entry) in self._listed.items()}
        if entries != self.table.entries:
            self.table = RunTable(entries, self.table)
        self.waiting, self.problem = 0, None

    def annotate(self, run: str, **_: Any) -> NoReturn:
        """Refuses: see :class:`BrokerLibrary`."""
        raise self._refusal(run)

    def remove(self, run: str) -> NoReturn:
        """Refuses."""
        raise self._refusal(run)

    def rename(self, run: str, name: str) -> NoReturn:
        """Refuses."""
        raise self._refusal(run)

    def _refusal(self, run: str) -> ConfigurationError:
        return ConfigurationError(
            f"run {run!r} is {self._place}, which gives runs to read: tag, rename and delete it on that machine, with "
            "'offloop ui' there"
        )

    def _follow(self) -> None:
        while not self._leaves.is_set():
            began = time.monotonic()
            self.look()
            # One that is away has no work with it.
            rest = 0.0 if self.problem is not None else _RESTS * (time.monotonic() - began)
            self._leaves.wait(max(_LOOK_SECONDS, rest))


def entry_of(told: Mapping[str, Any]) -> RunEntry:
    """What a broker tells of a run, see ``runs`` in ``docs/protocol.md``, as the index has it.

    Raises:
        msgspec.ValidationError: it is not in that form.
    """
    reached = told.get("reached")
    reached = reached if isinstance(reached, Mapping) else {}
    attempts = told.get("attempts")
    return msgspec.convert(
        {
            "run": told.get("run"),
            "id": told.get("id"),
            "status": told.get("status"),
            "error": told.get("error"),
            "reason": told.get("reason"),
            "started": told.get("started"),
            "ended": told.get("ended"),
            "attempts": len(attempts) if isinstance(attempts, list) else 1,
            **{name: reached.get(name) for name in ("epoch", "batch", "sample", "planned")},
            "size": 0,
            "tags": (),
            "note": "",
            "pinned": False,
            "archived": False,
            "hyperparameters": {},
            "metrics": {},
            "attempt": told.get("attempt"),
        },
        RunEntry,
    )
