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
    bytes that is.

    Raises:
        BrokerError: no broker answers, or it refuses: the message says from which byte on.
        OSError: the file cannot be written.
    """
    client = RequestClient(address, security)
    offset = 0
    try:
        with path.open("wb") as file:
            while True:
                try:
                    answer = client("fetch", {"run": run, "attempt": attempt, "offset": offset})
                except BrokerError as error:
                    raise BrokerError(
                        f"the recording of run {run!r} cannot be had from byte {offset:,} on: {error}", address=address
                    ) from None
                data = answer.get("data")
                if not isinstance(data, bytes):
                    raise BrokerError(f"what {address} answers is not a part of a recording", address=address)
                if not data:
                    return offset
                offset += file.write(data)
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
