"""Connections that fail before a key was seen: who they come from, for the log."""

import contextlib
import logging
import os
import socket
from collections import deque

import zmq
from zmq.utils.monitor import parse_monitor_message

_log = logging.getLogger("offloop.broker")

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_NAMED = 5
_RECENT = 5
_BURST = 1000


class FailedHandshakes:
    """Watches sockets that take keys for peers that come with none, or take the broker for another one.

    ZeroMQ reports a failed handshake, but not whose it was; so the log names the peers that connected last."""

    def __init__(self, watched: "dict[str, zmq.Socket[bytes]]") -> None:
        self._watched = watched
        self._monitors = {watched[name].get_monitor_socket(_FAILED | zmq.EVENT_ACCEPTED): name for name in watched}
        self._peers: deque[str] = deque(maxlen=_RECENT)
        self._failed = 0

    @property
    def sockets(self) -> "list[zmq.Socket[bytes]]":
        """What to poll."""
        return list(self._monitors)

    def handle(self) -> None:
        """Takes what has been reported, without waiting for more."""
        for monitor, name in self._monitors.items():
            for _ in range(_BURST):
                try:
                    event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
                except zmq.Again:
                    break
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self._note_peer(event["value"])
                else:
                    self._note_failure(name)

    def _note_peer(self, descriptor: int) -> None:
        # It may have been closed since.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            peer = connection.getpeername()[0]
            if peer not in self._peers:
                self._peers.append(peer)

    def _note_failure(self, name: str) -> None:
        self._failed += 1
        # A log that cannot be written as fast as peers connect would delay all others.
        if self._failed <= _NAMED:
            _log.warning(
                "a connection to the %s came without a key, or with another broker's, and was refused; "
                "the last to connect: %s",
                *(name, ", ".join(self._peers) or "unknown"),
            )

    def sum_up(self) -> None:
        """Logs how many failed beyond those that it named."""
        if self._failed > _NAMED:
            _log.warning("refused %d more connections without a key", self._failed - _NAMED)
        self._failed = 0

    def close(self) -> None:
        """Ends the watch, before the sockets are closed."""
        for watched in self._watched.values():
            watched.disable_monitor()
