"""Of what a served recording is a replay."""

from collections.abc import Mapping
from typing import Any, NamedTuple

_KEY = "replay_of"


class Origin(NamedTuple):
    """The attempt that was recorded, and the recording, of a run that ``bus replay`` serves. It stands among what a
    publisher says of itself, and so in the ``run.json`` of the served run."""

    run: str
    attempt: int
    path: str
    """The recording, on the machine that served it."""

    def info(self) -> dict[str, Any]:
        """What the publishers of the served run say of themselves."""
        return {_KEY: self._asdict()}

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> "Origin | None":
        """Reads it from a publisher's ``info``; ``None`` if that is not a replay."""
        origin = info.get(_KEY)
        if not isinstance(origin, Mapping) or not all(name in origin for name in cls._fields):
            return None
        return cls(str(origin["run"]), int(origin["attempt"]), str(origin["path"]))

    def __str__(self) -> str:
        return f"run {self.run}, attempt {self.attempt} ({self.path})"
