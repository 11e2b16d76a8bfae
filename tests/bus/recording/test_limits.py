"""Recordings made to waste memory, time or output: what every command does with them stays in proportion."""

import json
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest
import zstandard
from documents import ROOT
from recorded_runs import Entry, write_recording

from offloop.bus.recording import records
from offloop.bus.recording.reader import RecordingReader
from offloop.bus.recording.writer import RecordingWriter

MIB = 1 << 20
MOST_MEMORY = 420 * MIB
MOST_LINES = 2 * 101 + 20
"""Damage is found by the reader of the file and by the reader of the events: a hundred places each."""
EMPTY = records.MESSAGE.pack(records.OP_MESSAGE, 22, 1, 0, 0, 0)
CHANNEL = records.encode(records.channel_record(1, "r/batch_end/0"))


def front(path: Path) -> bytes:
    scratch = path.with_suffix(".front")
    RecordingWriter(scratch, "r", 1)
    begin = scratch.read_bytes()
    scratch.unlink()
    return begin


def chunk(data: bytes, *, checksum: int | None = None) -> bytes:
    packed = zstandard.ZstdCompressor(level=3).compress(data)
    record = bytearray(records.encode_chunk(data, packed, 0, 0))
    if checksum is not None:
        record[33:37] = checksum.to_bytes(4, "little")
    return bytes(record)


def mark_of_lists(path: Path) -> None:
    """24 million empty lists in a check record whose checksum holds."""
    lists = b"\xdd" + (24_000_000).to_bytes(4, "big") + b"\x90" * 24_000_000
    payload = b"\x98" + b"".join(map(msgpack.packb, (0, 0, 0, 0, {}, {}, {}))) + lists
    checksum = zlib.crc32(payload, zlib.crc32(len(payload).to_bytes(4, "little")))
    head = records.CHECK_SIGN + checksum.to_bytes(4, "little") + len(payload).to_bytes(4, "little")
    path.write_bytes(front(path) + records.HEAD.pack(records.OP_CHECK, len(head) + len(payload)) + head + payload)


def empty_messages(path: Path) -> None:
    """8.6 million messages in one chunk of 25 kB, and again in chunks of 30 MB."""
    path.write_bytes(front(path) + chunk(CHANNEL + EMPTY * 8_600_000) + chunk(CHANNEL + EMPTY * 900_000) * 4)


def many_places(path: Path) -> None:
    """3,000 places that are damaged, with a sound chunk between each two."""
    whole = chunk(CHANNEL + EMPTY)
    path.write_bytes(front(path) + (whole + b"\x77" * 9) * 3_000)


def many_gaps(path: Path) -> None:
    """Every second of 4,000 events is missing."""
    write_recording(path, [Entry(batch=n) for n in range(4_000)], missing=range(0, 4_000, 2), chunk=500)


def wide_channels(path: Path) -> None:
    """24 topics of 6 MB, of which a few hundred bytes each are in the file."""
    path.write_bytes(front(path) + chunk(records.encode(records.channel_record(1, "r/" + "x" * 6 * MIB))) * 24)


FILES: list[Callable[[Path], None]] = [mark_of_lists, empty_messages, many_gaps, wide_channels]


MEASURED = """
import json, resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps([done.returncode, done.stdout.splitlines(), most]))
"""


def check(*command: object, limit: int = MOST_MEMORY) -> list[str]:
    """Return the lines that a Python process prints of such a recording, within bounds."""
    # In between is a small one: a process begins with the most memory of the one that starts it.
    measured = [sys.executable, "-S", "-c", MEASURED, sys.executable, *map(str, command)]
    done = subprocess.run(measured, capture_output=True, text=True, check=True, cwd=ROOT)
    code, lines, most = json.loads(done.stdout)
    assert code in (0, 1, 2, 3, 4), lines
    assert not [line for line in lines if "Traceback" in line], lines
    assert most < limit, f"{most / MIB:.0f} MiB"
    assert len(lines) < MOST_LINES
    assert sum(map(len, lines)) < 64 * 1024, [line[:200] for line in lines]
    return list(lines)


CONTINUED = """
import sys; from pathlib import Path; from offloop.bus.recording.writer import RecordingWriter
RecordingWriter(Path(sys.argv[1]), 'r', 1, resume=True).close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("make", FILES, ids=lambda make: make.__name__)
def test_memory_and_output_stay_in_proportion_to_the_file(tmp_path, make):
    path = tmp_path / "a.mcap"
    make(path)
    # No more than some of the topics may be in memory at once.
    limit = 180 * MIB if make is wide_channels else MOST_MEMORY
    check("-m", "offloop.bus", "show", path, limit=limit)
    lines = check("-m", "offloop.bus", "convert", path, "-o", tmp_path / "recovered.mcap", limit=limit)
    if make is many_gaps:
        assert "and 1,900 more ranges of events that are lost" in lines
    assert check("-c", CONTINUED, path) == []


def test_damage_is_listed_up_to_a_bound_and_then_counted(tmp_path):
    path = tmp_path / "a.mcap"
    many_places(path)
    with RecordingReader(path) as reader:
        for _ in reader.read():
            pass
        assert len(reader.damage) == 101
        assert reader.damage[0].startswith(f"{path} is damaged at offset")
        assert reader.damage[-1] == "and 2,900 more places like these"
