"""How base events are counted, and that a recording in which they are counted wrongly is read whole and named."""

import subprocess
import sys

import pytest

from offloop.bus import Event, Recording
from offloop.bus.cli.describe import describe_recording
from offloop.bus.protocol.frames import END, Topic, event_encoder, pack_map
from offloop.bus.protocol.numbering import Numbering, base_seq_problem
from offloop.bus.recording.source import RecordSource
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.replay.replay import Replay
from offloop.bus.tools.convert import convert

WRONG = "rank 0 is wrongly numbered: event 2 (batch_end) has the base_seq 1, where 2 belongs"
SEQS = list(range(1, 11))


@pytest.mark.parametrize(
    ("name", "seq", "base_seq", "last", "right"),
    [
        ("batch_end", 1, 1, (0, 0), True),
        ("batch_start", 1, 0, (0, 0), True),
        ("batch_start", 1, 1, (0, 0), False),
        ("batch_end", 6, 3, (5, 3), False),
        ("batch_end", 6, 5, (5, 3), False),
        ("batch_end", 9, 4, (5, 3), True),
        ("batch_end", 9, 7, (5, 3), True),
        ("batch_end", 9, 8, (5, 3), False),
        ("batch_start", 9, 7, (5, 3), False),
        ("$end", 6, 4, (5, 3), True),
        ("$end", 6, 3, (5, 3), False),
        ("$cut", 9, 3, (5, 3), True),
        ("from_the_future", 6, 3, (5, 3), True),
        ("from_the_future", 6, 4, (5, 3), True),
    ],
)
def test_which_base_seq_an_event_may_have(name, seq, base_seq, last, right):
    problem = base_seq_problem(name, seq, base_seq, last)
    assert (problem is None) is right
    if problem is not None:
        assert f"event {seq} ({name}) has the base_seq {base_seq}, where " in problem


def test_every_rank_is_followed_for_itself():
    numbering = Numbering({1: (5, 3)})
    numbering.follow(0, "batch_end", 1, 1)
    numbering.follow(1, "batch_end", 6, 4)
    assert numbering.problems == []
    numbering.follow(1, "batch_end", 7, 4)
    assert numbering.problems == ["rank 1 is wrongly numbered: event 7 (batch_end) has the base_seq 4, where 5 belongs"]


@pytest.fixture
def recording(tmp_path):
    """Ten batches of which each says that it is the first base event."""
    path = tmp_path / "recording-1.mcap"
    writer = RecordingWriter(path, "r", 1)

    def append(name, seq, base_seq, fields):
        frame = event_encoder(Topic("r", name, 0), 1)(
            seq, base_seq, seq, [0, 0, seq, *[0] * 11], None, fields, pack_map({"world_size": 1})
        )
        topic, _, body = frame.partition(b"\0")
        writer.append(topic, seq, base_seq, seq, body)

    for seq in SEQS:
        append("batch_end", seq, 1, {"loss": 1.0})
    append(END, 11, 2, {"status": "finished", "error": None})
    writer.close()
    return path


@pytest.mark.parametrize("events", [None, [Event.BATCH_END]])
def test_a_recording_is_read_whole_and_named_by(recording, events):
    read = Recording(recording)
    assert [snapshot.seq for snapshot in read.snapshots(events)] == SEQS
    assert read.damage == f"{WRONG}; so are 8 more events"
    assert read.gaps == ()


async def test_a_replay_names_it(recording):
    replay = Replay(Recording(recording), events=[Event.BATCH_END])
    assert [snapshot.seq async for snapshot in replay] == SEQS
    assert WRONG in replay.damage


def test_info_export_and_recover_name_it(recording, tmp_path):
    assert any(WRONG in line for line in describe_recording(recording)["damage"])
    stream = RecordSource(recording)
    assert len(list(stream)) == 11
    assert any(WRONG in line for line in stream.damage)
    recovered = convert([recording], tmp_path / "out.mcap")
    assert recovered.events == 10
    assert any(WRONG in line for line in recovered.damage)


def test_a_consumer_handles_every_event_and_says_what_is_wrong(recording, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "offloop.consumers", "--replay", recording, "--callbacks", "metrics"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "event 2 (batch_end) has the base_seq 1, where 2 belongs" in done.stderr
    assert done.returncode == 4
