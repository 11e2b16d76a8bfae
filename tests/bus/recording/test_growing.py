"""What a bridge, and a reader that begins within a file, know of it by the heads of its records."""

from pathlib import Path

import pytest
from recording_files import append

from offloop.bus.recording.growing import GrowingRecording
from offloop.bus.recording.records import next_check_record
from offloop.bus.recording.writer import RecordingWriter

PARTS = 6


@pytest.fixture
def parts(tmp_path: Path) -> tuple[Path, list[int]]:
    """Return a recording that is being written, and the offsets at which its parts end."""
    path = tmp_path / "recording-1.mcap"
    writer = RecordingWriter(path, "r", 1)
    ends = [writer.size]
    for seq in range(1, PARTS + 1):
        append(writer, seq)
        writer.flush()
        ends.append(writer.size)
    return path, ends


def test_a_growing_file_is_read_up_to_its_last_complete_check_record(parts: tuple[Path, list[int]]) -> None:
    path, ends = parts
    whole, growing = path.read_bytes(), None
    for size in range(0, len(whole) + 1, 7):
        path.write_bytes(whole[:size])
        growing = growing or GrowingRecording(path)
        expected = max((end for end in ends if end <= size), default=0)
        assert growing.look() == expected
        assert GrowingRecording(path).look() == expected
    assert growing is not None


def test_a_check_record_behind_damage_is_found(parts: tuple[Path, list[int]]) -> None:
    path, ends = parts
    whole = path.read_bytes()
    for place in range(ends[1], ends[2]):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        growing = GrowingRecording(path)
        assert growing.look() == ends[-1]
        assert growing.check is not None
        assert growing.check.total == PARTS


def test_a_reader_begins_at_the_check_record_behind_an_offset(parts: tuple[Path, list[int]]) -> None:
    path, ends = parts
    for number, begin in enumerate(ends[:-1], 1):
        found = next_check_record(path, begin)
        assert found is not None
        assert found.check is not None
        assert (found.end, found.check.total, found.check.positions[0].seq) == (ends[number], number, number)
    assert next_check_record(path, ends[-1]) is None


def test_a_part_that_replaces_a_footer_is_found(parts: tuple[Path, list[int]]) -> None:
    path, ends = parts
    RecordingWriter(path, "r", 1, resume=True).close()
    growing = GrowingRecording(path)
    before = growing.look()
    assert before > ends[-1]
    writer = RecordingWriter(path, "r", 1, resume=True)
    append(writer, PARTS + 1)
    writer.flush()
    assert growing.look() == writer.size
    assert growing.check is not None
    assert growing.check.positions[0].seq == PARTS + 1
    growing.close()
    writer.close()
