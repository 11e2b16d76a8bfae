"""Who is let in at a broker that takes keys, and what each may do there."""

from collections.abc import Sequence

import zmq

from offloop.bus.net.curve import CONTROL, ROLE_NEEDED, STREAM, Gatekeeper
from offloop.bus.net.handshakes import FailedHandshakes


class ForbiddenError(Exception):
    """A key asked for something that it may not have."""


class Admission:
    """Asks ``gatekeeper`` what the keys of messages may do, and logs those who come to ``control`` and
    ``stream`` with no key at all.

    It lives in the broker's poll loop: poll :attr:`sockets`, call :meth:`handle` after each poll and :meth:`refresh`
    about twice a second.
    """

    def __init__(self, gatekeeper: Gatekeeper, control: "zmq.Socket[bytes]", stream: "zmq.Socket[bytes]") -> None:
        self._gatekeeper = gatekeeper
        self._handshakes = FailedHandshakes({CONTROL: control, STREAM: stream})
        self._granted: dict[tuple[str, str], bool] = {}

    @property
    def sockets(self) -> "Sequence[zmq.Socket[bytes]]":
        """What to poll."""
        return [self._gatekeeper.socket, *self._handshakes.sockets]

    def handle(self) -> None:
        """Answers and takes what waits, without waiting for more."""
        self._gatekeeper.handle()
        self._handshakes.handle()

    def check(self, message: zmq.Frame, kind: str) -> None:
        """Whether the key that a message came with may send one of that kind.

        Raises:
            ForbiddenError: it may not; the text says what would let it.
        """
        role = ROLE_NEEDED.get(kind, "publish")
        if not self.may(message, role):
            raise ForbiddenError(
                f"{self._gatekeeper.name_of(str(message.get('User-Id')))} may not {role} here: "
                f"on the broker's machine 'offloop server allow KEYFILE --role {role}' would let it"
            )

    def may(self, message: zmq.Frame, role: str) -> bool:
        """Whether the key that a message came with has a role."""
        key = str(message.get("User-Id"))
        granted = self._granted.get((key, role))
        if granted is None:
            granted = self._granted[key, role] = self._gatekeeper.may(key, role)
        return granted

    def refresh(self) -> None:
        """Sums up in the log who was not let in, and asks about every key again: the list may have changed."""
        self._gatekeeper.sum_up()
        self._handshakes.sum_up()
        self._granted.clear()

    def close(self) -> None:
        """Stops watching the sockets; to be called before they are closed."""
        self._handshakes.close()
