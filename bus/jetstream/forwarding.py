"""The readers' end of requests that a run's host answers: the other end is :mod:`offloop.bus.jetstream.relay`."""

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from offloop.bus.errors import BrokerError, ProtocolError
from offloop.bus.jetstream import names
from offloop.bus.protocol.frames import Control, encode_control

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from offloop.bus.jetstream.client import NatsClient

_MOST_FETCHING = 10_000
_NO_BRIDGE = (
    "this run has no bridge that answers: see with 'offloop runs' whether it is live, and start "
    "'offloop server bridge' on its host"
)
_NO_BRIDGE_OF_HOST = (
    "that host has no bridge that answers: the run has ended there, or it cannot reach these servers; "
    "'offloop convert cut' on that host gives the same"
)


class Forwarding:
    """Passes requests on to the hosts of runs, and their answers back to the readers: ``answer`` is given a reader's
    identity and a frame; ``may_come`` says of a run, a host and an attempt whether more may come from there."""

    def __init__(
        self,
        client: "NatsClient",
        answer: Callable[[bytes, bytes], Awaitable[None]],
        may_come: Callable[[str, str | None, int | None], bool],
    ) -> None:
        self._client = client
        self._answer = answer
        self._may_come = may_come
        self._inbox = ""
        self._fetching: OrderedDict[bytes, tuple[str, str | None, int | None]] = OrderedDict()
        """What readers ask for again and again: of which run, host and attempt."""

    async def send(self, identity: bytes, control: Control, frame: bytes) -> None:
        """Passes a reader's request on.

        Raises:
            BrokerError: this user may not command runs.
            ProtocolError: the request names no run.
        """
        content = control.content
        run, host, asked = content.get("run"), content.get("host"), content.get("id")
        if not isinstance(run, str):
            raise ProtocolError("it names no run")
        may_command = await self._client.may_command()
        if control.kind == "command" and not may_command:
            raise BrokerError(
                f"{self._client.who} may view runs there, not command them: the servers' operator gives it the role "
                "command with 'offloop server nats-config'"
            )
        if not isinstance(host, str) or control.kind == "command":
            # What the training is to do is decided by the first rank.
            host = None
        if not isinstance(asked, str):
            asked = None
        if control.kind == "fetch" and asked is None:
            attempt = content.get("attempt")
            self._fetching[identity] = run, host, attempt if type(attempt) is int else None
            self._fetching.move_to_end(identity)
            if len(self._fetching) > _MOST_FETCHING:
                self._fetching.popitem(last=False)
        if not self._inbox:
            self._inbox = self._client.new_inbox()
            await self._client.subscribe(f"{self._inbox}.>", cb=self._take)
        subject = names.request_subject(run, control.kind, host, may_command=may_command)
        reply = names.reply_subject(f"{self._inbox}.{identity.hex()}", control.kind, asked)
        headers = None if asked is None else {"Ol-Id": asked}
        await self._client.publish(subject, frame, reply=reply, headers=headers)

    async def _take(self, message: "Msg") -> None:
        kind, asked = names.replied_to(message.subject)
        identity = bytes.fromhex(names.reader_of(message.subject).rpartition(".")[2])
        of_host = kind == "cut"
        if kind == "fetch" and asked is None:
            # A refusal, of the servers or the bridge. Bridge and broker may come again; until then they are asked.
            run, host, attempt = self._fetching.get(identity, ("", None, None))
            of_host = host is not None
            if not of_host or self._may_come(run, host, attempt):
                return
        if message.headers and message.headers.get("Status") == "503":
            content = {"reason": _NO_BRIDGE_OF_HOST if of_host else _NO_BRIDGE, "error": "BrokerError"}
            await self._answer(
                identity, encode_control("refused", content if asked is None else {**content, "id": asked})
            )
        else:
            await self._answer(identity, message.data)
