"""What the page shows of a run's directory."""

from run_folders import WrittenRun

from offloop.consumers.dashboard.web.panels import facts_of
from offloop.consumers.dashboard.web.run_folder import look_into


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
