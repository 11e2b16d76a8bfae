"""Recovery: a damaged recording becomes a clean one with everything whole in it, and what was lost is named."""

import random
from pathlib import Path

import pytest
from recording_files import TOPICS, append, crash, official, read

from offloop.bus.recording.reader import Record, RecordingReader
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.tools.convert import convert


class Written:
    """A recording of two ranks, with what its chunks hold and where they stand."""

    def __init__(self, path: Path, *, finished: bool, chunks: int = 12) -> None:
        self.path = path
        self.chunks: list[tuple[int, int, list[Record]]] = []
        """Of each chunk where its record begins and ends, and its messages."""
        generator = random.Random(7)
        writer = RecordingWriter(path, "r", 1)
        self.front = writer.size
        seq = 0
        for number in range(chunks):
            begin, records = writer.size, []
            for _ in range(generator.randint(1, 12)):
                seq += 1
                records.append(append(writer, seq, TOPICS[generator.randrange(1 + min(number, 5))]))
            if number == chunks - 1:
                records += [append(writer, seq + 1, TOPICS[6]), append(writer, seq + 1, TOPICS[7])]
            writer.flush()
            self.chunks.append((begin, begin, records))
        self.data_end = writer.size
        if finished:
            writer.close()
        else:
            crash(writer)
        self.data = path.read_bytes()
        self.chunks = [
            (begin, begin + 9 + int.from_bytes(self.data[begin + 1 : begin + 9], "little"), records)
            for begin, _, records in self.chunks
        ]
        self.records = [record for _, _, records in self.chunks for record in records]

    def without_chunk_at(self, offset: int) -> list[Record]:
        """All messages but those of the chunk within which the offset is."""
        return [record for begin, end, records in self.chunks if not begin <= offset < end for record in records]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("finished", "flips"),
    [
        (True, 90),
        (False, 60),
        *(pytest.param(finished, 5000, marks=pytest.mark.soak) for finished in (True, False)),
    ],
)
def test_a_flipped_bit_costs_at_most_its_chunk_and_is_reported(tmp_path, finished, flips):
    written = Written(tmp_path / "a.mcap", finished=finished)
    spoilt, mended = tmp_path / "spoilt.mcap", tmp_path / "mended.mcap"
    generator = random.Random(1)
    losses = 0
    for _ in range(flips):
        offset = generator.randrange(len(written.data))
        data = bytearray(written.data)
        data[offset] ^= 1 << generator.randrange(8)
        spoilt.write_bytes(data)
        with RecordingReader(spoilt) as reader:
            found = [record for chunk in reader.read() for record in chunk]
        complete = found == written.records
        assert complete or found == written.without_chunk_at(offset), offset
        assert reader.lost is not complete, offset
        named = [*reader.damage, *([reader.cut] if reader.cut else [])]
        assert named or offset >= written.data_end, offset
        assert all("offset" in line for line in named)

        done = convert([spoilt], mended)
        assert done.lost is not complete, offset
        assert done.damage == tuple(named), offset
        assert official(mended) == official(mended, seeking=False) == read(mended) == found, offset
        mended.unlink()
        losses += not complete
    assert flips / 5 < losses < flips


def test_a_malformed_event_is_left_out_and_reported(tmp_path):
    writer = RecordingWriter(tmp_path / "a.mcap", "r", 1)
    append(writer, 1)
    writer.append(TOPICS[0].encode()[:-1], 2, 2, 2, b"no event")
    writer.close()
    done = convert([tmp_path / "a.mcap"], tmp_path / "b.mcap")
    assert (done.events, done.lost) == (1, True)
    assert "'r/batch_end/0' is left out" in done.damage[0]
