"""The connection to NATS servers, and their errors in our words."""

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

from offloop.bus.errors import BrokerError, ConfigurationError, OffloopError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.server_config import roles_for
from offloop.bus.net.nats_addresses import split_addresses
from offloop.bus.net.nkeys import load_nkey
from offloop.bus.printing import one_line

PASSING = (Error, OSError, TimeoutError)
"""Errors that pass when the servers are there again."""

OLDEST = (2, 9, 0)
OLDEST_BEYOND_LOOPBACK = (2, 12, 7)
_KNOWN_HOLES = ", because older ones have known security holes"
"""For which they may be used on this machine alone."""

API_SECONDS = 2.0
"""For how long an answer is waited on: servers that lose their leader give none until they have another one."""
CONNECT_SECONDS = 10.0
_LOST_SECONDS = 0.2
"""How often it is looked whether a connection was lost while an answer is waited for."""
_RECONNECT_SECONDS = 0.5
_PING_SECONDS = 2
"""How often a server is pinged: when it leaves two of these without an answer, another one is connected to."""
_PENDING_BYTES = 4 << 20

_VIOLATION = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]*)\"", re.IGNORECASE)
_REFUSALS = ("authorization violation", "authentication expired", "authentication revoked")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class NatsServers:
    """Where NATS servers are, and what is shown to them: by ``nats://HOST:PORT``, several with commas between them,
    ``tls://`` where they take TLS."""

    addresses: tuple[str, ...]
    nkey: Path | None = None
    """File with the seed of an nkey."""
    ca: Path | None = None
    """Certificate of who signed the servers' certificates, as PEM."""

    @classmethod
    def parse(cls, text: str, nkey: Path | None = None, ca: Path | None = None) -> "NatsServers":
        """Reads addresses. The files are by default those that OFFLOOP_NKEY and OFFLOOP_CA name.

        Raises ConfigurationError: they are none."""
        key, authority = nkey or os.environ.get("OFFLOOP_NKEY"), ca or os.environ.get("OFFLOOP_CA")
        return cls(split_addresses(text), Path(key) if key else None, Path(authority) if authority else None)

    def __str__(self) -> str:
        return ",".join(self.addresses)

    @property
    def are_here(self) -> bool:
        """Whether all of them are on this machine."""
        return all(is_loopback(urlsplit(address).hostname or "") for address in self.addresses)


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's, for itself alone."""
    return host.strip("[]") in _LOOPBACK


class _Transport(TcpTransport):
    """Closes what did not become a TLS connection, and keeps asyncio from warning where the other side closes one."""

    async def connect_tls(self, *arguments: Any, **options: Any) -> None:
        try:
            await super().connect_tls(*arguments, **options)
        except BaseException:
            self.abort()
            raise
        if self._io_writer is not None:
            self._io_writer.transport.get_protocol()._over_ssl = True  # type: ignore[attr-defined]

    def abort(self) -> None:
        """Closes it at once: a server that hangs never reads what is left to send."""
        for writer in (self._io_writer, self._bare_io_writer):
            if writer is not None:
                writer.transport.abort()


class NatsClient(Client):
    """A connection of the task that makes it: an error that does not pass cancels that task, and :attr:`failure` says
    why.

    Args:
        servers: where it connects to.
        say: shows a line to the user who waits for servers that are away.

    Raises ConfigurationError: the key or the certificate cannot be used."""

    def __init__(self, servers: NatsServers, say: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self.js = self.jetstream(timeout=API_SECONDS)
        self.failure: OffloopError | None = None
        self.trouble = ""
        """Why there was no connection last."""
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
        """Connects, as long as it takes. Raises BrokerError: the servers are too old."""
        options: dict[str, Any] = {"reconnect_time_wait": _RECONNECT_SECONDS}
        if self._nkey is not None:
            # An inbox that no other user may read.
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
            # What cannot be sent is not kept: it is known what has arrived, and the rest is sent again.
            pending_size=_PENDING_BYTES,
            **options,
        )
        _check_version(self.connected_server_version, self._to)
        self._was_connected = True

    async def close(self) -> None:
        """Closes the connection, also one that was not made."""
        await super().close()
        self._abort()
        await asyncio.sleep(0)

    def _abort(self) -> None:
        if isinstance(self._transport, _Transport):
            self._transport.abort()

    async def may_command(self) -> bool:
        """Whether the servers let this user command trainings, or only view them."""
        async with self._trying:
            if self._may_command is None:
                self._is_viewer = False
                await self.publish(names.ROLE_SUBJECT, b"")
                # The first question may overtake what was published; servers refuse that before they answer the second.
                await self.flush()
                await self.flush()
                self._may_command = not self._is_viewer
            return self._may_command

    @property
    def is_in_cluster(self) -> bool:
        """Whether the server is one of several that keep streams together."""
        return bool(self._server_info.get("cluster"))

    @property
    def address(self) -> str:
        """Where the servers are."""
        return str(self._to)

    @property
    def who(self) -> str:
        """Whom the servers see."""
        return "a client without a key" if self._nkey is None else f"the nkey {self._nkey.public}"

    def fail(self, error: OffloopError) -> None:
        """Ends what the task does with this connection."""
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
            return self._error(
                "takes only clients that it knows: name the file with your nkey by --nkey or OFFLOOP_NKEY"
            )
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
        # Before anything is sent: who is in between could say that there is no TLS.
        if initial_connection and self._context is not None and not info.get("tls_required"):
            raise SecureConnRequiredError
        await super()._process_info(info, initial_connection)

    async def _process_err(self, err_msg: str) -> None:
        # By itself the client would close for good at all but the first of these.
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
            # A reader may name an inbox for its answer that servers do not take: who answers has done nothing wrong.
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
    """A connection, which finds the servers again by itself. With ``say`` it waits for them as long as it takes, and
    says once that they are away.

    Raises BrokerError: none answers, or it is too old, has another certificate, does not know the key or lacks a role
    for it: also later, in whatever the task that began this waits for; ConfigurationError: the key or the certificate
    cannot be read."""
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
            f"no NATS server answers at {servers}{why}: see whether it runs", address=str(servers)
        ) from None
    except (Error, OSError) as error:
        raise BrokerError(f"NATS at {servers}: {in_words(error)}", address=str(servers)) from None


async def answer_of(client: NatsClient, asking: Coroutine[Any, Any, _Answer]) -> _Answer:
    """What the servers answer. Nothing is asked, and no answer waited for, without a connection.

    Raises OSError: there is none, or it was lost meanwhile."""
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
    """What a server or the client of NATS says, in one line."""
    text = getattr(error, "description", None) or str(error) or type(error).__name__
    return one_line(str(text).removeprefix("nats: "))


def _tls_context(servers: NatsServers) -> ssl.SSLContext | None:
    """How servers have to prove who they are; ``None`` where they do not.

    Raises ConfigurationError: the certificate cannot be read."""
    if servers.ca is None and not any(address.startswith("tls") for address in servers.addresses):
        return None
    try:
        # With one, who else is trusted on this machine is not asked.
        return ssl.create_default_context(cafile=servers.ca)
    except ssl.SSLError:
        raise ConfigurationError(f"{servers.ca} is not a certificate in PEM", value=servers.ca) from None
    except OSError as error:
        raise ConfigurationError(f"{servers.ca} cannot be read: {error.strerror}", value=servers.ca) from None


def _check_version(version: object, servers: NatsServers) -> None:
    """Raises BrokerError for servers that are too old for where they are."""
    known = tuple(getattr(version, part) for part in ("major", "minor", "patch"))
    required, why = (OLDEST, "") if servers.are_here else (OLDEST_BEYOND_LOOPBACK, _KNOWN_HOLES)
    if known < required:
        found, needed = (".".join(map(str, one)) for one in (known, required))
        raise BrokerError(
            f"the NATS server at {servers} is {found}: it must be {needed} or newer{why}", address=str(servers)
        )
