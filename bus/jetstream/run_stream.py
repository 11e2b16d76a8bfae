"""Streams and buckets of a run, as its bridge writes them."""

from contextlib import suppress
from dataclasses import dataclass

from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, BadRequestError, BucketNotFoundError, NotFoundError
from nats.js.kv import KeyValue

from offloop.bus.errors import BrokerError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import NatsClient, in_words
from offloop.bus.jetstream.stored import last_of_each

STREAM_FULL = 10077  # the stream has reached its own limit
FULL = (STREAM_FULL, 10002, 10047, 10023)  # a stream, an account or a server has no room left
WRONG_LAST_SEQUENCE = (10071, 10164)  # another message than the named one is the last of the subject
_EXISTS = 10058  # a stream of that name exists, with other settings
_TOO_FEW_SERVERS = 10005  # at the moment there are fewer servers than replicas
_NO_CLUSTER = 10074

_WINDOWS_SECONDS = 86_400.0  # how long windows are kept; older ones stay on the hosts


async def open_runs(client: NatsClient, replicas: int) -> KeyValue:
    """Return the bucket with the entries of runs."""
    try:
        return await client.js.key_value(names.RUNS_BUCKET)
    except BucketNotFoundError:
        return await client.js.create_key_value(bucket=names.RUNS_BUCKET, replicas=replicas)


@dataclass(frozen=True)
class RunFileStream:
    """A stream with the copies of a run's files."""

    client: NatsClient
    run: str
    run_id: str | None  # identity of the run, if it has one
    bridge: str  # the writer's identity, for each message
    replicas: int  # number of servers that keep each message of a new stream
    max_bytes: int | None = None  # limit of a new stream's size, if any
    has_windows: bool = False  # it holds windows of hosts, for a limited time, and not recordings

    @property
    def name(self) -> str:
        return names.windows_stream_of(self.run) if self.has_windows else names.stream_of(self.run)

    async def make(self) -> None:
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
        """Raise BrokerError if the identity is another run's."""
        if run_id not in (None, self.run_id):
            raise BrokerError(
                f"the stream {self.name} holds another run named {self.run!r}: give this one another name "
                f"('--run-name'), or remove that one with 'offloop server remove {self.run} "
                f"--stream {self.client.address}'"
            )


async def remove_run(client: NatsClient, run: str) -> list[str]:
    """Remove a run from the servers; return the removed streams and entries."""
    removed = []
    for stream in (names.stream_of(run), names.windows_stream_of(run)):
        with suppress(NotFoundError):
            await client.js.delete_stream(stream)
            removed.append(stream)
    stream, prefix = f"KV_{names.RUNS_BUCKET}", f"$KV.{names.RUNS_BUCKET}."
    for one in await last_of_each(client, stream, f"{prefix}{names.token(run)}.>"):
        if "KV-Operation" not in one.headers:
            await (await client.js.key_value(names.RUNS_BUCKET)).purge(one.subject.removeprefix(prefix))
            removed.append(one.subject.removeprefix("$KV."))
    return removed
