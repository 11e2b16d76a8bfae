"""Recordings: complete chunks are read from any file, and writing continues after a crash and a full disk."""

import itertools
import multiprocessing
import os
import random
from pathlib import Path

import mcap.reader
import psutil
import pytest
from helpers import wait_for
from hypothesis import given, settings
from hypothesis import strategies as st
from recording_files import BATCH_END, TOPICS, append, body, crash, file_limit, official, read

from offloop.bus import ProtocolError, Recording, RecordingError, RunDirectoryError
from offloop.bus.recording import writer as writers
from offloop.bus.recording.reader import RecordingReader
from offloop.bus.recording.records import SIGNS, Hole, Position
from offloop.bus.recording.writer import RecordingWriter


def write(path: Path, chunks: list[int], close: bool = True) -> list[int]:
    """Write chunks of so many events; return the offset at which each ends, with its check record."""
    writer = RecordingWriter(path, "r", 1)
    sizes, seq = [], 1
    for count in chunks:
        for _ in range(count):
            append(writer, seq)
            seq += 1
        writer.flush()
        sizes.append(writer.size)
    if close:
        writer.close()
    else:
        crash(writer)
    return sizes


def seqs(path: Path) -> list[int]:
    return [snapshot.seq for snapshot in Recording(path)]


# -- what is written is read ------------------------------------------------------------------------------------------


def test_other_mcap_tools_read_a_recording(tmp_path):
    path = tmp_path / "a.mcap"
    writer = RecordingWriter(path, "r", 1)
    written = []
    for seq in range(1, 40):
        written.append(append(writer, seq, TOPICS[seq % 5]))
        if seq % 7 == 0:
            writer.flush()
    writer.close()
    assert official(path) == official(path, seeking=False) == written == read(path)


def test_a_recording_has_mcap_metadata_and_is_private(tmp_path):
    write(tmp_path / "a.mcap", [3, 4])
    assert (tmp_path / "a.mcap").stat().st_mode & 0o777 == 0o600
    with open(tmp_path / "a.mcap", "rb") as file:
        reader = mcap.reader.make_reader(file, validate_crcs=True)
        assert reader.get_header().profile == "offloop"
        metadata = {"run": "r", "attempt": "1", "protocol_version": "1"}
        assert [(entry.name, entry.metadata) for entry in reader.iter_metadata()] == [("offloop", metadata)]
        found = list(reader.iter_messages(topics=["r/batch_end/0"], starting_at=3, ending_at=5))
    assert [message.sequence for _, _, message in found] == [3, 4, 5]
    # One of nothing is whole too.
    write(tmp_path / "b.mcap", [])
    assert official(tmp_path / "b.mcap") == read(tmp_path / "b.mcap") == []


def test_a_large_chunk_is_written_without_a_flush(tmp_path):
    writer = RecordingWriter(tmp_path / "a.mcap", "r", 1)
    for seq in range(1, 4):
        writer.append(BATCH_END, seq, seq, seq, os.urandom(700_000))
    assert [len(chunk) for chunk in RecordingReader(tmp_path / "a.mcap").read()] == [2]
    assert (writer.written, writer.positions[0].seq) == (3, 2)
    writer.close()


def write_at_random(path: Path, count: int) -> None:
    """Write with many flushes, and with kills within some of them."""
    generator = random.Random(3)
    writer = RecordingWriter(path, "r", 1)
    front = path.stat().st_size
    for seq in range(1, count + 1):
        writer.append(BATCH_END, seq, seq, seq, generator.randbytes(generator.randint(1, 3000)))
        if generator.random() < 0.1:
            writer.flush()
        if generator.random() < 0.005:
            writer.flush()
            crash(writer)
            with open(path, "ab") as file:
                file.write(path.read_bytes()[front : front + generator.randint(1, 300)])
            writer = RecordingWriter(path, "r", 1, resume=True)
    writer.close()


def test_a_reader_in_another_process_reads_everything_once_and_no_damage(tmp_path):
    path = tmp_path / "a.mcap"
    process = multiprocessing.get_context("fork").Process(target=write_at_random, args=(path, 4_000))
    process.start()
    try:
        wait_for(path.exists, "the recording")
        count = 0
        with RecordingReader(path) as reader:
            while not reader.finished:
                assert process.exitcode in (None, 0)
                count += sum(len(chunk) for chunk in reader.read())
                assert reader.damage == []
    finally:
        process.join()
    assert (count, reader.lost) == (4_000, False)


class Source:
    """A recording that a reader does not read from a file."""

    is_coming = False
    hole: Hole | None = None

    def forget(self, offset: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""


class Copied(Source):
    """A recording of which a copy is read that grows with :meth:`fetch`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.copy = b""

    def fetch(self) -> None:
        self.copy += self.path.read_bytes()[len(self.copy) :]

    def read_at(self, offset: int, size: int) -> bytes:
        return self.copy[offset : offset + size]

    def forget(self, offset: int) -> None:
        self.copy = self.copy[:offset]


def test_a_recording_that_arrives_in_pieces_is_read_once_without_damage(tmp_path):
    write(tmp_path / "a.mcap", [2, 3, 4])
    data = (tmp_path / "a.mcap").read_bytes()
    for step in (1, 13, 500):
        source, found = Copied(tmp_path / "a.mcap"), []
        reader = RecordingReader(source, "the recording from afar")
        while not reader.finished:
            found += [record for chunk in reader.read() for record in chunk]
            assert (reader.damage, reader.cut is None or "ends within" in reader.cut) == ([], True)
            source.copy = data[: len(source.copy) + step]
        assert found == read(tmp_path / "a.mcap")


def test_a_copied_torn_tail_that_is_overwritten_later_is_not_damage(tmp_path):
    path = tmp_path / "a.mcap"
    write(path, [2, 3], close=False)
    data = path.read_bytes()
    # A broker is killed within a chunk, and a part of that is copied before the next broker takes over.
    path.write_bytes(data + data[data.index(b"\x04\x00\x00\x00zstd") - 37 :][:100])
    source = Copied(path)
    source.fetch()
    reader = RecordingReader(source, "the recording from afar")
    found = [record for chunk in reader.read() for record in chunk]
    resumed = RecordingWriter(path, "r", 1, resume=True)
    for seq in range(6, 10):
        append(resumed, seq)
        resumed.flush()
    resumed.close()
    for _ in range(2):
        source.fetch()
        found += [record for chunk in reader.read() for record in chunk]
    assert (found, reader.damage, reader.finished) == (read(path), [], True)


class Holed(Source):
    """A copy of a recording of which a part is lost, as is known when it is asked for."""

    def __init__(self, data: bytes, begin: int, end: int) -> None:
        self._data, self._begin = data, begin
        self.hole = Hole(end, "lost by all who had them")

    def read_at(self, offset: int, size: int) -> bytes:
        if self.hole is not None and offset < self.hole.end:
            assert offset <= self._begin, "it searches what is lost"
            return self._data[offset : min(offset + size, self._begin)]
        self.hole = None
        return self._data[offset : offset + size]


@pytest.mark.parametrize("within", [0, 30])
@pytest.mark.parametrize(("first", "last"), [(0, 1), (0, 3), (1, 2), (1, 4), (3, 5)])
def test_a_lost_range_of_a_copy_is_skipped_and_counted(tmp_path, first, last, within):
    """Lose parts at the front, in the middle and at the end, also from within a record into another one."""
    counts = [2, 3, 4, 5, 6]
    ends = [0, *write(tmp_path / "a.mcap", counts)]
    data = (tmp_path / "a.mcap").read_bytes()
    end = ends[last] + within
    reader = RecordingReader(Holed(data, ends[first] + (within if first else 0), end), "the copy")
    found = [record for chunk in reader.read() for record in chunk]
    whole = [number for number in range(len(counts)) if not first <= number < last + (within > 0)]
    expected = read(tmp_path / "a.mcap")
    bounds = [sum(counts[:number]) for number in range(len(counts) + 1)]
    assert found == [record for number in whole for record in expected[bounds[number] : bounds[number + 1]]]
    named = "; ".join(reader.damage)
    assert f" to {end:,}: lost by all who had them" in named
    if last < len(counts):
        assert f"the copy has lost {sum(counts) - len(found)} messages" in named
    assert reader.lost


# -- damage -----------------------------------------------------------------------------------------------------------


def test_a_file_cut_at_any_byte_keeps_every_complete_chunk_and_reports_the_cut(tmp_path):
    write(tmp_path / "a.mcap", [2, 3, 4], close=False)
    data = (tmp_path / "a.mcap").read_bytes()
    begins = [sign.start() - 37 for sign in SIGNS.finditer(data) if sign[0].endswith(b"zstd")]
    ends = [
        (begin + 9 + int.from_bytes(data[begin + 1 : begin + 9], "little"), count)
        for begin, count in zip(begins, [2, 3, 4], strict=True)
    ]
    between_records = 0
    for length in range(begins[0], len(data) + 1):
        (tmp_path / "cut.mcap").write_bytes(data[:length])
        with RecordingReader(tmp_path / "cut.mcap") as reader:
            found = sum(len(chunk) for chunk in reader.read())
        assert found == sum(count for end, count in ends if end <= length)
        assert reader.damage == []
        assert reader.lost == any(begin < length < end for begin, (end, _) in zip(begins, ends, strict=True))
        assert reader.cut is None or begins[0] <= int(reader.cut.rsplit(" ", 1)[1]) < length
        between_records += reader.cut is None
    # Only a cut between records leaves nothing torn: before the first chunk, after each and its check record.
    assert between_records == 1 + 3 * 2


def test_a_damaged_opcode_or_length_loses_nothing(tmp_path):
    sizes = write(tmp_path / "a.mcap", [5, 5, 5])
    original = (tmp_path / "a.mcap").read_bytes()
    for place, bit in itertools.product((0, 1, 3, 8), range(8)):
        spoilt = bytearray(original)
        spoilt[sizes[0] + place] ^= 1 << bit
        (tmp_path / "a.mcap").write_bytes(spoilt)
        with RecordingReader(tmp_path / "a.mcap") as reader:
            assert [len(chunk) for chunk in reader.read()] == [5, 5, 5]
        assert not reader.lost
        assert any(f"offset {sizes[0]}" in line for line in reader.damage)


def test_a_record_that_claims_too_much_takes_no_memory(tmp_path):
    sizes = write(tmp_path / "a.mcap", [5, 5])
    spoilt = bytearray((tmp_path / "a.mcap").read_bytes())
    spoilt[sizes[0] + 17 + 9 : sizes[0] + 17 + 16] = b"\xff" * 7  # the uncompressed size
    (tmp_path / "a.mcap").write_bytes(spoilt)
    with RecordingReader(tmp_path / "a.mcap") as reader:
        assert [len(chunk) for chunk in reader.read()] == [5]
    assert "claims more than" in reader.damage[0]


def test_files_that_are_not_recordings_are_refused(tmp_path):
    for content in (b"", b"hello", b"\x89MCAP0\r\n\x01\x05\0\0\0\0\0\0\0\x01\0\0\0x", b"\x00" * 1000):
        (tmp_path / "a.mcap").write_bytes(content)
        with pytest.raises(RecordingError, match=r"is not a recording|is empty: nothing was recorded in it"):
            Recording(tmp_path / "a.mcap")
    with pytest.raises(RecordingError, match="there is no recording"):
        Recording(tmp_path / "nothing.mcap")
    with pytest.raises(RecordingError, match="is not a run"):
        Recording(tmp_path)
    with pytest.raises(RecordingError, match="not a file"):
        RecordingReader(tmp_path)


# -- going on after a crash -------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_appended_events_survive_crashes_and_torn_tails(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "resumed.mcap"
    path.unlink(missing_ok=True)
    writer = RecordingWriter(path, "r", 1)
    kept, unflushed, positions = [], [], {}
    for step in data.draw(st.lists(st.sampled_from(["append", "append", "append", "flush", "crash", "tear", "close"]))):
        if step == "append":
            topic = data.draw(st.sampled_from(TOPICS[:6]))
            unflushed.append((topic, append(writer, len(kept) + len(unflushed) + 1, topic)))
            continue
        if step in ("flush", "close"):
            writer.flush()
            for topic, record in unflushed:
                kept.append(record)
                positions[topic.rank] = Position(len(kept), len(kept), len(kept), False)
        unflushed = []
        if step == "flush":
            continue
        whole = writer.size
        writer.close() if step == "close" else crash(writer)
        if step == "tear":
            # A write that the crash cut off: of a chunk, or what the file system made of it.
            with open(path, "ab") as file:
                file.write(data.draw(st.sampled_from([b"\0" * 50, path.read_bytes()[:100][60:], b"\x06\xff\0\0"])))
        writer = RecordingWriter(path, "r", 1, resume=True)
        assert writer.size >= whole
        assert writer.positions == positions
        assert writer.written == len(kept)
    writer.flush()
    kept += [record for _, record in unflushed]
    assert read(path) == kept
    writer.close()
    assert read(path) == kept
    assert official(path) == official(path, seeking=False) == kept


def test_a_file_cut_at_any_byte_of_its_last_chunk_can_be_resumed(tmp_path):
    sizes = write(tmp_path / "a.mcap", [2, 3, 4], close=False)
    data = (tmp_path / "a.mcap").read_bytes()
    for length in range(sizes[1], len(data) + 1):
        path = tmp_path / f"cut-{length}.mcap"
        path.write_bytes(data[:length])
        # A reader that has read what is there continues with what comes in the place of what was torn.
        with RecordingReader(path) as reader:
            assert sum(map(len, reader.read())) in (5, 9)
            writer = RecordingWriter(path, "r", 1, resume=True)
            kept = 9 if length == len(data) else 5
            assert writer.positions == {0: Position(kept, kept, kept, False)}
            last = append(writer, kept + 1, TOPICS[1])
            writer.close()
            after = [record for chunk in reader.read() for record in chunk]
            assert (after, reader.damage, reader.finished) == ([last], [], True)
        found = read(path)
        assert official(path) == official(path, seeking=False) == found
        assert (len(found), found[-1]) == (kept + 1, last)
        path.unlink()


def test_a_file_cut_within_its_front_is_started_over(tmp_path):
    path = tmp_path / "a.mcap"
    write(path, [], close=False)
    front = path.read_bytes()
    for length in range(len(front)):
        path.write_bytes(front[:length])
        RecordingWriter(path, "r", 1, resume=True).close()
        assert official(path) == []


def test_resuming_keeps_chunks_behind_damage(tmp_path):
    sizes = write(tmp_path / "a.mcap", [5, 5, 5])
    for place in (1, 60):
        spoilt = bytearray((tmp_path / "a.mcap").read_bytes())
        spoilt[sizes[0] + place] ^= 0xFF
        (tmp_path / "b.mcap").write_bytes(spoilt)
        writer = RecordingWriter(tmp_path / "b.mcap", "r", 1, resume=True)
        append(writer, 16)
        writer.close()
        # Damage to its length costs no chunk, damage to its content the chunk.
        assert seqs(tmp_path / "b.mcap") == [seq for seq in range(1, 17) if place == 1 or not 6 <= seq <= 10]


def test_a_recording_of_another_run_cannot_be_resumed(tmp_path):
    path = tmp_path / "a.mcap"
    write(path, [2])
    before = path.read_bytes()
    for run, attempt in (("s", 1), ("r", 2)):
        with pytest.raises(RecordingError, match=f"not run '{run}', attempt {attempt}"):
            RecordingWriter(path, run, attempt, resume=True)
    # Nor is a recording written over.
    with pytest.raises(RunDirectoryError, match="cannot be created"):
        RecordingWriter(path, "r", 1)
    assert path.read_bytes() == before
    (tmp_path / "b.mcap").write_bytes(b"something else")
    with pytest.raises(RecordingError, match="not a recording"):
        RecordingWriter(tmp_path / "b.mcap", "r", 1, resume=True)
    with pytest.raises(RunDirectoryError, match="cannot be opened"):
        RecordingWriter(tmp_path / "c.mcap", "r", 1, resume=True)


# -- going on after a full disk ---------------------------------------------------------------------------------------


def test_a_full_disk_stops_the_writer_until_space_is_freed(tmp_path):
    path = tmp_path / "a.mcap"
    writer = RecordingWriter(path, "r", 1)
    append(writer, 1)
    writer.flush()
    before, positions = writer.size, writer.positions
    with file_limit(before + 100):
        append(writer, 2, TOPICS[1])
        with pytest.raises(OSError, match="large"):
            writer.flush()
        assert writer.failed
        assert (writer.size, writer.positions, writer.written) == (before, positions, 1)
        # Readers never see a part of what was not written.
        assert path.stat().st_size == before
        with pytest.raises(RunDirectoryError, match="cannot be written"):
            append(writer, 3)
        with pytest.raises(RunDirectoryError, match="cannot be written"):
            writer.flush()
    with file_limit(before), pytest.raises(OSError, match="large"):
        writer.recover()
    assert writer.failed
    writer.recover()
    assert not writer.failed
    append(writer, 3, TOPICS[1])
    writer.close()
    assert [recorded for _, recorded in official(path)] == [body(TOPICS[0], 1), body(TOPICS[1], 3)]
    with RecordingReader(path) as reader:
        assert [len(chunk) for chunk in reader.read()] == [1, 1]
    assert (reader.damage, reader.lost) == ([], False)


def test_a_disk_that_fails_during_append_or_close_leaves_a_valid_file_and_nothing_open(tmp_path):
    path = tmp_path / "a.mcap"
    writer = RecordingWriter(path, "r", 1)
    append(writer, 1)
    writer.flush()
    with file_limit(writer.size + 10):
        with pytest.raises(OSError, match="large"):
            writer.append(BATCH_END, 2, 2, 2, os.urandom(2_000_000))
        assert writer.failed
        writer.close()
        other = RecordingWriter(tmp_path / "b.mcap", "r", 1)
        append(other, 1)
        with pytest.raises(OSError, match="large"):
            other.close()
    assert len(read(path)) == 1
    with file_limit(20), pytest.raises(RunDirectoryError, match="cannot be created"):
        RecordingWriter(tmp_path / "c.mcap", "r", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mcap", "b.mcap"]
    opened = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    assert not [name for name in opened if name.startswith(str(tmp_path))]


def test_a_missing_file_stops_the_writer_until_it_is_back(tmp_path):
    path = tmp_path / "a.mcap"
    writer = RecordingWriter(path, "r", 1)
    path.rename(tmp_path / "elsewhere.mcap")
    append(writer, 1)
    with pytest.raises(RunDirectoryError, match="gone"):
        writer.flush()
    with pytest.raises(FileNotFoundError):
        writer.recover()
    (tmp_path / "elsewhere.mcap").rename(path)
    writer.recover()
    append(writer, 1)
    writer.close()
    assert len(official(path)) == 1


def test_with_closes_the_file_of_an_unfinished_iteration(tmp_path):
    path = (tmp_path / "a.mcap").resolve()
    write(path, [1, 1, 1])

    def is_open():
        return path in [Path(one.path) for one in psutil.Process().open_files()]

    with Recording(path) as recording:
        iteration = iter(recording)
        next(iteration)
        assert is_open()
    assert not is_open()
    recording.close()
    assert len(list(recording)) == 3
    assert not is_open()


def test_more_topics_than_a_file_may_hold_are_refused_by_name(tmp_path, monkeypatch):
    assert writers.MAX_TOPICS == 0xFFFF
    monkeypatch.setattr(writers, "MAX_TOPICS", 100)
    writer = RecordingWriter(tmp_path / "a.mcap", "r", 1)
    for number in range(100):
        writer.append(f"r/event_{number}/0".encode(), 1, 1, 1, b"")
    with pytest.raises(ProtocolError, match="event_100"):
        writer.append(b"r/event_100/0", 1, 1, 1, b"")
    writer.close()
    assert len(read(tmp_path / "a.mcap")) == 100
