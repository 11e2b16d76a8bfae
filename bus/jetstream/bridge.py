"""The bridge: copies the recordings of a run into JetStream, as they are on disk.

A message is a range of a recording that ends at a check record, or a piece of one. One is in flight at a time, and says
which number the subject's last message must have: so a bridge that is late, doubled or was killed never writes twice or
out of order. Whatever goes wrong, the bridge reads the subject's last message and continues behind it: what servers
have forgotten is sent again, and what another bridge has sent ends this one.
"""

import asyncio
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from bus.errors import BrokerError, OffloopError, RecordingError
from bus.jetstream import names
from bus.jetstream.connection import NatsServers, connected, in_words, passing_errors
from bus.jetstream.growing import GrowingRecording
from bus.jetstream.relay import Relay
from bus.printing import one_line
from bus.runs.bridged import BridgeStatus
from bus.runs.directory import Attempt, read_run
from bus.runs.listing import describe_run

MAX_MESSAGE = 512 * 1024
"""Bytes of a recording in one message: servers take 1 MiB unless configured otherwise."""

_LOOK_SECONDS = 0.1
_TELL_SECONDS = 1.0
_RETRY_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_WRONG_LAST_SEQUENCE = (10071, 10164)
_FULL = (10077, 10047, 10023)
"""A stream, an account or a server has no room left."""
_NO_STREAM = 10059


class BridgeReplacedError(BrokerError):
    """Another bridge copies this recording now."""


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


class Bridge:
    """Copies the run in a directory, with all its attempts.

    Args:
        path: the run's directory.
        servers: where JetStream is.
        replicas: how many servers keep each message; for a stream that does not exist yet.
        max_bytes: how large the stream may grow, where that is to be limited; for one that does not exist yet.
        host: by default this machine's name.
        say: shows a line to the user.
    """

    def __init__(
        self,
        path: Path,
        servers: NatsServers,
        replicas: int = 1,
        max_bytes: int | None = None,
        host: str | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self._path = path
        self._servers = servers
        self._replicas = replicas
        self._max_bytes = max_bytes
        self._host = host or socket.gethostname()
        self._say = say
        self._identity = f"{self._host}/{os.getpid()}/{secrets.token_hex(4)}"
        self._run = read_run(path)
        self._stream = names.stream_of(self._run.name)
        self.status = BridgeStatus.of_this_process(str(servers), self._host)
        self._recording: GrowingRecording | None = None
        self._at = Copied()
        self._retries = 0
        self._told_at = 0.0
        self._said = ""

    async def copy(self) -> None:
        """Copies until the run has ended and all of it is there.

        Raises:
            BridgeReplacedError: another bridge has taken over.
            BrokerError: the servers do not take it, for good.
            RecordingError: what is in the stream is not of this recording.
            RunDirectoryError: the run's directory cannot be read any more.
        """
        try:
            async with connected(self._servers, f"bridge {self._run.name}", self._say) as (client, stream):
                self._client, self._jetstream = client, stream
                await self._until_answered(self._make_stream)
                async with Relay(client, self._path, self._run.name):
                    await self._copy_all()
        except OffloopError as error:
            self.status.state, self.status.why = "failed", str(error)
            raise
        finally:
            self._write_status()

    async def _copy_all(self) -> None:
        for attempt in self._run.attempts[:-1]:
            await self._copy_attempt(attempt)
        number = self._run.last.number
        while True:
            await self._copy_attempt(self._run.last)
            self._run = read_run(self._path)
            if self._run.last.number == number:
                break
            number = self._run.last.number
        self.status.state = "done"
        await self._tell(force=True)

    async def _copy_attempt(self, attempt: Attempt) -> None:
        """Copies an attempt until it has ended."""
        self._recording = recording = GrowingRecording(attempt.recording)
        self._at = Copied()
        subject = names.recording_subject(self._run.name, attempt.number, self._host)
        self.status.attempt = attempt.number
        try:
            at = await self._find(subject, recording, Copied())
            while True:
                # Looked at first: what was written before the run ended is in the file then.
                is_closed = self._is_closed(attempt.number)
                end = recording.look()
                if at.offset < end:
                    at = await self._send(subject, recording, at, end, final=None)
                    continue
                if is_closed and at.end != recording.size:
                    at = await self._send(subject, recording, at, recording.size, final=end)
                    continue
                self._note()
                await self._tell(force=is_closed)
                if is_closed:
                    return
                await asyncio.sleep(_LOOK_SECONDS)
        finally:
            self._recording = None
            recording.close()

    def _is_closed(self, attempt: int) -> bool:
        """Whether nothing more will be written, unless the attempt is resumed."""
        self._run = run = read_run(self._path)
        return run.last.number != attempt or not (run.live or run.away or run.last.status == "running")

    async def _send(self, subject: str, recording: GrowingRecording, at: Copied, end: int, final: int | None) -> Copied:
        """Sends the next message of what is missing up to ``end``; ``final`` is where the end of a closed file begins,
        if that is what is sent. Returns how far the copy goes then."""
        # What followed the last check record before is no more.
        begin = at.offset if final is None else max(at.end, final)
        if final is not None and at.end > end:
            begin = final
        data = recording.read(begin, min(end - begin, self._most))
        headers = {
            names.OFFSET: str(begin),
            names.BRIDGE: self._identity,
            "Nats-Expected-Last-Subject-Sequence": str(at.sequence),
        }
        if self._run.id is not None:
            headers[names.RUN_ID] = self._run.id
        if final is not None:
            headers[names.FINAL] = str(final)
        from nats.js.errors import APIError

        try:
            acknowledged = await self._jetstream.publish(subject, data, headers=headers, stream=self._stream)
        except APIError as error:
            if error.err_code in _FULL:
                await self._pause(error)
            elif error.err_code not in _WRONG_LAST_SEQUENCE:
                if (error.code or 0) < 500:
                    raise BrokerError(f"NATS does not take the recording: {in_words(error)}") from None
                self._wait_for(error)
                await self._rest()
        except passing_errors() as error:
            # It may have arrived: that is looked up.
            self._wait_for(error)
        else:
            self._retries = 0
            self.status.state, self.status.why = "copying", ""
            at = Copied(
                begin + len(data) if final is None else final, begin + len(data), acknowledged.seq, self._identity
            )
            self._at = at
            self._note()
            await self._tell()
            return at
        return await self._find(subject, recording, at)

    @property
    def _most(self) -> int:
        return min(MAX_MESSAGE, max(self._client.max_payload - 4096, 1024))

    async def _find(self, subject: str, recording: GrowingRecording, before: Copied) -> Copied:
        """Looks up how far the copy goes, as often as it takes."""
        at: Copied = await self._until_answered(lambda: self._last(subject, recording))
        if at.bridge not in ("", self._identity) and before.bridge == self._identity and at.end > before.end:
            raise BridgeReplacedError(f"another bridge, {one_line(at.bridge)}, copies run {self._run.name!r} now")
        if at.end < before.end:
            self.status.refilled += before.end - at.end
            self._say(f"the servers have forgotten {before.end - at.end:,} bytes of run {self._run.name}: sent again")
        # Who was here before is what a later one is compared with.
        self._at = at = at._replace(bridge=self._identity)
        return at

    async def _last(self, subject: str, recording: GrowingRecording) -> Copied:
        from nats.js.errors import NotFoundError

        try:
            message = await self._jetstream.get_last_msg(self._stream, subject)
        except NotFoundError as error:
            if error.err_code == _NO_STREAM:
                await self._make_stream()
            return Copied()
        headers, data = message.headers or {}, message.data or b""
        try:
            offset = int(headers[names.OFFSET])
            final = int(headers[names.FINAL]) if names.FINAL in headers else None
        except (KeyError, ValueError):
            raise RecordingError(f"the stream {self._stream} holds something else than this run") from None
        if headers.get(names.RUN_ID) not in (None, self._run.id):
            raise RecordingError(
                f"the stream {self._stream} holds another run that is called {self._run.name!r}: give this one "
                "another name, or remove the stream"
            )
        if final is None and recording.read(offset, len(data)) != data:
            raise RecordingError(
                f"the stream {self._stream} and {recording.path} differ from byte {offset:,} on: remove the stream, or "
                "give this run another name"
            )
        end = offset + len(data)
        return Copied(end if final is None else final, end, message.seq or 0, headers.get(names.BRIDGE, "?"))

    async def _make_stream(self) -> None:
        from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
        from nats.js.errors import BadRequestError

        config = StreamConfig(
            name=self._stream,
            subjects=[names.all_recordings(self._run.name)],
            retention=RetentionPolicy.LIMITS,
            storage=StorageType.FILE,
            discard=DiscardPolicy.NEW,
            max_bytes=self._max_bytes or -1,
            num_replicas=self._replicas,
            allow_direct=False,
        )
        with suppress(BadRequestError):  # it is there, with other settings
            await self._jetstream.add_stream(config)

    async def _until_answered(self, ask: Callable[[], Any]) -> Any:
        while True:
            try:
                answer = await ask()
            except passing_errors() as error:
                self._wait_for(error)
                await self._rest()
            else:
                if self.status.state == "waiting":
                    self.status.state, self.status.why = "copying", ""
                return answer

    def _wait_for(self, error: Exception) -> None:
        self._note()
        self.status.state, self.status.why = "waiting", in_words(error)

    async def _pause(self, error: Exception) -> None:
        self.status.state, self.status.why = "paused", in_words(error)
        if self.status.why != self._said:
            self._said = self.status.why
            self._say(f"the stream of run {self._run.name} takes no more ({self._said}): waiting for room")
        await self._tell()
        await self._rest()

    async def _rest(self) -> None:
        self._note()
        self._write_status()
        await asyncio.sleep(_RETRY_SECONDS[min(self._retries, len(_RETRY_SECONDS) - 1)])
        self._retries += 1

    # -- what is said of it -------------------------------------------------------------------------------------------

    def _note(self) -> None:
        status, recording, at = self.status, self._recording, self._at
        if recording is None:
            return
        recording.look()
        status.size, status.copied = recording.end, min(at.offset, recording.end)
        status.lag_events = recording.copied(at.offset)
        status.lag_seconds = time.monotonic() - recording.parts[0].seen if recording.parts else 0.0

    async def _tell(self, force: bool = False) -> None:
        """Writes down how it is doing, and what the run is at, for readers elsewhere."""
        now = time.monotonic()
        if not force and now - self._told_at < _TELL_SECONDS:
            return
        self._told_at = now
        self._write_status()
        served = {"attempt": self._run.last.number} if self._run.live else {}
        said = {**describe_run(self._run, served), "bridge": asdict(self.status)}
        with suppress(*passing_errors(), OffloopError):
            bucket = await self._bucket()
            key = names.run_key(self._run.name, self._run.last.number, self._host)
            await bucket.put(key, json.dumps(said).encode())

    async def _bucket(self) -> Any:
        from nats.js.api import KeyValueConfig
        from nats.js.errors import BucketNotFoundError

        try:
            return await self._jetstream.key_value(names.RUNS_BUCKET)
        except BucketNotFoundError:
            config = KeyValueConfig(names.RUNS_BUCKET, replicas=self._replicas)
            return await self._jetstream.create_key_value(config)

    def _write_status(self) -> None:
        self.status.time = time.time()
        self.status.write(self._path)
