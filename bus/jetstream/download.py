"""Downloads recordings from NATS into files, for commands that need one."""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from offloop.bus.errors import BrokerError
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.jetstream.stream_bytes import StreamBytes
from offloop.bus.net.nats_addresses import no_such_run
from offloop.bus.protocol.frames import check_run_name

_PIECE = 256 * 1024
_PAUSE_SECONDS = 0.01
_SILENCE_SECONDS = 30.0  # longest time without any data


def download(address: str, run: str, attempt: int, path: Path) -> int:
    """Write an attempt's recording from NATS to ``path``; return its size in bytes.

    Bytes that the stream has lost become zeros, which readers report as damage. BrokerError means that the servers do
    not answer, or nothing is left."""
    connection = NatsConnection.at(address)
    connection.runs(run)
    offset = found = 0

    def refusal(begin: int, reason: object) -> BrokerError:
        return BrokerError(
            f"the recording of run {run!r} cannot be downloaded from byte {begin:,} on: {reason}", address=address
        )

    stored = StreamBytes(connection, run, attempt)
    with contextlib.closing(stored), path.open("wb") as file:
        heard, why = time.monotonic(), ""
        while True:
            data = stored.read_at(offset, _PIECE)
            offset += file.write(data)
            found += len(data)
            if data:
                heard = time.monotonic()
            elif stored.hole is not None:
                offset, why = file.truncate(stored.hole.end), stored.hole.why
                file.seek(offset)
            elif stored.refusal:
                raise refusal(offset, stored.refusal)
            elif stored.at_end:
                if offset and not found:
                    raise refusal(0, why)
                return offset
            elif time.monotonic() - heard > _SILENCE_SECONDS:
                connection.check()
                raise refusal(offset, f"NATS at {address} does not answer")
            else:
                time.sleep(_PAUSE_SECONDS)


@contextlib.contextmanager
def downloaded(address: str, run: str) -> Iterator[Path]:
    """Download the recording of a run's newest attempt into a temporary file for the block."""
    runs = NatsConnection.at(address).runs(check_run_name(run))
    if not runs:
        raise no_such_run(address, run)
    attempt = runs[0].attempt
    with tempfile.TemporaryDirectory(prefix="offloop-") as folder:
        path = Path(folder) / f"{run}-{attempt}.mcap"
        download(address, run, attempt, path)
        yield path
