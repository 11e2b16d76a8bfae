"""The fixtures of conftest.py are tests too: they have to notice what is left behind."""

import shutil

from paths import SUPPORT

pytest_plugins = ["pytester"]

LEAKING_TESTS = """
import os, subprocess
import zmq

kept = []

def test_child():
    kept.append(subprocess.Popen(["sleep", "60"]))

def test_orphan():
    subprocess.run(["sh", "-c", "sleep 61 >/dev/null 2>&1 &"], check=True)

def test_orphan_without_environment(runs_dir):
    path = {"PATH": os.environ["PATH"]}
    subprocess.run(["sh", "-c", "sleep 62 >/dev/null 2>&1 &"], check=True, cwd=runs_dir, env=path)

def test_socket():
    kept.append(zmq.Context.instance().socket(zmq.PUB))

def test_runs_dir(runs_dir):
    kept.append(runs_dir)
    (runs_dir / "file").touch()

def test_runs_dir_is_gone():
    assert not kept[-1].exists()
"""


def test_a_test_that_leaves_processes_or_files_behind_fails(pytester):
    for file in (SUPPORT.parent / "conftest.py", SUPPORT / "leaks.py", SUPPORT / "paths.py"):
        shutil.copy(file, pytester.path)
    pytester.makepyfile(LEAKING_TESTS)
    result = pytester.runpytest_subprocess("-o", "leak_grace=1.5", "-o", "pythonpath=.", "-rE")
    result.assert_outcomes(passed=6, errors=4)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_child *",
            "the test left behind process * (sleep 60)",
            "*ERROR at teardown of test_orphan *",
            "the test left behind process * (sleep 61)",
            "*ERROR at teardown of test_orphan_without_environment *",
            "the test left behind process * (sleep 62)",
            "*ERROR at teardown of test_socket *",
            "the test left behind an open socket: *",
        ]
    )
