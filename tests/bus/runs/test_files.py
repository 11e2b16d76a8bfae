"""Run directories with files that do not belong there, and those of other users."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from run_folders import write_run

from offloop.bus import Event, Publisher, Recording, RecordingError, RunDirectoryError, find_run
from offloop.bus.cli.main import bus
from offloop.bus.runs.directory import list_runs
from offloop.bus.runs.writing import RunDirectory


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def make_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


NO_FILES = (os.mkfifo, Path.mkdir, make_socket, make_link_to_a_device)


def record(name: str, *, resume: bool = False) -> Path:
    with Publisher(name, resume=resume) as publisher:
        publisher.publish(Event.BATCH_END)
    return publisher.run_dir


def test_a_run_file_that_is_no_file_hides_no_other_run(runs_dir: Path) -> None:
    write_run(runs_dir, "good")
    for number, make in enumerate(NO_FILES):
        (runs_dir / f"bad{number}").mkdir()
        make(runs_dir / f"bad{number}" / "run.json")
    listed = CliRunner().invoke(bus, ["runs"], catch_exceptions=False).output.splitlines()[1:]
    rows = {line.split()[0]: line for line in listed}
    assert sorted(rows) == ["bad0", "bad1", "bad2", "bad3", "good"]
    for name in ("bad0", "bad1", "bad2", "bad3"):
        assert rows[name].split()[1] == "unreadable"
        assert f"{runs_dir / name / 'run.json'} cannot be read: it is" in rows[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make"),
    [
        *((name, os.mkfifo) for name in ("broker.lock", "broker.json", "run.json", "broker.log", ".run.json.reserve")),
        *((".run.json.new", make) for make in NO_FILES),
    ],
)
def test_nothing_in_a_run_directory_is_waited_for(runs_dir: Path, name: str, make: Callable[[Path], None]) -> None:
    (runs_dir / "r").mkdir()
    make(runs_dir / "r" / name)
    try:
        record("r", resume=True)
    except RunDirectoryError as error:
        assert str(runs_dir / "r") in str(error)  # noqa: PT017  where it is no error, the run is there
        assert name != "broker.log"
    else:
        assert find_run("r").status == "finished"


def test_a_recording_that_is_no_file_is_refused(runs_dir: Path) -> None:
    for number, make in enumerate(NO_FILES):
        recording = write_run(runs_dir, f"r{number}") / "recording-1.mcap"
        recording.unlink()
        make(recording)
        with pytest.raises(RecordingError, match="is not a recording"):
            Recording(recording.parent)


def test_a_run_that_is_listed_says_nothing_of_files_elsewhere(runs_dir: Path) -> None:
    run_file = write_run(runs_dir, "r") / "run.json"
    run_file.write_text(run_file.read_text().replace("recording-1.mcap", "../other/recording-1.mcap"))
    assert list_runs() == []


def test_what_is_written_follows_no_links(runs_dir: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (runs_dir / "r").mkdir()
    for name in (".run.json.new", ".broker.json.new", "broker.json", "broker.log", "recording-1.mcap", "broker.sock"):
        (runs_dir / "r" / name).symlink_to(precious)
    run_dir = record("r", resume=True)
    assert precious.read_text() == "precious"
    assert len(list(Recording(run_dir))) == 1
    assert find_run("r").recording.name == "recording-2.mcap"


def test_a_run_directory_that_is_a_link_is_refused_and_a_runs_directory_may_be_one(
    runs_dir: Path, tmp_path: Path
) -> None:
    (runs_dir / "r").symlink_to(tmp_path)
    with pytest.raises(RunDirectoryError, match="symbolic link"):
        Publisher("r")
    assert list(tmp_path.iterdir()) == []
    with Publisher("r", runs_dir=runs_dir / "r") as publisher:
        publisher.publish(Event.BATCH_END)
    assert find_run("r", runs_dir / "r").status == "finished"


def owned_by_another(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """As if the directory belonged to the next user."""
    real, inode = os.fstat, directory.stat().st_ino

    def fstat(descriptor: int) -> os.stat_result:
        found = real(descriptor)
        return os.stat_result((*found[:4], found.st_uid + (found.st_ino == inode), *found[5:]))

    monkeypatch.setattr(os, "fstat", fstat)


def test_a_directory_of_another_user_is_refused_and_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "r"
    directory.mkdir(mode=0o777)
    directory.chmod(0o777)
    owned_by_another(monkeypatch, directory)
    with pytest.raises(RunDirectoryError, match=f"belongs to user {os.geteuid() + 1}"):
        RunDirectory(tmp_path, "r")
    assert list(directory.iterdir()) == []
    assert directory.stat().st_mode & 0o777 == 0o777
