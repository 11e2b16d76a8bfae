"""What is read of a run's directory while its broker writes there."""

import socket
from pathlib import Path

import pytest

from bus.protocol.order import Ending
from bus.runs import directory
from bus.runs.directory import RunDirectory, find_run, host_name


@pytest.mark.parametrize("files_before_the_end", range(3))
def test_a_run_that_ends_while_it_is_read_is_live_or_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files_before_the_end: int
) -> None:
    broker = RunDirectory(tmp_path, "r")
    number, recording = broker.next_attempt()
    broker.begin_attempt(recording, number, info={}, world_size=1)
    broker.announce(number, "ipc://control", "ipc://stream")
    read_json, read = directory._read_json, 0

    def read_while_it_ends(path: Path, name: str, descriptor: int) -> dict[str, object]:
        nonlocal read
        if read == files_before_the_end:
            broker.end_attempt(Ending("finished"))
            broker.release()
        read += 1
        return read_json(path, name, descriptor)

    monkeypatch.setattr(directory, "_read_json", read_while_it_ends)
    run = find_run("r", tmp_path)
    broker.release()
    assert (run.live, run.status) == ((False, "finished") if files_before_the_end < 2 else (True, "live"))


def test_a_host_is_called_as_the_environment_says_or_as_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFLOOP_HOST", raising=False)
    assert host_name() == socket.gethostname()
    monkeypatch.setenv("OFFLOOP_HOST", "node-7")
    assert host_name() == "node-7"
