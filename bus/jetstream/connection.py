"""Connection to NATS servers, and their errors as our messages."""

import asyncio
import contextlib
import os
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from nats.aio.client import DEFAULT_BUFFER_SIZE, Client
from nats.aio.transport import TcpTransport
from nats.errors import Error, SecureConnRequiredError
from nats.js import JetStreamContext

from offloop.bus.errors import BrokerError, ConfigurationError, OffloopError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.server_config import roles_for
from offloop.bus.net.nats_addresses import split_addresses
from offloop.bus.net.nkeys import load_nkey
from offloop.bus.printing import one_line

PASSING = (Error, OSError, TimeoutError)  # errors that may pass once the servers answer again

OLDEST = (2, 9, 0)
OLDEST_BEYOND_LOOPBACK = (2, 12, 7)
_KNOWN_HOLES = ", because older ones have known security holes"  # older versions may be used only on this machine

API_SECONDS = 2.0  # how long to wait for an answer: servers without a leader give none until they have elected one
CONNECT_SECONDS = 10.0
_LOST_SECONDS = 0.2  # interval of checks for a lost connection while an answer is pending
_RECONNECT_SECONDS = 0.5
_PING_SECONDS = 2  # Interval of pings. After two unanswered ones the client connects to another server.
_PENDING_BYTES = 4 << 20

_VIOLATION = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]*)\"", re.IGNORECASE)
_REFUSALS = ("authorization violation", "authentication expired", "authentication revoked")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class NatsServers:
    """Addresses of NATS servers, with ``nats://`` or ``tls://``, and the client's credentials."""

    addresses: tuple[str, ...]
    nkey: Path | None = None  # file with the seed of an nkey
    ca: Path | None = None  # certificate authority of the servers, as PEM

    @classmethod
    def parse(cls, text: str, nkey: Path | None = None, ca: Path | None = None) -> "NatsServers":
        """Parse comma-separated addresses. Default files are those of OFFLOOP_NKEY and OFFLOOP_CA."""
        key, authority = nkey or os.environ.get("OFFLOOP_NKEY"), ca or os.environ.get("OFFLOOP_CA")
        return cls(split_addresses(text), Path(key) if key else None, Path(authority) if authority else None)

    def __str__(self) -> str:
        return ",".join(self.addresses)

    @property
    def are_here(self) -> bool:
        return all(is_loopback(urlsplit(address).hostname or "") for address in self.addresses)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address can be reached only from this machine."""
    return host.strip("[]") in _LOOPBACK


class _Transport(TcpTransport):
    """Closes failed TLS connections, and keeps asyncio from warnings when the peer closes one."""

    async def connect_tls(self, *arguments: Any, **options: Any) -> None:
        try:
            await super().connect_tls(*arguments, **options)
        except BaseException:
            self.abort()
            raise
        if self._io_writer is not None:
            self._io_writer.transport.get_protocol()._over_ssl = True  # type: ignore[attr-defined]

    def abort(self) -> None:
        """Close at once, without waiting for a server to read the rest."""
        for writer in (self._io_writer, self._bare_io_writer):
            if writer is not None:
                writer.transport.abort()


class NatsClient(Client):
    """Connection owned by the task that creates it. An error that does not pass cancels the task, see ``failure``.

    While servers are away, ``say`` shows a line to the user."""

    def __init__(self, servers: NatsServers, say: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self.js: JetStreamContext = self.jetstream(timeout=API_SECONDS)
        self.failure: OffloopError | None = None
        self.trouble: str = ""  # reason of the last failed connection
        self._to = servers
        self._say = say
        self._nkey = None if servers.nkey is None else load_nkey(servers.nkey)
        self._context = _tls_context(servers)
        self._task = asyncio.current_task()
        self._is_away = self._was_connected = False
        self._trying = asyncio.Lock()
        self._is_viewer = False
        self._may_command: bool | None = None

    async def begin(self, name: str) -> None:
        """Connect, however long it takes. Raise BrokerError if the servers are too old."""
        options: dict[str, Any] = {"reconnect_time_wait": _RECONNECT_SECONDS}
        if self._nkey is not None:
            # No other user may read this inbox.
            options |= {"nkeys_seed_str": self._nkey.seed, "inbox_prefix": f"_INBOX.{self._nkey.public}"}
        await self.connect(
            servers=list(self._to.addresses),
            name=name,
            max_reconnect_attempts=-1,
            ping_interval=_PING_SECONDS,
            max_outstanding_pings=2,
            error_cb=self._note,
            reconnected_cb=self._note_return,
            tls=self._context,
            # Unsent messages are not kept: the bridge knows what has arrived, and sends the rest again.
            pending_size=_PENDING_BYTES,
            **options,
        )
        _check_version(self.connected_server_version, self._to)
        self._was_connected = True

    async def close(self) -> None:
        """Close the connection, also an incomplete one."""
        await super().close()
        self._abort()
        await asyncio.sleep(0)

    def _abort(self) -> None:
        if isinstance(self._transport, _Transport):
            self._transport.abort()

    async def may_command(self) -> bool:
        """Return whether the servers allow this user to command trainings."""
        async with self._trying:
            if self._may_command is None:
                self._is_viewer = False
                await self.publish(names.ROLE_SUBJECT, b"")
                # The first flush may overtake the message. The server refuses the message before it answers the second.
                await self.flush()
                await self.flush()
                self._may_command = not self._is_viewer
            return self._may_command

    @property
    def is_in_cluster(self) -> bool:
        return bool(self._server_info.get("cluster"))

    @property
    def address(self) -> str:
        return str(self._to)

    @property
    def who(self) -> str:
        """The user, as the servers see it."""
        return "a client without a key" if self._nkey is None else f"the nkey {self._nkey.public}"

    def fail(self, error: OffloopError) -> None:
        """Cancel the task of this connection because of an error."""
        if self.failure is None:
            self.failure = error
            if self._task is not None:
                self._task.cancel()

    async def _note(self, error: Exception) -> None:
        text = in_words(error)
        if any(refusal in text.lower() for refusal in _REFUSALS):
            self.fail(self._refused(text))
        elif isinstance(error, SecureConnRequiredError):
            self.fail(self._error("does not offer TLS: write nats:// and leave out --ca, or let its operator add it"))
        elif isinstance(error, ssl.SSLError):
            why = one_line(str(getattr(error, "verify_message", "") or error.reason or error))
            text = f"has no certificate that --ca (or OFFLOOP_CA) and the address allow: {why}"
            if not self._was_connected:
                self.fail(self._error(text))
        if self.is_connected:
            return
        self.trouble = text
        if not self._is_away and self._say is not None and self.failure is None:
            self._is_away = True
            self._say(f"no NATS server answers at {self._to} ({text}): waiting")

    async def _note_return(self) -> None:
        self._is_away, self._may_command = False, None
        try:
            _check_version(self.connected_server_version, self._to)
        except OffloopError as error:
            self.fail(error)

    def _error(self, text: str) -> BrokerError:
        return BrokerError(f"NATS at {self._to} {text}", address=str(self._to))

    def _refused(self, text: str) -> BrokerError:
        if self._nkey is None:
            return self._error("accepts only known clients: name the file with your nkey by --nkey or OFFLOOP_NKEY")
        return self._error(
            f"does not admit {self.who} ({text}): its operator adds it with 'offloop server nats-config', or you have "
            "another key"
        )

    async def _connect_to_server(self, s: Any) -> None:
        s.last_attempt = time.monotonic()
        self._abort()
        transport: Any = _Transport()  # type: ignore[no-untyped-call]
        self._transport = transport
        await transport.connect(s.uri, DEFAULT_BUFFER_SIZE, self.options["connect_timeout"])

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # Before anything is sent: an attacker in between could pretend that there is no TLS.
        if initial_connection and self._context is not None and not info.get("tls_required"):
            raise SecureConnRequiredError
        await super()._process_info(info, initial_connection)

    async def _process_err(self, err_msg: str) -> None:
        # The base class would close the connection for good on all errors but the first kind.
        text = one_line(err_msg.strip("' "))
        if (found := _VIOLATION.search(text)) is not None:
            self._note_violation("publish" if found[1].lower() == "publish" else "subscribe", found[2])
        elif any(refusal in text.lower() for refusal in _REFUSALS):
            self.fail(self._refused(text))
        else:
            await self._process_op_err(Error(f"nats: {text}"))

    def _note_violation(self, action: str, subject: str) -> None:
        if subject == names.ROLE_SUBJECT:
            self._is_viewer = True
        elif not (action == "publish" and subject.lower().startswith("_inbox.")):
            # A reader may name an inbox that the servers refuse; the answering host is not to blame.
            roles = " or ".join(roles_for(action, subject))
            what = f"it takes the role {roles}, which" if roles else "that"
            self.fail(
                self._error(
                    f"does not let {self.who} {action} to {subject!r}: {what} its operator gives with "
                    "'offloop server nats-config'"
                )
            )


@contextlib.asynccontextmanager
async def connected(
    servers: NatsServers, name: str, say: Callable[[str], None] | None = None
) -> AsyncIterator[NatsClient]:
    """Connect and reconnect to servers. With ``say`` it waits for them without a limit, and reports that once.

    Raises BrokerError: no server answers, it is too old, or its certificate, the key or a role is refused. This may
    also happen later, at any wait of the task that entered."""
    client = NatsClient(servers, say)
    try:
        try:
            async with asyncio.timeout(None if say is not None else CONNECT_SECONDS):
                await client.begin(name)
            yield client
        finally:
            await client.close()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if client.failure is None or task is None:
            raise
        task.uncancel()
        raise client.failure from None
    except TimeoutError:
        why = f" ({client.trouble})" if client.trouble else ""
        raise BrokerError(
            f"no NATS server answers at {servers}{why}: check that it runs", address=str(servers)
        ) from None
    except (Error, OSError) as error:
        raise BrokerError(f"NATS at {servers}: {in_words(error)}", address=str(servers)) from None


async def answer_of(client: NatsClient, asking: Coroutine[Any, Any, _Answer]) -> _Answer:
    """Return the servers' answer, or raise OSError if there is no connection or it is lost meanwhile."""
    if not client.is_connected:
        asking.close()
        raise OSError("no server answers")
    connection = client.stats["reconnects"]
    task = asyncio.ensure_future(asking)
    try:
        while not (await asyncio.wait((task,), timeout=_LOST_SECONDS))[0]:
            if not client.is_connected or client.stats["reconnects"] != connection:
                raise OSError("the connection was lost")
        return task.result()
    finally:
        task.cancel()


def in_words(error: Exception) -> str:
    text = getattr(error, "description", None) or str(error) or type(error).__name__
    return one_line(str(text).removeprefix("nats: "))


def _tls_context(servers: NatsServers) -> ssl.SSLContext | None:
    """Return the TLS settings that verify servers, or ``None`` for connections without TLS."""
    if servers.ca is None and not any(address.startswith("tls") for address in servers.addresses):
        return None
    try:
        # With a certificate authority, this machine's others are not trusted.
        return ssl.create_default_context(cafile=servers.ca)
    except ssl.SSLError:
        raise ConfigurationError(f"{servers.ca} is not a certificate in PEM", value=servers.ca) from None
    except OSError as error:
        raise ConfigurationError(f"{servers.ca} cannot be read: {error.strerror}", value=servers.ca) from None


def _check_version(version: object, servers: NatsServers) -> None:
    """Raise BrokerError for servers that are too old; servers on other machines must be newer."""
    known = tuple(getattr(version, part) for part in ("major", "minor", "patch"))
    required, why = (OLDEST, "") if servers.are_here else (OLDEST_BEYOND_LOOPBACK, _KNOWN_HOLES)
    if known < required:
        found, needed = (".".join(map(str, one)) for one in (known, required))
        raise BrokerError(f"NATS server at {servers} is {found}: use {needed} or newer{why}", address=str(servers))
