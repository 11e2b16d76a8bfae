"""The streams of a run and the buckets beside them, as its bridge writes them."""

from contextlib import suppress
from typing import Any, NamedTuple

from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, BadRequestError, BucketNotFoundError, NotFoundError

from offloop.bus.errors import BrokerError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import NatsClient, answer_of, in_words
from offloop.bus.jetstream.stored import get, last_of_each, last_range, list_subjects

MAX_MESSAGE = 512 * 1024
"""Bytes of a recording in one message: servers take 1 MiB unless configured otherwise."""

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


class Copied(NamedTuple):
    """How far the copy of a recording goes."""

    offset: int = 0
    """Bytes that are there and stay."""
    end: int = 0
    """Bytes that are there, with those behind the last check record of a closed file."""
    sequence: int = 0
    """Number of the subject's last message."""
    bridge: str = ""
    """Who sent that."""


class RunFileStream:
    """A stream of a run: holds the copies of its files.

    Args:
        client: the connection.
        run: the run's name.
        run_id: its identity, if it has one.
        bridge: who writes: stands in each message.
        replicas: how many servers keep each message; for a stream that does not exist yet.
        max_bytes: how large it may grow, where that is to be limited; for one that does not exist yet.
        has_windows: whether it holds windows of hosts, for a limited time, and not recordings.
    """

    def __init__(
        self,
        client: NatsClient,
        run: str,
        run_id: str | None,
        bridge: str,
        replicas: int,
        max_bytes: int | None = None,
        *,
        has_windows: bool = False,
    ) -> None:
        self.name = names.windows_stream_of(run) if has_windows else names.stream_of(run)
        self._subjects = names.all_windows(run) if has_windows else names.all_recordings(run)
        self._max_age = _WINDOWS_SECONDS if has_windows else None
        self._client = client
        self.run = run
        self._run_id = run_id
        self.bridge = bridge
        self._replicas = replicas
        self._max_bytes = max_bytes

    @property
    def most(self) -> int:
        """Bytes of a file that fit into a message."""
        return min(MAX_MESSAGE, max(self._client.max_payload - 4096, 1024))

    async def make(self) -> None:
        """Makes it, unless it is there.

        Raises:
            BrokerError: the servers do not make it, for good, or it is another run's.
        """
        config = StreamConfig(
            name=self.name,
            subjects=[self._subjects],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            discard=DiscardPolicy.NEW,
            max_bytes=self._max_bytes or -1,
            max_age=self._max_age,
            num_replicas=self._replicas,
            allow_direct=False,
            metadata=None if self._run_id is None else {names.RUN_ID_METADATA: self._run_id},
        )
        try:
            await self._client.js.add_stream(config)
        except APIError as error:
            if error.err_code == _EXISTS:
                known = (await self._client.js.stream_info(self.name)).config
                self._check_owner((known.metadata or {}).get(names.RUN_ID_METADATA))
                return
            is_for_good = isinstance(error, BadRequestError) and error.err_code not in (_TOO_FEW_SERVERS, *FULL)
            if not is_for_good and error.err_code != _NO_CLUSTER:
                raise
            raise BrokerError(f"NATS does not make the stream {self.name}: {in_words(error)}") from None

    def _check_owner(self, run_id: str | None) -> None:
        if run_id not in (None, self._run_id):
            raise BrokerError(
                f"the stream {self.name} holds another run that is called {self.run!r}: give this one another name "
                f"('--run-name'), or remove that one with 'offloop server remove {self.run} "
                f"--stream {self._client.address}'"
            )

    async def publish(self, subject: str, begin: int, data: bytes, after: int, final: int | None) -> int:
        """Sends a range of a file that begins there, as the message behind the subject's message of number ``after``;
        ``final`` is as in the header of that name. Returns its number."""
        headers = {
            names.OFFSET: str(begin),
            names.BRIDGE: self.bridge,
            "Nats-Expected-Last-Subject-Sequence": str(after),
        }
        if self._run_id is not None:
            headers[names.RUN_ID] = self._run_id
        if final is not None:
            headers[names.FINAL] = str(final)
        sending = self._client.js.publish(subject, data, headers=headers, stream=self.name)
        return (await answer_of(self._client, sending)).seq

    async def first(self, subject: str) -> tuple[int, bytes]:
        """The beginning of what the stream holds of the file, and its offset."""
        message = await get(self._client, self.name, subject, 1)
        return (0, b"") if message is None else (message.offset or 0, message.data)

    async def last(self, subject: str) -> tuple[Copied, bytes]:
        """How far the copy of a file goes, and the content of its last message. A stream that was removed is made.

        Raises:
            BrokerError: the stream is of something else.
        """
        message, number = await last_range(self._client, self.name, subject)
        if message is None or message.offset is None:
            await self.make()
            return Copied(sequence=number), b""
        self._check_owner(message.headers.get(names.RUN_ID))
        end = message.offset + len(message.data)
        offset = end if message.final is None else message.final
        return Copied(offset, end, number, message.headers.get(names.BRIDGE, "?")), message.data


async def remove_run(client: NatsClient, run: str) -> list[str]:
    """Removes a run from the servers; returns what was removed: names of streams, and keys in buckets.

    Raises:
        nats.errors.Error: the servers do not answer, or refuse.
    """
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
