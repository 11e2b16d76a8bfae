"""A subscriber's connection to a broker: event feed and lease."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from offloop.bus.net.channels import Channel, wait_readable
from offloop.bus.net.sockets import STREAM_QUEUE, connect_socket, in_use
from offloop.bus.protocol.frames import Control
from offloop.bus.protocol.order import StreamOrder

RENEW_SECONDS = 1.0
_CONFIRMATION_SECONDS = 30.0  # how long to poll often for the broker's answer to a message
_POLL_SECONDS = 0.05
_LINGER_SECONDS = 0.5


class LiveSubscription:
    """Connection to a broker's event feed, if it has an address, and by ``channel`` to its control endpoint.

    A thread renews the lease once a second, with demand and ``report``, so that a slow callback cannot let it expire.
    The same thread sends other messages at once, and passes answers to ``take``."""

    def __init__(
        self,
        feed: str | None,
        channel: Channel,
        order: StreamOrder,
        lease: dict[str, Any],
        report: Callable[[], dict[str, Any]],
        take: Callable[[Control], object],
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

        def subscribe(made: "zmq.Socket[bytes]") -> None:
            made.setsockopt(zmq.RCVHWM, STREAM_QUEUE)
            for topic in order.topics:
                made.subscribe(topic)

        try:
            self._feed = None if feed is None else connect_socket(self._context, zmq.SUB, feed, subscribe)
        except BaseException:
            channel.close()
            self._context.destroy(linger=0)
            raise
        self._channel = channel
        self._lease = {"run": order.run, **lease}
        self._report = report
        self._take = take
        self._queue: deque[tuple[str, dict[str, Any]]] = deque()
        self._is_stopped = False
        self._renew_at = 0.0
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="offloop-lease", daemon=True)
        self._thread.start()
        in_use.add(self)

    def receive(self) -> bytes | None:
        try:
            return None if self._feed is None else self._feed.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def wait(self, seconds: float) -> None:
        if self._feed is not None:
            self._feed.poll(int(seconds * 1000))

    async def wait_async(self, seconds: float) -> None:
        if self._feed is not None:
            await wait_readable(self._feed, seconds)

    def send(self, kind: str, content: dict[str, Any]) -> None:
        """Queue a message to the control endpoint, from any thread; messages are sent in order."""
        self._queue.append((kind, {"run": self._lease["run"], **content}))
        self._wake.set()

    def update_demand(self, lease: dict[str, Any]) -> None:
        """Send another demand now, and with all further renewals."""
        self._lease = {**self._lease, **lease}
        self._renew_at = 0.0
        self._wake.set()

    def _serve(self) -> None:
        awaited = 0.0
        while True:
            now = time.monotonic()
            lease: dict[str, Any] | None = None
            if now >= self._renew_at:
                self._renew_at = now + RENEW_SECONDS
                # The report of handled events must not overtake a message queued before it.
                lease = {**self._lease, **self._report()}
            while self._queue and self._channel.send(*self._queue[0]):
                self._queue.popleft()
                # Poll for the answer before the next renewal.
                awaited = now + _CONFIRMATION_SECONDS
            if lease is not None and not self._queue:
                # If the broker does not read now, the next renewal repeats this one.
                self._channel.send("lease", lease)
            while (answer := self._channel.receive()) is not None:
                self._take(answer)
            until_renewal = max(0.0, self._renew_at - time.monotonic())
            self._wake.wait(_POLL_SECONDS if now < awaited else until_renewal)
            self._wake.clear()
            if self._is_stopped:
                return

    def close(self) -> None:
        """Close the connection; the lease expires by itself. Queued messages are still sent, if the broker reads."""
        in_use.discard(self)
        self._is_stopped = True
        self._wake.set()
        self._thread.join()
        while self._queue and self._channel.send(*self._queue[0]):
            self._queue.popleft()
        self._channel.close(_LINGER_SECONDS)
        self._context.destroy(linger=0)
