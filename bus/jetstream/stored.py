"""Messages as the leader of a stream's servers has stored them, read one at a time: a stream has no consumers."""

import base64
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from offloop.bus.jetstream import names
from offloop.bus.jetstream.connection import API_SECONDS, NO_STREAM

if TYPE_CHECKING:
    from nats.aio.client import Client

_NO_MESSAGE = 10037
_MOST_OTHERS = 1000
"""How many messages back a range is looked for."""


class Stored(NamedTuple):
    """A message in a stream."""

    subject: str
    sequence: int
    headers: dict[str, str]
    data: bytes

    @property
    def offset(self) -> int | None:
        """Where the range of a file in it begins; ``None`` where it does not say."""
        value, final = self.headers.get(names.OFFSET, ""), self.headers.get(names.FINAL, "0")
        return int(value) if value.isdecimal() and final.isdecimal() else None

    @property
    def final(self) -> int | None:
        """Where the end of a closed file begins, if that is what it holds."""
        return int(self.headers[names.FINAL]) if names.FINAL in self.headers else None


class Unstored(NamedTuple):
    """That there is no such message."""

    has_stream: bool
    """Whether there is such a stream."""


async def ask_api(client: "Client", subject: str, request: dict[str, Any]) -> dict[str, Any]:
    """Sends a request to JetStream's API, ``$JS.API.SUBJECT``; returns the response.

    Raises:
        nats.errors.Error: the servers do not answer, or refuse.
    """
    from nats.js.errors import APIError

    message = await client.request(f"$JS.API.{subject}", json.dumps(request).encode(), timeout=API_SECONDS)
    response: dict[str, Any] = json.loads(message.data)
    if "error" in response:
        raise APIError.from_error(response["error"])
    return response


async def get(client: "Client", stream: str, **request: object) -> Stored | Unstored:
    """The message with the sequence number ``seq``; with ``next_by_subj`` the first one of that subject from there on;
    with ``last_by_subj`` alone its last one.

    Raises:
        nats.errors.Error: the servers do not answer, or refuse.
    """
    from nats.js.errors import APIError

    try:
        found = (await ask_api(client, f"STREAM.MSG.GET.{stream}", request))["message"]
    except APIError as error:
        if error.err_code not in (_NO_MESSAGE, NO_STREAM):
            raise
        return Unstored(has_stream=error.err_code == _NO_MESSAGE)
    headers = dict(_headers(base64.b64decode(found.get("hdrs", ""))))
    return Stored(found["subject"], found["seq"], headers, base64.b64decode(found.get("data", "")))


def _headers(block: bytes) -> Iterator[tuple[str, str]]:
    for line in block.decode(errors="replace").split("\r\n")[1:]:
        name, colon, value = line.partition(":")
        if colon:
            yield name, value.strip()


async def last_range(client: "Client", stream: str, subject: str) -> tuple[Stored | Unstored, int]:
    """The last message of a subject that is a range of a file, and the sequence number of its last message of any kind:
    a reader can have servers store an answer to a request there, and a host anything."""
    last = found = await get(client, stream, last_by_subj=subject)
    if isinstance(last, Unstored):
        return last, 0
    for before in range(last.sequence - 1, max(0, last.sequence - _MOST_OTHERS), -1):
        if isinstance(found, Stored) and found.subject == last.subject and found.offset is not None:
            return found, last.sequence
        found = await get(client, stream, seq=before)
    is_range = isinstance(found, Stored) and found.subject == last.subject and found.offset is not None
    return (found if is_range else Unstored(has_stream=True)), last.sequence


async def list_subjects(client: "Client", stream: str, pattern: str) -> list[str]:
    """The subjects of messages in a stream; none where there is no such stream.

    Raises:
        nats.errors.Error: the servers do not answer, or refuse.
    """
    from nats.js.errors import APIError

    found: dict[str, int] = {}
    total = 1
    while len(found) < total:
        request = {"subjects_filter": pattern, "offset": len(found)}
        try:
            response = await ask_api(client, f"STREAM.INFO.{stream}", request)
        except APIError as error:
            if error.err_code != NO_STREAM:
                raise
            return []
        subjects = response["state"].get("subjects")
        if not subjects:
            break
        found |= subjects
        total = response.get("total", 0)
    return list(found)
