"""Commands in terminals of their own."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
from collections.abc import Mapping

import pyte
from helpers import wait_for


class Terminal:
    """A command in a terminal of its own, and what that shows."""

    def __init__(
        self, *command: str, columns: int = 80, lines: int = 24, environment: Mapping[str, str] | None = None
    ) -> None:
        self._master, slave = pty.openpty()
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.written = b""
        """Everything that was written to the terminal."""
        self.resize(columns, lines)
        self.settings = termios.tcgetattr(self._master)
        self.process = subprocess.Popen(
            # With the terminal as the one that controls it, Ctrl-C and Ctrl-Z reach it as from a keyboard.
            ["setsid", "--ctty", *command],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm-256color", **(environment or {})},
        )
        os.close(slave)

    def resize(self, columns: int, lines: int) -> None:
        """Gives the terminal another size."""
        self.screen.resize(lines, columns)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        """Types."""
        os.write(self._master, keys.encode())

    @property
    def text(self) -> str:
        """What is on the screen, and everything that was written up to now taken in."""
        while select.select([self._master], [], [], 0)[0]:
            try:
                data = os.read(self._master, 65536)
            except OSError:  # the other end is closed
                break
            self.written += data
            self._stream.feed(data)
        return "\n".join(self.screen.display)

    def wait_for(self, *texts: str, timeout: float = 100.0) -> str:
        """Waits until all of the texts are on the screen."""
        try:
            wait_for(lambda: all(text in self.text for text in texts), f"{texts} on the screen", timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text}") from None
        return self.text

    def wait_for_end(self) -> int:
        """Waits until the command is over; its exit code."""
        wait_for(lambda: (self.text, self.process.poll())[1] is not None, "the command's end")
        return self.process.returncode

    @property
    def is_restored(self) -> bool:
        """Whether the terminal is as it was before: the usual screen, a cursor, lines that are echoed."""
        entered, left = self.written.rfind(b"\x1b[?1049h"), self.written.rfind(b"\x1b[?1049l")
        shown = self.written.rfind(b"\x1b[?25h") > self.written.rfind(b"\x1b[?25l")
        return left > entered >= 0 and shown and termios.tcgetattr(self._master) == self.settings

    def output_after(self) -> str:
        """What was written after the terminal was given back."""
        return self.written.rpartition(b"\x1b[?1049l")[2].decode()

    def hang_up(self) -> None:
        """Takes the terminal away."""
        os.close(self._master)
        self._master = -1

    def close(self) -> None:
        """Ends it whatever it does."""
        self.process.kill()
        self.process.wait()
        if self._master >= 0:
            os.close(self._master)
