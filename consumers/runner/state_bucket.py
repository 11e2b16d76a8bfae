"""Where a named consumer keeps its progress on runs that it reads from NATS: on the servers."""

from collections.abc import Callable
from types import TracebackType

from offloop.bus.errors import BrokerError, RunDirectoryError
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.jetstream.positions import HeldPosition
from offloop.consumers.delivery.commit import Committed
from offloop.consumers.runner.state_file import check_name, unpack_committed


class StateBucket:
    """What the consumer ``name`` of one attempt of a run has committed, in a key-value bucket of the servers at
    ``address``, which this process reads from: as :class:`~offloop.consumers.runner.state_file.StateFile`, from any
    machine. ``say`` is given what the user waits for.

    Raises:
        ConfigurationError: the name is not allowed, or a consumer of that name is at work.
        BrokerError: the servers do not answer, or this process has no connection to them.
    """

    def __init__(
        self, address: str, name: str, run_name: str, attempt: int, say: Callable[[str], None] = print
    ) -> None:
        self.name = check_name(name)
        self._run = (run_name, attempt)
        self._place = f"the bucket of {address}"
        self._position = HeldPosition(NatsConnection.at(address), run_name, name, attempt, say)

    def load(self) -> Committed | None:
        """What was committed last; ``None`` when nothing was.

        Raises:
            RecordingError: it is damaged, or of a newer version.
            ConfigurationError: it is about another run.
        """
        found = self._position.found
        return unpack_committed(found, self.name, self._place, self._run) if found else None

    def commit(self, committed: Committed) -> None:
        """Replaces it. What was committed before stays until the new one is stored.

        Raises:
            RunDirectoryError: the servers have not answered: it may be stored, and is replaced by the next commit.
            ReplacedError: another process works under this name now.
            ConfigurationError: a callback's state cannot be stored, or all of them are too large for the servers.
        """
        packed = committed.pack()
        try:
            self._position.write(packed)
        except BrokerError as error:
            raise RunDirectoryError(f"the state of consumer {self.name!r} cannot be kept: {error}") from None

    def close(self) -> None:
        """Lets the next consumer of that name in."""
        self._position.close()

    def __enter__(self) -> "StateBucket":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
