"""Recordings of a broker elsewhere, as files: with them works here whatever works with a run of this machine."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from offloop.bus.errors import BrokerError, RunNotFoundError
from offloop.bus.net.curve import ClientSecurity
from offloop.bus.net.nats_addresses import how_to_list, what_is_at
from offloop.bus.net.requests import RequestClient
from offloop.bus.protocol.frames import check_run_name


def download(address: str, run: str, attempt: int, path: Path, security: ClientSecurity | None = None) -> int:
    """Writes the recording of an attempt to ``path``, byte for byte as far as the broker has it, and returns how many
    bytes that is. For NATS servers, which :class:`offloop.bus.jetstream.gateway.Gateway` stands for, it is put together
    from the stream, and what that lacks comes from the run's host. Bytes that both have lost are zeros: whatever reads
    the file reports them as damage, by their offset.

    Raises:
        BrokerError: no broker answers, or it refuses: the message says from which byte on; or nothing of it is left.
        OSError: the file cannot be written.
    """
    client = RequestClient(address, security)
    offset = found = 0
    why = ""

    def refusal(begin: int, reason: object) -> BrokerError:
        return BrokerError(
            f"the recording of run {run!r} cannot be had from byte {begin:,} on: {reason}", address=address
        )

    try:
        with path.open("wb") as file:
            while True:
                try:
                    answer = client("fetch", {"run": run, "attempt": attempt, "offset": offset})
                except BrokerError as error:
                    raise refusal(offset, error) from None
                data, lost = answer.get("data"), answer.get("lost")
                if not isinstance(data, bytes):
                    raise BrokerError(f"what {address} answers is not a part of a recording", address=address)
                if type(lost) is int and lost > offset:
                    offset, why = file.truncate(lost), str(answer.get("reason"))
                    file.seek(offset)
                elif not data:
                    if offset and not found:
                        raise refusal(0, why)
                    return offset
                else:
                    offset += file.write(data)
                    found += len(data)
    finally:
        client.close()


@contextlib.contextmanager
def downloaded(address: str, run: str, security: ClientSecurity | None = None) -> Iterator[Path]:
    """The recording of a run's newest attempt in a temporary file, which is removed at the end of the block.

    Raises:
        RunNotFoundError: the broker has no such run.
        BrokerError: see :func:`download`.
    """
    client = RequestClient(address, security)
    try:
        listed = client("runs", {"run": check_run_name(run)}).get("runs")
    finally:
        client.close()
    found = listed[0] if isinstance(listed, list) and listed else None
    attempt = found.get("attempt") if isinstance(found, dict) else None
    if type(attempt) is not int:
        raise RunNotFoundError(f"{what_is_at(address)} has no run {run!r}: {how_to_list(address)}", run=run)
    with tempfile.TemporaryDirectory(prefix="offloop-") as folder:
        path = Path(folder) / f"{run}-{attempt}.mcap"
        download(address, run, attempt, path, security)
        yield path
