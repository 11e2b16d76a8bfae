"""A run in NATS for a subscriber: the recording from its stream, the status from its bridge."""

from contextlib import suppress

from offloop.bus.jetstream.channel import StreamChannel
from offloop.bus.jetstream.connection import NatsServers
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.jetstream.stream_bytes import StreamBytes
from offloop.bus.jetstream.windows import StreamWindows
from offloop.bus.net.channels import Channel
from offloop.bus.net.nats_addresses import no_such_run
from offloop.bus.protocol.frames import check_run_name
from offloop.bus.protocol.host_windows import HostWindow
from offloop.bus.recording import records
from offloop.bus.recording.reader import RecordingReader
from offloop.bus.recording.records import CheckRecord, DamageError
from offloop.bus.subscriber.following import RunStatus
from offloop.bus.subscriber.source import RunSource


class StreamRun(RunSource):
    """The newest attempt of a run in NATS. With several hosts it is that of the first rank's host."""

    def __init__(self, stream: str | NatsServers, run: str | None) -> None:
        servers = NatsServers.parse(stream) if isinstance(stream, str) else stream
        self._connection = NatsConnection.shared(servers)
        try:
            self._open(run)
        except BaseException:
            self._connection.close()
            raise

    def _open(self, run: str | None) -> None:
        connection = self._connection
        runs = connection.runs(run)
        if not runs:
            raise no_such_run(connection.address, run)
        listed = next((one for one in runs if one.live), runs[0])
        self._run = check_run_name(listed.run)
        self.run_name: str = check_run_name(listed.recorded_as or self._run)
        self.run_id: str | None = listed.id
        self.attempt: int = listed.attempt
        self._bytes = StreamBytes(connection, self._run, self.attempt)
        self.reader: RecordingReader = RecordingReader(self._bytes, f"the recording of run {self._run}")
        self._windows: StreamWindows | None = None
        self._newest = b""
        self._positions: dict[int, tuple[int, int]] = {}

    @property
    def refusal(self) -> str:
        return self._bytes.refusal

    def look(self) -> RunStatus:
        """Return the status that the bridge last wrote. Raise BrokerError if the servers refuse this user."""
        self._connection.check()
        runs = self._connection.known.runs(self._run)
        if self._bytes.refusal or not runs or (runs[0].id, runs[0].attempt) != (self.run_id, self.attempt):
            return RunStatus.FINISHED
        if runs[0].live:
            return RunStatus.LIVE
        return RunStatus.AWAY if runs[0].is_going_on else RunStatus.FINISHED

    def open_channel(self) -> Channel:
        return StreamChannel(self._connection)

    @property
    def pending(self) -> bool:
        return not (self._bytes.at_end or self.reader.finished)

    def newest_positions(self) -> dict[int, tuple[int, int]]:
        newest = self._bytes.newest
        if newest is not self._newest:
            self._newest = newest
            check = last_check(newest)
            if check is not None:
                self._positions = {rank: (at.seq, at.base_seq) for rank, at in check.positions.items()}
        return self._positions

    def refresh(self) -> None:
        # Another broker may have cut off a footer after the reader's position.
        self._bytes.forget(self.reader.position)

    def host_windows(self) -> list[HostWindow]:
        if self._windows is None:
            self._windows = StreamWindows(self._connection, self._run, self.attempt)
        return self._windows.take()

    def close(self) -> None:
        super().close()
        if self._windows is not None:
            self._windows.close()
        self._connection.close()


def last_check(data: bytes) -> CheckRecord | None:
    at = data.rfind(records.CHECK_SIGN)
    while at >= 0:
        with suppress(DamageError):
            return CheckRecord.decode(data[at - records.HEAD.size :])
        at = data.rfind(records.CHECK_SIGN, 0, at)
    return None
