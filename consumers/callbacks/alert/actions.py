"""Actions for an alert: show it, send it to a web address, give it to a command."""

import http.client
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from offloop.bus.errors import ConfigurationError
from offloop.bus.printing import say
from offloop.bus.strict_json import plain

ATTEMPTS = 3
PAUSE_SECONDS = 1.0
"""Between the first attempt and the second one; twice that before the third."""


class Notice(NamedTuple):
    """That a rule has begun to hold for long enough, or no longer holds."""

    id: str
    """The same whenever the same events are handled: who gets a notice twice can tell."""
    status: Literal["firing", "resolved"]
    rule: str
    metric: str
    value: float
    run: str
    attempt: int
    epoch: int
    batch: int
    time: float
    """Time of the event: seconds since 1970, UTC."""

    def as_json(self) -> bytes:
        """A JSON object of all of it; a value that JSON has no number for is a text: ``NaN``, ``Infinity`` or
        ``-Infinity``."""
        return json.dumps(plain(self._asdict())).encode()

    def __str__(self) -> str:
        what = "ALERT" if self.status == "firing" else "resolved"
        where = f"run {self.run}, epoch {self.epoch}, batch {self.batch}"
        return f"{what}: {self.rule} ({self.metric} is {self.value:g}; {where})"


Action: TypeAlias = Callable[[Notice], None]
"""Receives a notice."""


def show(notice: Notice) -> None:
    """Writes a line on standard error."""
    say(str(notice), err=True)


class Webhook:
    """POSTs notices as JSON to a web address, up to three times each."""

    def __init__(self, url: str, timeout: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"webhook {url!r} is no web address: use one that begins with https:// or http://")
        self._url = url
        self._name = f"webhook {parts.scheme}://{parts.hostname}"
        self._timeout = timeout

    def __call__(self, notice: Notice) -> None:
        """Sends a notice; says on standard error if it could not."""
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(PAUSE_SECONDS * attempt)
            problem, is_final = self._post(notice)
            if problem is None:
                return
            if is_final:
                break
        # The address itself may be a secret.
        _say_failure(self._name, notice, str(problem))

    def _post(self, notice: Notice) -> tuple[str | None, bool]:
        """The problem, and whether a further attempt is useless."""
        headers = {"Content-Type": "application/json", "User-Agent": "offloop"}
        request = urllib.request.Request(self._url, notice.as_json(), headers, method="POST")
        try:
            with _OPENER.open(request, timeout=self._timeout):
                return None, False
        except urllib.error.HTTPError as error:
            error.close()
            return f"it answered {error.code} {error.reason}", error.code < 500 and error.code not in (408, 429)
        except http.client.InvalidURL as error:
            return str(error), True
        except (OSError, ValueError, http.client.HTTPException) as error:
            return str(getattr(error, "reason", error)) or type(error).__name__, False


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    # urllib would follow with a GET, which tells nobody anything.
    def redirect_request(self, *arguments: Any, **more: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


class NoticeProgram:
    """Runs a program for each notice, which finds it as JSON on its standard input and in environment variables.

    Raises :class:`offloop.bus.errors.ConfigurationError` for a program that is not there."""

    def __init__(self, arguments: Sequence[str], timeout: float) -> None:
        if not arguments:
            raise ConfigurationError("command is empty: give a program and its arguments, such as notify-send,Training")
        if shutil.which(arguments[0]) is None:
            raise ConfigurationError(
                f"command {arguments[0]!r} is no program that can be run here: give its whole path, or install it"
            )
        self._arguments = list(arguments)
        self._timeout = timeout

    def __call__(self, notice: Notice) -> None:
        """Runs the program; says on standard error if it could not, or failed, or took too long."""
        name = f"command {self._arguments[0]}"
        environment = {f"ALERT_{field.upper()}": str(value) for field, value in notice._asdict().items()}
        try:
            process = subprocess.Popen(
                self._arguments,
                stdin=subprocess.PIPE,
                stdout=2,
                env=os.environ | environment,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            _say_failure(name, notice, str(error))
            return
        with process:
            try:
                process.communicate(notice.as_json(), timeout=self._timeout)
            except subprocess.TimeoutExpired:
                # With everything that it started.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                _say_failure(name, notice, f"it took more than {self._timeout:g} s and was killed")
                return
        if process.returncode:
            _say_failure(name, notice, f"exit code {process.returncode}")


def _say_failure(name: str, notice: Notice, problem: str) -> None:
    say(f"{name} did not take the notice of {notice.rule!r} ({notice.status}): {problem}", err=True)
