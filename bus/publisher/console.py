"""The training's side of captured console output: what is captured is written to a pipe, which the broker reads."""

import contextlib
import faulthandler
import fcntl
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offloop.bus.redaction import redact
from offloop.bus.runs.console import open_pipe

_PIPE_BYTES = 1024 * 1024


class ConsoleCapture:
    """Writes the traceback that ends the run into a rank's pipe, and all that Python prints if ``streams`` is true.

    Nothing waits. The streams stay the same objects, of which :meth:`write` is replaced: file descriptors, ``isatty``
    and buffers do not change, and loggers that hold a stream are captured too. A full pipe drops output, whose size is
    written when there is space. The traceback of a crash (``faulthandler``) goes there unless the program has enabled
    it itself."""

    def __init__(self, path: Path, *, streams: bool) -> None:
        self.has_streams = streams
        self._pipe = open_pipe(path)
        if streams:
            # The system bounds the pipes of all of a user's processes together.
            with contextlib.suppress(OSError, AttributeError):
                fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._dropped = 0
        self._replaced: list[tuple[Any, Any, Any]] = []
        for stream in {id(one): one for one in (sys.stdout, sys.stderr) if streams}.values():
            with contextlib.suppress(AttributeError, TypeError):  # no stream, or none whose method can be replaced
                earlier, tee = vars(stream).get("write"), self._tee(stream.write)
                stream.write = tee  # type: ignore[method-assign]
                self._replaced.append((stream, tee, earlier))
        self._has_faults = not faulthandler.is_enabled()
        if self._has_faults:
            faulthandler.enable(self._pipe)

    def _tee(self, write: Callable[[str], int]) -> Callable[[str], int]:
        def tee(text: str) -> int:
            count = write(text)
            self._put(text)
            return count

        return tee

    def _put(self, text: str) -> None:
        if self._pipe < 0:
            return
        data, note = text.encode("utf-8", "backslashreplace"), b""
        if self._dropped:
            note = f"\n[{self._dropped:,} bytes of output were not captured]\n".encode()
        try:
            written = os.write(self._pipe, note + data)
        except OSError:  # it is full
            written = 0
        is_noted = written >= len(note)
        self._dropped = len(note) + len(data) - written if is_noted else self._dropped + len(data)

    def end(self, error: BaseException | None = None) -> None:
        """Restore the streams. An error's traceback, which Python prints later, is captured before."""
        if self._has_faults:
            self._has_faults = False
            faulthandler.disable()
        for stream, tee, earlier in self._replaced:
            # Another program may have replaced the method since then, and calls ours.
            if vars(stream).get("write") is tee:
                del stream.write
                if earlier is not None:
                    stream.write = earlier
        self._replaced.clear()
        if error is not None:
            self._put(redact("".join(traceback.format_exception(error))))

    def close(self) -> None:
        """Restore the streams, and close the pipe."""
        self.end()
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)
