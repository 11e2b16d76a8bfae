"""The user's values that cannot be published: they are named and counted, and end nothing."""

import logging

_log = logging.getLogger("offloop")
_NAMED = 20


class LeftOut:
    """The values of a run that were not published: the first of each name is logged, and :meth:`report` counts them."""

    def __init__(self, run_name: str) -> None:
        self.count = 0
        """Values that were left out."""
        self._run_name = run_name
        self._names: dict[str, None] = {}

    def add(self, name: object, reason: object) -> None:
        """Counts a value that is left out."""
        self.count += 1
        shown = _as_text(name)[:100]
        if shown not in self._names and len(self._names) < _NAMED:
            self._names[shown] = None
            _log.warning(
                "run %s: %s is left out, all else is published: %s", self._run_name, shown, _as_text(reason)[:500]
            )

    def report(self) -> None:
        """Logs the number of values left out, unless each of them has been named."""
        if self.count > len(self._names):
            names = ", ".join(self._names)
            _log.warning("run %s: %d values were left out, among them of %s", self._run_name, self.count, names)


def _as_text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001  its methods may raise anything
        return f"a {type(value).__name__} that cannot be shown"
