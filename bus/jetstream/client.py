"""A client of NATS servers that fails at once where waiting does not help. Needs ``nats`` when it is imported."""

import asyncio
import re
import ssl
import time
from collections.abc import Callable
from typing import Any

from nats.aio.client import DEFAULT_BUFFER_SIZE, Client
from nats.aio.transport import TcpTransport
from nats.errors import Error, SecureConnRequiredError

from offloop.bus.errors import BrokerError, OffloopError
from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import API_SECONDS, NatsServers, check_version, in_words, tls_context
from offloop.bus.jetstream.server_config import roles_for
from offloop.bus.net.nkeys import load_nkey
from offloop.bus.printing import one_line

_RECONNECT_SECONDS = 0.5
_PING_SECONDS = 2
"""How often a server is pinged: when it leaves two of these without an answer, another one is connected to."""
_PENDING_BYTES = 4 << 20

_VIOLATION = re.compile(r"permissions violation for (publish|subscription) to \"([^\"]*)\"", re.IGNORECASE)
_REFUSALS = ("authorization violation", "authentication expired", "authentication revoked")


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

    Raises:
        ConfigurationError: the key or the certificate cannot be used.
    """

    def __init__(self, servers: NatsServers, say: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self.js = self.jetstream(timeout=API_SECONDS)
        self.failure: OffloopError | None = None
        self.trouble = ""
        """Why there was no connection last."""
        self._to = servers
        self._say = say
        self._nkey = None if servers.nkey is None else load_nkey(servers.nkey)
        self._context = tls_context(servers)
        self._task = asyncio.current_task()
        self._is_away = self._was_connected = False
        self._trying = asyncio.Lock()
        self._is_viewer = False
        self._may_command: bool | None = None

    async def begin(self, name: str) -> None:
        """Connects, as long as it takes.

        Raises:
            BrokerError: the servers are too old.
        """
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
        check_version(self.connected_server_version, self._to)
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
            check_version(self.connected_server_version, self._to)
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
