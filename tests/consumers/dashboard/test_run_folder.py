"""What the page shows of a run's directory: its files and no others, and what is known of it."""

import os

import pytest
from run_folders import WrittenRun, write_run

from offloop.consumers.dashboard.web.panels import facts_of
from offloop.consumers.dashboard.web.run_folder import look_into, open_in


@pytest.fixture
def run(tmp_path):
    path = write_run(tmp_path / "runs", "r")
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "runs" / "secret.txt").write_text("secret")
    (path / "logs").mkdir()
    (path / "logs" / "metrics.csv").write_text("step,loss\n1,0.5\n")
    (path / "link.txt").symlink_to(tmp_path / "secret.txt")
    (path / "out").symlink_to(tmp_path)
    (path / "logs" / "back.txt").symlink_to("../run.json")
    os.mkfifo(path / "fifo.txt")
    os.link(path / "run.json", path / "hard.txt")
    return path


def test_files_of_a_run_are_listed_without_what_links_lead_to(run):
    found = {file.path: file.size for file in look_into(run).files}
    assert {"run.json", "recording-1.mcap", "logs/metrics.csv", "hard.txt"} <= found.keys()
    assert not [path for path in found if path.startswith(("out", "link", "fifo")) or path.endswith("back.txt")]
    assert found["logs/metrics.csv"] == 16
    with open(open_in(run, "logs/metrics.csv")) as file:
        assert file.read() == "step,loss\n1,0.5\n"


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "path",
    [
        *("../secret.txt", "logs/../../secret.txt", "./run.json", "/etc/passwd", "", "link.txt", "out/secret.txt"),
        *("logs/back.txt", "fifo.txt", "logs", "a\0b", "x" * 300),
    ],
)
def test_nothing_else_is_read(run, path):
    with pytest.raises(OSError):  # noqa: PT011  whatever the system says
        open_in(run, path)


def test_a_directory_that_is_a_link_is_not_a_runs(run, tmp_path):
    (tmp_path / "alias").symlink_to(run)
    with pytest.raises(OSError, match="symbolic link"):
        open_in(tmp_path / "alias", "run.json")


def started(tmp_path, **info):
    run = WrittenRun(tmp_path, "r")
    run.directory._record["attempts"][-1]["info"] = info
    return run.end()


def test_what_a_run_was_started_with_is_said_without_what_is_not_known(tmp_path):
    folder = look_into(started(tmp_path, command=["a b", "c"], git_commit="abc", git_dirty=True, host="\x1b[2J"))
    assert folder.run is not None
    facts = facts_of(folder.run, folder)
    assert facts["command"] == "'a b' c"
    assert facts["git commit"] == "abc, with uncommitted changes"
    assert facts["host"] == "\\x1b[2J"
    assert "folder" not in facts
