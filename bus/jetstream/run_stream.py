"""The streams of a run and the buckets beside them, as its bridge writes them."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, BadRequestError, BucketNotFoundError, NotFoundError

from offloop.bus.errors import BrokerError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import NatsClient, in_words
from offloop.bus.jetstream.stored import last_of_each, list_subjects

STREAM_FULL = 10077
"""The stream has reached its own limit."""
FULL = (STREAM_FULL, 10002, 10047, 10023)
"""A stream, an account or a server has no room left."""
WRONG_LAST_SEQUENCE = (10071, 10164)
"""Another message of the subject is the last one than the one named."""
_EXISTS = 10058
"""A stream of that name is there, with other settings."""
_TOO_FEW_SERVERS = 10005
"""Not enough servers are there at the moment for as many replicas."""
_NO_CLUSTER = 10074

_WINDOWS_SECONDS = 86_400.0
"""How long windows are kept: older ones stay on the hosts."""
POSITIONS_BYTES = 64 << 20
"""How large the bucket of positions may become: an account's readers may write there."""


async def open_bucket(client: NatsClient, bucket: str, replicas: int, max_bytes: int | None = None) -> Any:
    """A key-value bucket, which is made unless it is there."""
    try:
        return await client.js.key_value(bucket)
    except BucketNotFoundError:
        return await client.js.create_key_value(bucket=bucket, replicas=replicas, max_bytes=max_bytes)


@dataclass(frozen=True)
class RunFileStream:
    """A stream of a run: holds the copies of its files."""

    client: NatsClient
    run: str
    run_id: str | None
    """The run's identity, if it has one."""
    bridge: str
    """Who writes: stands in each message."""
    replicas: int
    """How many servers keep each message; for a stream that does not exist yet, as :attr:`max_bytes`."""
    max_bytes: int | None = None
    """How large it may grow, where that is to be limited."""
    has_windows: bool = False
    """Whether it holds windows of hosts, for a limited time, and not recordings."""

    @property
    def name(self) -> str:
        """The stream's name."""
        return names.windows_stream_of(self.run) if self.has_windows else names.stream_of(self.run)

    async def make(self) -> None:
        """Makes it, unless it is there.

        Raises BrokerError: the servers do not make it, for good, or it is another run's."""
        subjects = names.windows_subject if self.has_windows else names.recording_subject
        config = StreamConfig(
            name=self.name,
            subjects=[subjects(self.run)],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            discard=DiscardPolicy.NEW,
            max_bytes=self.max_bytes or -1,
            max_age=_WINDOWS_SECONDS if self.has_windows else None,
            num_replicas=self.replicas,
            allow_direct=False,
            metadata=None if self.run_id is None else {names.RUN_ID_METADATA: self.run_id},
        )
        try:
            await self.client.js.add_stream(config)
        except APIError as error:
            if error.err_code == _EXISTS:
                known = (await self.client.js.stream_info(self.name)).config
                self.check_owner((known.metadata or {}).get(names.RUN_ID_METADATA))
                return
            is_for_good = isinstance(error, BadRequestError) and error.err_code not in (_TOO_FEW_SERVERS, *FULL)
            if not is_for_good and error.err_code != _NO_CLUSTER:
                raise
            raise BrokerError(f"NATS does not make the stream {self.name}: {in_words(error)}") from None

    def check_owner(self, run_id: str | None) -> None:
        """Raises :class:`BrokerError` where it is another run's, by that one's identity."""
        if run_id not in (None, self.run_id):
            raise BrokerError(
                f"the stream {self.name} holds another run that is called {self.run!r}: give this one another name "
                f"('--run-name'), or remove that one with 'offloop server remove {self.run} "
                f"--stream {self.client.address}'"
            )


async def remove_run(client: NatsClient, run: str) -> list[str]:
    """Removes a run from the servers; returns what was removed: names of streams, and keys in buckets.

    Raises nats.errors.Error: the servers do not answer, or refuse."""
    removed = []
    for stream in (names.stream_of(run), names.windows_stream_of(run)):
        with suppress(NotFoundError):
            await client.js.delete_stream(stream)
            removed.append(stream)
    for bucket in (names.RUNS_BUCKET, names.POSITIONS_BUCKET):
        stream, prefix = f"KV_{bucket}", f"$KV.{bucket}."
        subjects = await list_subjects(client, stream, f"{prefix}{names.token(run)}.>")
        for one in await last_of_each(client, stream, subjects):
            if "KV-Operation" not in one.headers:
                await (await client.js.key_value(bucket)).purge(one.subject.removeprefix(prefix))
                removed.append(one.subject.removeprefix("$KV."))
    return removed
