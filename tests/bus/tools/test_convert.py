"""``offloop convert``: parts of recordings that are recordings, say what they lack, and become one again."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from recorded_runs import Entry, entries, write_recording
from recording_files import file_limit, read, spoil
from run_folders import write_run

from offloop.bus import ConfigurationError, InvalidTimeError, Recording, RunDirectoryError
from offloop.bus.cli.recordings import convert_recordings
from offloop.bus.recording.replay import Replay
from offloop.bus.recording.source import CutRange, RecordSource
from offloop.bus.tools.convert import convert
from offloop.bus.types.event import Event

quick = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def run(*arguments) -> Result:
    return CliRunner().invoke(convert_recordings, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.fixture
def fresh(tmp_path):
    """Paths that no file is at, also from example to example."""

    def path(name: str) -> Path:
        (tmp_path / name).unlink(missing_ok=True)
        return tmp_path / name

    return path


@quick
@given(data=st.data(), stream=entries())
def test_a_cut_accounts_for_every_number_and_its_readers_see_the_same_gaps(fresh, data, stream):
    missing = data.draw(st.sets(st.integers(0, len(stream) - 1), max_size=6))
    there = [entry for place, entry in enumerate(stream) if place not in missing and not entry.name.startswith("$")]
    assume(there)
    original, part = fresh("o.mcap"), fresh("p.mcap")
    write_recording(original, stream, missing=missing)
    first, last = sorted(data.draw(st.sampled_from(there)).batch for _ in range(2))
    convert([original], part, f"{first}ba", f"{last}ba")
    check_accounts(original, part)
    for events in (None, [Event.BATCH_END]):
        gaps = []
        for path in (original, part):
            recording = Recording(path)
            assert all(True for _ in recording.snapshots(events))
            gaps.append(set(recording.gaps))
        assert gaps[0] == gaps[1]


def check_accounts(original: Path, part: Path) -> None:
    """Each number of the original is in the part or stated as left out, once; what the original lacks is neither."""
    for number, is_counted in ((lambda event: event.seq, True), (lambda event: event.base_seq, False)):
        recorded: dict[int, set[int]] = {}
        accounted: dict[int, list[int]] = {}
        for record in RecordSource(original):
            if is_counted or not is_inner(record):
                recorded.setdefault(record.topic.rank, set()).add(number(record.event))
        for record in RecordSource(part):
            stated = CutRange.of(record)
            told = accounted.setdefault(record.topic.rank, [])
            if stated is not None and is_counted:
                told += range(stated.first, stated.last + 1)
            elif stated is not None:
                told += range(stated.base_first, stated.base_last + 1)
            elif is_counted or not is_inner(record):
                told.append(number(record.event))
        for rank, numbers in recorded.items():
            assert accounted[rank] == sorted(numbers)


def is_inner(record) -> bool:
    return record.topic.name in ("before_forward", "after_loss")


@pytest.fixture
def trained(runs_dir) -> Path:
    """Return the recording of two epochs, with an evaluation."""
    return write_run(runs_dir, "trained", losses=[1.0] * 20, accuracy=0.5) / "recording-1.mcap"


async def test_a_cut_holds_what_a_replay_of_that_part_shows(trained, tmp_path):
    for start, until in [("2ba", "6ba"), ("1ep", None), (None, "0.1dur")]:
        shown = [snapshot async for snapshot in Replay(Recording(trained), start=start, until=until)]
        done = convert([trained], tmp_path / "part.mcap", start, until, force=True)
        part = Recording(tmp_path / "part.mcap")
        assert list(part) == shown
        assert done.events == len(shown)
        assert done.events + done.dropped == len(list(Recording(trained)))
        assert part.ending == done.ending == Recording(trained).read_endings()[0]


def test_commands_and_the_end_of_every_rank_stay(tmp_path):
    stream = [Entry(rank=rank, batch=batch, context={"world_size": 2}) for batch in range(1, 4) for rank in (0, 1)]
    stream.insert(2, Entry("$command", 0, 1, {"command": "set", "arguments": ["lr", 0.5], "event": "batch_end"}))
    stream += [Entry("$end", rank, 0, {"status": "stopped"}, {"world_size": 2}) for rank in (0, 1)]
    write_recording(tmp_path / "o.mcap", stream)
    done = convert([tmp_path / "o.mcap"], tmp_path / "p.mcap", start="3ba")
    part = Recording(tmp_path / "p.mcap")
    assert [(snapshot.rank, snapshot.seq) for snapshot in part] == [(0, 4), (1, 3)]
    assert part.ending == done.ending
    assert str(done.ending) == "stopped"
    assert [str(outcome.command) for outcome in part.read_commands()] == ["set lr 0.5"]


def test_ranks_that_were_recorded_apart_come_together_by_time(tmp_path):
    stream = [Entry(rank=place % 2, batch=place // 2 + 1, context={"world_size": 2}) for place in range(8)]
    stream += [Entry("$end", rank, 0, {"status": "finished"}, {"world_size": 2}) for rank in (0, 1)]
    paths = [tmp_path / "host0.mcap", tmp_path / "host1.mcap"]
    for rank, path in enumerate(paths):
        # A recording that never had the other rank, and not a cut of one that did.
        alone = [entry if entry.rank == rank else entry._replace(rank=5) for entry in stream]
        write_recording(path, alone, missing=[place for place, entry in enumerate(alone) if entry.rank == 5])
    merged = convert(paths, tmp_path / "m.mcap")
    recording = Recording(tmp_path / "m.mcap")
    assert [(snapshot.rank, snapshot.timestamp.batch.value) for snapshot in recording] == [
        (entry.rank, entry.batch) for entry in stream[:8]
    ]
    assert (merged.events, str(merged.ending)) == (8, "finished")


def test_recordings_of_the_same_rank_or_of_other_runs_are_refused(tmp_path):
    for name in "ab":
        write_recording(tmp_path / f"{name}.mcap", [Entry()])
    with pytest.raises(ConfigurationError, match=r"rank 0 is in .*a\.mcap and .*b\.mcap"):
        convert([tmp_path / "a.mcap", tmp_path / "b.mcap"], tmp_path / "m.mcap")
    for identity in ({"run": "s"}, {"attempt": 2}):
        (tmp_path / "b.mcap").unlink()
        write_recording(tmp_path / "b.mcap", [Entry()], **identity)
        with pytest.raises(ConfigurationError, match="one attempt of one run"):
            convert([tmp_path / "a.mcap", tmp_path / "b.mcap"], tmp_path / "m.mcap")
    assert not (tmp_path / "m.mcap").exists()


def test_the_command_says_what_it_did(trained, tmp_path):
    first, second, whole = (tmp_path / f"{name}.mcap" for name in ("first", "second", "whole"))
    result = run("trained", "--until", "4ba", "-o", first)
    total = len(list(Recording(trained)))
    kept = len(list(Recording(first)))
    assert result.output == f"wrote {kept} events of {trained} to {first}, left out {total - kept}\n"
    assert run(trained, "--start", "4ba", "--output", second).exit_code == 0
    result = run(first, "-o", whole)
    assert "left out: events " in result.output


def test_loss_is_an_exit_code(tmp_path):
    path = tmp_path / "a.mcap"
    write_recording(path, [Entry(batch=batch) for batch in range(1, 21)])
    spoil(path, 700)
    before = path.read_bytes()
    for paths in ([path], [path, path]):
        result = run(*paths, "-o", tmp_path / "b.mcap", "--force")
        assert result.exit_code == 3
        assert "damaged at offset" in result.output
        assert "missing: events" in result.output
        assert "the run's ending is not recorded" in result.output
        assert result.output.endswith("a part of the recording was lost\n")
    assert path.read_bytes() == before


def test_an_empty_part_is_refused_and_nothing_is_written(tmp_path, trained):
    with pytest.raises(InvalidTimeError):
        convert([trained], tmp_path / "b.mcap", start="3")
    # The events of the setup alone are no part.
    with pytest.raises(ConfigurationError, match=r"nothing of .* is chosen"):
        convert([trained], tmp_path / "b.mcap", start="9ep")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_written_over_unless_told_to(tmp_path):
    path, output = tmp_path / "a.mcap", tmp_path / "b.mcap"
    written = write_recording(path, [Entry(batch=1), Entry(batch=2)])
    for inputs in ([path], [path] * 2):
        output.write_text("mine")
        with pytest.raises(ConfigurationError, match="exists"):
            convert(inputs, output)
        assert output.read_text() == "mine"
        convert(inputs, output, force=True)
        assert read(output) == written
    with pytest.raises(ConfigurationError, match="is an input"):
        convert([path], path, force=True)
    with pytest.raises(ConfigurationError, match="is a folder"):
        convert([path], tmp_path, force=True)
    assert read(path) == written


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    write_recording(tmp_path / "a.mcap", [Entry(batch=1, fields={"x": bytes(range(256)) * 100})])
    with file_limit(500), pytest.raises(RunDirectoryError, match="cannot"):
        convert([tmp_path / "a.mcap"], tmp_path / "b.mcap")
    assert [path.name for path in tmp_path.iterdir()] == ["a.mcap"]
