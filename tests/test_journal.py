"""The record: every whole chunk is read, whatever happened to the rest of the file."""

import mcap.reader
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus import Recording, RecordingError, RunDirectoryError
from bus.journal import JournalReader, JournalWriter
from bus.wire import Topic, event_encoder, pack_map


def frames(count, start=1):
    topic = Topic("r", "batch_end", 0)
    encode = event_encoder(topic, 1)
    for seq in range(start, start + count):
        frame = encode(seq, seq, seq, (0, 0, seq) + (0,) * 11, None, {"loss": 1 / seq}, pack_map({}))
        yield topic.encode()[:-1], seq, frame[frame.index(b"\0") + 1 :]


def write(path, chunks, close=True):
    """A recording with so many events in each chunk; returns the file's size after each flush."""
    writer = JournalWriter(path, "r", 1)
    sizes, seq = [], 1
    for count in chunks:
        for topic, number, body in frames(count, seq):
            writer.append(topic, number, number, body)
        seq += count
        writer.flush()
        sizes.append(path.stat().st_size)
    if close:
        writer.close()
    else:
        writer._file.close()
    return sizes


def test_what_was_written_is_read_in_order(tmp_path):
    write(tmp_path / "a.mcap", [3, 4])
    recording = Recording(tmp_path / "a.mcap")
    assert [snapshot.seq for snapshot in recording] == list(range(1, 8))
    assert (recording.run_name, recording.attempt, recording.damage) == ("r", 1, None)


def test_other_tools_read_it(tmp_path):
    write(tmp_path / "a.mcap", [3, 4])
    with open(tmp_path / "a.mcap", "rb") as file:
        reader = mcap.reader.make_reader(file)
        rows = [(channel.topic, message.sequence, message.log_time) for _, channel, message in reader.iter_messages()]
        assert reader.get_summary().statistics.message_count == 7
    assert rows == [("r/batch_end/0", seq, seq) for seq in range(1, 8)]


def test_a_file_cut_at_any_byte_gives_every_whole_chunk_and_says_where_it_ends(tmp_path):
    write(tmp_path / "a.mcap", [2, 3, 4], close=False)
    data = (tmp_path / "a.mcap").read_bytes()
    with JournalReader(tmp_path / "a.mcap") as reader:
        ends = [(reader.position, len(chunk)) for chunk in reader.read()]
    begin = data.index(b"offloop", 30)
    without_damage = 0
    for length in range(begin + 100, len(data)):
        (tmp_path / "cut.mcap").write_bytes(data[:length])
        recording = Recording(tmp_path / "cut.mcap")
        assert len(list(recording)) == sum(count for end, count in ends if end <= length)
        assert recording.ending.status == "lost"
        assert recording.damage is None or "ends within" in recording.damage
        without_damage += recording.damage is None
    # Only a cut between two records leaves nothing torn: after each chunk and after its index.
    assert without_damage <= 2 * len(ends)


def test_a_reader_goes_on_where_it_stopped_while_the_file_grows(tmp_path):
    path = tmp_path / "a.mcap"
    writer = JournalWriter(path, "r", 1)
    with JournalReader(path) as reader:
        assert list(reader.read()) == []
        for begin in (1, 6, 11):
            for topic, seq, body in frames(5, begin):
                writer.append(topic, seq, seq, body)
            writer.flush()
            (chunk,) = reader.read()
            assert len(chunk) == 5
        writer.close()
        assert list(reader.read()) == []
        assert reader.finished


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_flipped_bit_costs_at_most_its_chunk_and_raises_nothing_else(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "flip.mcap"
    path.unlink(missing_ok=True)
    write(path, [5, 5, 5])
    spoilt = bytearray(path.read_bytes())
    spoilt[data.draw(st.integers(0, len(spoilt) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(spoilt)
    try:
        seqs = [snapshot.seq for snapshot in Recording(path)]
    except RecordingError:
        return
    assert seqs == sorted(set(seqs))
    assert set(seqs) <= set(range(1, 16))


def test_a_damaged_chunk_is_named_and_the_others_are_read(tmp_path):
    sizes = write(tmp_path / "a.mcap", [5, 5, 5])
    spoilt = bytearray((tmp_path / "a.mcap").read_bytes())
    spoilt[(sizes[0] + sizes[1]) // 2] ^= 0xFF
    (tmp_path / "a.mcap").write_bytes(spoilt)
    recording = Recording(tmp_path / "a.mcap")
    assert [snapshot.seq for snapshot in recording] == [*range(1, 6), *range(11, 16)]
    assert f"offset {sizes[0]}" in recording.damage
    assert recording.gaps == ((0, 6, 10),)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89MCAP0\r\n\x01\x05\0\0\0\0\0\0\0\x01\0\0\0x", b"\x00" * 1000])
def test_a_file_that_is_no_recording_is_refused(tmp_path, content):
    (tmp_path / "a.mcap").write_bytes(content)
    with pytest.raises(RecordingError, match="not a recording"):
        Recording(tmp_path / "a.mcap")


def test_what_is_missing_or_a_folder_is_refused(tmp_path):
    with pytest.raises(RecordingError, match="there is no recording"):
        Recording(tmp_path / "nothing.mcap")
    with pytest.raises(RecordingError, match="no run"):
        Recording(tmp_path)


def test_a_recording_is_never_written_over(tmp_path):
    write(tmp_path / "a.mcap", [1])
    before = (tmp_path / "a.mcap").read_bytes()
    with pytest.raises(RunDirectoryError, match="cannot be created"):
        JournalWriter(tmp_path / "a.mcap", "r", 1)
    assert (tmp_path / "a.mcap").read_bytes() == before
