"""Recordings made by hand: any events, of any ranks, numbered and timed as a broker records them."""

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st
from mcap.writer import Writer

from offloop.bus.protocol.frames import Topic, event_encoder, pack_map
from offloop.bus.recording.reader import Record
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.types.demand import BASE_EVENTS

BEGAN = 1_795_259_222_215_294_932
_NAMES = ["batch_end", "epoch_end", "before_forward", "after_loss", "eval_end", "$demand", "$command"]


class Entry(NamedTuple):
    """An event or a mark; its number follows from its place."""

    name: str = "batch_end"
    rank: int = 0
    batch: int = 0
    fields: dict[str, Any] = {}  # noqa: RUF012  never changed
    context: dict[str, Any] = {}  # noqa: RUF012  never changed
    epoch: int = 0


def write_recording(
    path: Path,
    entries: Iterable[Entry],
    *,
    run: str = "r",
    attempt: int = 1,
    began: int = BEGAN,
    missing: Collection[int] = (),
    chunk: int = 5,
    footer: bool = True,
) -> list[Record]:
    """Write a recording and return its records.

    Each chunk has ``chunk`` events; entries at the places ``missing`` were never recorded."""
    writer = RecordingWriter(path, run, attempt)
    numbers: dict[int, tuple[int, int]] = {}
    written = []
    for place, entry in enumerate(entries):
        seq, base_seq = numbers.get(entry.rank, (0, 0))
        is_base = entry.name.startswith("$") or entry.name in {event.value for event in BASE_EVENTS}
        seq, base_seq = numbers[entry.rank] = seq + 1, base_seq + is_base
        if place in missing:
            continue
        topic = Topic(run, entry.name, entry.rank)
        # Milliseconds apart, in the order of the file, with something to lose in a float.
        time = began + place * 1_000_003
        timestamp = (0, entry.epoch, entry.batch, entry.batch * 8, 0, 0, 0, entry.batch, 0, 0, place * 1000, 7, 8, 9)
        frame = event_encoder(topic, attempt)(
            seq, base_seq, time, timestamp, None, entry.fields, pack_map(entry.context)
        )
        body = frame[frame.index(b"\0") + 1 :]
        writer.append(topic.encode()[:-1], seq, base_seq, time, body)
        written.append((topic.encode()[:-1].decode(), body))
        if len(written) % chunk == 0:
            writer.flush()
    if footer:
        writer.close()
    else:
        writer.flush()
        os.close(writer._descriptor)
        writer._closed = True
    return written


def write_foreign(path: Path) -> None:
    """Write an MCAP file of another program."""
    with path.open("wb") as file:
        writer = Writer(file)
        writer.start("ros1", "another")
        channel = writer.register_channel("/imu", "json", 0)
        for time in range(3):
            writer.add_message(channel, time, b"{}", time, time)
        writer.finish()


@st.composite
def entries(draw: st.DrawFn, ranks: int = 3) -> list[Entry]:
    """Draw the interleaved streams of some ranks, whose batches never decrease."""
    made: list[Entry] = []
    batches = dict.fromkeys(range(draw(st.integers(1, ranks))), 0)
    for _ in range(draw(st.integers(1, 40))):
        rank = draw(st.sampled_from(list(batches)))
        name = draw(st.sampled_from(_NAMES))
        batches[rank] += name == "batch_end"
        made.append(Entry(name, rank, batches[rank], {"loss": draw(st.floats())}, {"world_size": len(batches)}))
    if draw(st.booleans()):
        ends = [Entry("$end", rank, 0, {"status": "finished"}, {"world_size": len(batches)}) for rank in batches]
        made += ends
    return made
