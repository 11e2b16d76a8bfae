"""Progress of a named consumer on runs in NATS: on the servers."""

from collections.abc import Callable

from offloop.bus.errors import BrokerError, RunDirectoryError
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.jetstream.positions import HeldPosition
from offloop.consumers.runner.state_file import StateStore


class StateBucket(StateStore):
    """A store in a key-value bucket of the servers at ``address``, which this process reads from, for any machine.
    ``say`` is given what the user waits for.

    Raises:
        ConfigurationError: the name is not allowed, or a consumer of that name is at work.
        BrokerError: the servers do not answer, or this process has no connection to them.
    """

    def __init__(
        self, address: str, name: str, run_name: str, attempt: int, say: Callable[[str], None] = print
    ) -> None:
        super().__init__(name, run_name, attempt, f"the bucket of {address}")
        self._position = HeldPosition(NatsConnection.at(address), run_name, name, attempt, say)

    def _read(self) -> bytes | None:
        return self._position.found or None

    def _write(self, packed: bytes) -> None:
        try:
            self._position.write(packed)
        except BrokerError as error:
            raise RunDirectoryError(f"the state of consumer {self.name!r} cannot be kept: {error}") from None

    def close(self) -> None:
        self._position.close()
