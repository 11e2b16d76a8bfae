"""A question to a broker, and its answer."""

import os
import time
from collections.abc import Mapping
from typing import Any

import zmq

from offloop.bus.errors import BrokerError, ProtocolError
from offloop.bus.net.curve import ClientSecurity, client_security_for
from offloop.bus.net.sockets import connect_socket, is_stand_in
from offloop.bus.protocol.frames import Control, decode_control, encode_control, split_frame
from offloop.bus.protocol.listed_runs import listed_run
from offloop.bus.types.timeouts import Timeouts


def ask_broker(
    address: str,
    kind: str,
    content: dict[str, Any],
    security: ClientSecurity | None = None,
    timeouts: Timeouts | None = None,
) -> dict[str, Any]:
    """One question to a broker, and its answer.

    ``security`` holds the keys for it, by default those that the environment names.

    Raises:
        BrokerError: no broker answers, or the broker refuses.
    """
    security, timeouts = security or client_security_for(address), timeouts or Timeouts.default
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        socket = connect_socket(context, zmq.DEALER, address, security, timeouts=timeouts)
        answer = request(socket, kind, content, patience_with(address, timeouts) if kind == "runs" else timeouts.answer)
    finally:
        context.destroy(linger=0)
    if answer is None and is_stand_in(address):
        raise no_servers_answer(address)
    if answer is None:
        raise BrokerError(
            f"the broker at {address} does not answer: it may be busy or gone, {_keys_hint(security)}", address=address
        )
    return answer


def patience_with(address: str, timeouts: Timeouts) -> float:
    """For how many seconds the answer to a first question is waited for."""
    # Servers behind a stand-in may be choosing a leader just now.
    return timeouts.answer * (5 if is_stand_in(address) else 1)


def no_servers_answer(address: str) -> BrokerError:
    """What is said where servers behind a stand-in do not answer."""
    return BrokerError(
        f"NATS at {address} does not answer: see whether its servers run and have JetStream", address=address
    )


class RequestClient:
    """One connection to a broker for several questions, each asked when the one before is answered.

    ``security`` holds the keys for it, by default those that the environment names."""

    def __init__(self, address: str, security: ClientSecurity | None = None, timeouts: Timeouts | None = None) -> None:
        self._address = address
        self._timeouts = timeouts or Timeouts.default
        security = security or client_security_for(address)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._socket = connect_socket(self._context, zmq.DEALER, address, security, timeouts=self._timeouts)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def __call__(self, kind: str, content: dict[str, Any]) -> dict[str, Any]:
        """The answer to a question. Raises :class:`offloop.bus.errors.BrokerError` when no broker answers, or it
        refuses."""
        answer = request(self._socket, kind, content, self._timeouts.answer)
        if answer is None:
            raise BrokerError(
                f"the broker at {self._address} does not answer: it may be busy or gone", address=self._address
            )
        return answer

    def close(self) -> None:
        """Ends the connection."""
        self._context.destroy(linger=0)


def list_remote_runs(
    address: str, security: ClientSecurity | None = None, name: str | None = None
) -> list[dict[str, Any]]:
    """The runs that a broker has, as ``docs/protocol.md`` describes them, the newest first; with ``name`` that one.

    Raises:
        BrokerError: no broker answers, or the broker refuses.
    """
    listed = ask_broker(address, "runs", {"run": name}, security).get("runs")
    return _listed(listed)


def list_remote_hosts(address: str, run: str) -> list[dict[str, Any]]:
    """What each host of a run that is read from a stream says of it, in the order of their ranks: as
    :func:`list_remote_runs`, with ``host`` and ``ranks``.

    Raises:
        BrokerError: the servers do not answer.
    """
    hosts = _listed(ask_broker(address, "runs", {"run": run, "host": "*"}).get("runs"))
    newest = max((one["attempt"] for one in hosts), default=0)
    return sorted((one for one in hosts if one["attempt"] == newest), key=lambda one: one["ranks"])


def _listed(listed: object) -> list[dict[str, Any]]:
    """Those of a list that are runs."""
    runs = (listed_run(one) for one in (listed if isinstance(listed, list) else ()))
    return [run for run in runs if run is not None]


def is_silent(listed: Mapping[str, Any]) -> bool:
    """Whether a run that is read from a stream may continue on its host, whose bridge says nothing."""
    return listed.get("status") in ("live", "paused") and not listed.get("live")


def request(socket: "zmq.Socket[bytes]", kind: str, content: dict[str, Any], patience: float) -> dict[str, Any] | None:
    """Asks at a connection and waits so many seconds for the answer, ``None`` when none comes. The answer has the
    ``id`` of ``content``, or one made here.

    Raises :class:`offloop.bus.errors.BrokerError` when the broker refuses."""
    asked = content.get("id") or os.urandom(8).hex()
    _send(socket, kind, {**content, "id": asked})
    deadline = time.monotonic() + patience
    while socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
        answer = next_answer(socket)
        if answer is None or answer.content.get("id") != asked:
            continue
        if answer.kind == "refused":
            raise BrokerError(str(answer.content.get("reason", "the broker refused without a reason")))
        return answer.content
    return None


def _keys_hint(security: ClientSecurity | None) -> str:
    """A broker does not answer unauthenticated peers, so it looks the same as none."""
    if security is None:
        return "or it takes keys: '--key' and '--broker-key'"
    return "or it does not know your key, or has another one than '--broker-key' says"


def _send(socket: "zmq.Socket[bytes]", kind: str, content: dict[str, Any]) -> None:
    try:
        socket.send(encode_control(kind, content), zmq.NOBLOCK)
    except zmq.Again:
        return  # it is asked again


def next_answer(socket: "zmq.Socket[bytes]") -> Control | None:
    """The next control message of a connection, if there is one now."""
    while True:
        try:
            topic, body = split_frame(socket.recv(zmq.NOBLOCK))
            if topic is None:
                return decode_control(body)
        except zmq.Again:
            return None
        except ProtocolError:
            continue
