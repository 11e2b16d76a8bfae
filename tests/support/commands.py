"""Commands in the test's own process."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest


class Outcome(NamedTuple):
    """The exit code, and what was written to standard output and standard error."""

    code: Any
    out: str
    err: str


Run = Callable[..., Outcome]


def command(name: str, main: Callable[[], object], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Run:
    """Runs ``main`` with arguments as the command of that name has them, until it exits."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return Outcome(ended.value.code, *capsys.readouterr())

    return run
