"""The runs in NATS servers, as :class:`~offloop.bus.index.index.RunIndex` has those of a folder."""

from collections.abc import Mapping
from typing import Any

from offloop.bus.errors import OffloopError
from offloop.bus.index.entry import RunEntry, listed_entry
from offloop.bus.net.requests import list_stream_runs


class StreamIndex:
    """Every run that the servers list: what is said of it without its recording being read."""

    problem: str | None = None
    """Why the servers cannot be asked."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._listed: dict[str, tuple[dict[str, Any], RunEntry]] = {}
        """What was said of each run last, and what was made of it."""

    @property
    def entries(self) -> Mapping[str, RunEntry]:
        """The runs by name, as they were last listed."""
        return {name: entry for name, (_, entry) in self._listed.items()}

    def refresh(self, seconds: float) -> int:
        """Lists them; returns how many have yet to be read, which is none."""
        try:
            listed = list_stream_runs(self._address)
        except OffloopError as error:
            # What was known before stays.
            self.problem = str(error)
            return 0
        known, self._listed, self.problem = self._listed, {}, None
        for said in listed:
            before = known.get(said["run"])
            same = before if before is not None and before[0] == said else (said, listed_entry(said))
            self._listed[said["run"]] = same
        return 0

    def close(self) -> None:
        """Nothing to do: the connection is the command's."""
