"""The fixture that every test has notices what is left behind."""

import subprocess
from pathlib import Path

import psutil
import zmq
from leaks import LeakWatch


def test_processes_and_sockets_that_stay_are_found_and_ended(tmp_path: Path) -> None:
    watch = LeakWatch(tmp_path.name, grace=0.2)
    # Handed to init, and without the variable: its working directory alone says whose it is.
    script = ["sh", "-c", "sleep 62 >/dev/null 2>&1 & echo $!"]
    orphan = int(
        subprocess.run(script, check=True, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True).stdout
    )
    with subprocess.Popen(["sleep", "60"]) as child:
        assert {process.pid for process in watch.processes()} >= {orphan, child.pid}
        watch._grace = 60  # seconds: on a busy machine they do not go at once
        watch.kill([psutil.Process(pid) for pid in (orphan, child.pid)])
    assert watch.processes() == []
    with zmq.Context.instance().socket(zmq.PUB) as socket:
        assert watch.sockets() == [socket]
    assert watch.sockets() == []
