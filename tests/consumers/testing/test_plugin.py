"""The pytest plug-in, in pytest runs of its own, and the page about it."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import wait_for
from make_recordings import RECORDINGS
from paths import ROOT

from offloop.bus.processes import is_running
from offloop.bus.runs.directory import read_run
from offloop.consumers.testing import LiveRun

pytest_plugins = ["pytester"]

EVALUATED = RECORDINGS / "0.1.0" / "evaluated.mcap"
DOCS = ROOT / "docs" / "testing.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)

# At the end of every run, the plug-in of hypothesis loads all of it.
INI = """[pytest]
filterwarnings = error
addopts = -p no:hypothesispytest
asyncio_default_fixture_loop_scope = function
"""

CALLBACK = """
from offloop.consumers import Callback
class Loss(Callback):
    def batch_end(self, state, logger):
        logger.log_metrics({"loss": state.loss, "batch": state.timestamp.batch.value})
"""

GOLDEN_TEST = (
    CALLBACK
    + """
import math
from offloop.consumers.testing import MemoryStream
LOSSES = [1.0, math.nan, 0.1 + 0.2]
def test_losses(replay, golden):
    stream = MemoryStream(loss=lambda batch: LOSSES[batch - 1])
    stream.train(len(LOSSES))
    golden.check(replay(Loss(), stream), "losses")
"""
)


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with tests, in which warnings are errors."""
    monkeypatch.delenv("OFFLOOP_RUNS_DIR", raising=False)
    pytester.makeini(INI)
    return pytester


def lines(result: pytest.RunResult) -> str:
    return "\n".join(result.outlines)


# -- recordings -------------------------------------------------------------------------------------------------------


def test_recordings_are_found_beside_the_test_and_in_the_folder_of_the_setting(project: pytest.Pytester) -> None:
    project.makeini(f"{INI}offloop_recordings = data\n")
    (project.path / "data").mkdir()
    (project.path / "data" / "far.mcap").write_bytes(EVALUATED.read_bytes())
    tests = project.mkdir("tests")
    (tests / "near.mcap").write_bytes(EVALUATED.read_bytes())
    (tests / "test_it.py").write_text(
        CALLBACK
        + "def test_near(recording, replay):\n"
        + "    assert recording('near.mcap').run_name == 'evaluated'\n"
        + "    assert len(replay(Loss(), 'near.mcap').metrics['loss']) == 24\n"
        + "def test_far(recording, replay):\n"
        + "    assert replay(Loss(), 'far.mcap').rows == replay(Loss(), recording('near.mcap')).rows\n"
        + "def test_nowhere(recording):\n"
        + "    recording('nowhere.mcap')\n"
    )
    result = project.runpytest_inprocess()
    result.assert_outcomes(passed=2, failed=1)
    places = [tests / "nowhere.mcap", project.path / "data" / "nowhere.mcap"]
    assert f"there is no recording {places[0]} and no {places[1]}: name one relative to the test" in lines(result)


ASYNC_TESTS = (
    CALLBACK
    + """
import asyncio
import pytest
from offloop.consumers.testing import MemoryStream
pytestmark = pytest.mark.asyncio
async def test_recording(recording):
    found = recording("it.mcap")
    assert [state.seq async for state in found] == [state.seq for state in found]
    assert str(found.ending) == "finished"
async def test_replay(recording, replay):
    assert len(replay(Loss(), "it.mcap").metrics["loss"]) == 24
    logged = await asyncio.to_thread(replay, Loss(), recording("it.mcap"))
    assert logged.rows == replay(Loss(), "it.mcap").rows
async def test_golden(golden, replay):
    stream = MemoryStream()
    stream.train(batches=2)
    golden.check(replay(Loss(), stream), "two")
async def test_a_failing_callback(replay):
    class Bug(Loss):
        def batch_end(self, state, logger):
            return state.loss / 0  # here
    replay(Bug(), "it.mcap")
"""
)


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_the_fixtures_work_in_asynchronous_tests(project: pytest.Pytester, mode: str) -> None:
    (project.path / "it.mcap").write_bytes(EVALUATED.read_bytes())
    project.makepyfile(ASYNC_TESTS)
    result = project.runpytest_inprocess(f"--asyncio-mode={mode}", "--offloop-update-golden")
    result.assert_outcomes(passed=3, failed=1)
    assert re.search(r"^>\s+return state\.loss / 0  # here$", lines(result), re.MULTILINE)
    assert re.search(r"^E\s+ZeroDivisionError", lines(result), re.MULTILINE)


def test_a_bug_in_a_callback_fails_the_test_at_the_line_of_the_bug(project: pytest.Pytester) -> None:
    project.makepyfile(
        CALLBACK
        + "class Bug(Loss):\n"
        + "    def batch_end(self, state, logger):\n"
        + "        return state.loss / 0  # here\n"
        + f"def test_bug(replay):\n    replay([Loss(), Bug()], {str(EVALUATED)!r})\n"
    )
    result = project.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    assert re.search(r"^>\s+return state\.loss / 0  # here$", lines(result), re.MULTILINE)
    assert re.search(r"^E\s+ZeroDivisionError", lines(result), re.MULTILINE)


# -- golden files -----------------------------------------------------------------------------------------------------


def test_a_golden_file_is_asked_for_written_compared_and_left_alone(project: pytest.Pytester) -> None:
    project.makepyfile(test_it=GOLDEN_TEST)
    path = project.path / "golden" / "losses.jsonl"
    result = project.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    assert f"there is no golden file {path}" in lines(result)
    assert "pytest 'test_it.py::test_losses' --offloop-update-golden" in lines(result)
    assert not path.exists()

    result = project.runpytest_inprocess("--offloop-update-golden")
    result.assert_outcomes(passed=1)
    assert f"golden file written: {path}" in lines(result)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["metrics"] for row in rows] == [
        {"loss": 1.0, "batch": 1},
        {"loss": "NaN", "batch": 2},
        {"loss": 0.30000000000000004, "batch": 3},
    ]

    result = project.runpytest_inprocess()
    result.assert_outcomes(passed=1)
    assert "golden file" not in lines(result)
    before = path.stat()
    result = project.runpytest_inprocess("--offloop-update-golden")
    assert "golden files: none had to be written" in lines(result)
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_what_differs_is_shown(project: pytest.Pytester) -> None:
    project.makepyfile(test_it=GOLDEN_TEST)
    project.runpytest_inprocess("--offloop-update-golden")
    project.makepyfile(test_it=GOLDEN_TEST.replace("0.1 + 0.2", "0.3"))
    result = project.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    assert "differs from" in lines(result)
    assert "in 1 of 3 lines" in lines(result)
    assert "line 3, step 3: loss is 0.3, expected 0.30000000000000004" in lines(result)
    project.makepyfile(test_it=GOLDEN_TEST.replace("0.1 + 0.2", "0.3").replace('"losses"', '"losses", 1e-12'))
    project.runpytest_inprocess().assert_outcomes(passed=1)


# -- real runs --------------------------------------------------------------------------------------------------------


TASKS = """
from offloop.trainer.tasks.digits import digits
def endless():
    return {**digits(batch_size=8), "max_duration": "100000ep"}
"""


@pytest.mark.slow
def test_a_run_is_watched_and_stopped_at_the_batch_that_the_callback_chose(project: pytest.Pytester) -> None:
    project.makepyfile(tasks=TASKS)
    project.makepyfile(
        test_it=CALLBACK
        + """
class Stops(Loss):
    # Stops when it has seen what it asked for.
    fields = ("gradient_norm",)
    def batch_end(self, state, logger):
        super().batch_end(state, logger)
        if "gradient_norm" in state.fields:
            logger.log_metrics({"norm": state.gradient_norm})
            state.stop_training()

def test_watched(live_run, tmp_path, replay):
    run = live_run("tasks.py:endless", wait_for="test", seed=1, no_progress=True, eval_interval=0)
    logged = run.watch(Stops())
    [(last, _)] = logged.metrics["norm"]
    assert [step for step, _ in logged.metrics["loss"]] == list(range(1, last + 1))
    assert [(command.name, command.decided_at) for command in logged.commands] == [("stop", last)]
    assert run.wait().status == "stopped"
    assert run.path == tmp_path / "runs" / run.name == tmp_path / "runs" / "endless"
    assert replay(Stops(), run.recording()).rows == logged.rows
    assert "recording" in run.output
"""
    )
    project.runpytest_inprocess().assert_outcomes(passed=1)


@pytest.mark.slow
def test_a_run_is_gone_when_its_test_has_failed(project: pytest.Pytester) -> None:
    project.makepyfile(tasks=TASKS)
    project.makepyfile(
        test_it=CALLBACK
        + """
import pathlib

def test_left_running(live_run):
    run = live_run("tasks.py:endless", "--no-progress")
    assert run.command("set", "lr", 0.001).error is None
    pathlib.Path("pid").write_text(str(run.pid))
    run.watch(Loss(), timeout=0.5)
"""
    )
    # A path that is too long for sockets.
    result = project.runpytest_inprocess("--basetemp", str(project.path / ("x" * 100)))
    result.assert_outcomes(failed=1)
    assert "AssertionError: the training of endless has not ended within 0.5 s; its output ends with" in lines(result)
    assert not Path("/proc", (project.path / "pid").read_text()).exists()


@pytest.mark.slow
def test_no_rank_of_a_run_is_left_running(tmp_path: Path) -> None:
    with LiveRun(tmp_path, "digits", ranks=2, max_duration="1000ep", no_progress=True) as run:
        run.wait_to_begin()
        wait_for(lambda: len(read_run(run.path).last.publishers) == 2, "both ranks", 60)
        pids = [one["pid"] for one in read_run(run.path).last.publishers]
        assert run.pid not in pids
    assert not [pid for pid in pids if is_running(pid)]
    assert not read_run(run.path).live


@pytest.mark.slow
def test_a_training_that_fails_fails_the_test_with_its_output(project: pytest.Pytester) -> None:
    project.makepyfile(tasks="def wrong():\n    raise RuntimeError('no data here')\n")
    project.makepyfile("def test_failing(live_run):\n    live_run('tasks.py:wrong', ranks=2).wait()\n")
    result = project.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    assert "AssertionError: the training of wrong ended with exit code 1; its output ends with" in lines(result)
    assert lines(result).count("RuntimeError: no data here") >= 1


# -- no trouble for anybody else --------------------------------------------------------------------------------------

IMPORTED = """
import sys
import offloop.pytest_plugin
ours = {"offloop.bus", "offloop.trainer", "offloop.consumers"}
heavy = ({"torch", "numpy", "zmq", "msgpack", "msgspec", "mcap", "click", "asyncio"} | ours) & set(sys.modules)
assert not heavy, heavy
"""


def test_the_plug_in_loads_next_to_nothing() -> None:
    subprocess.run([sys.executable, "-c", IMPORTED], check=True, timeout=100)


def test_own_fixtures_of_those_names_come_first(project: pytest.Pytester) -> None:
    project.makepyfile(
        "import pytest\n@pytest.fixture\ndef golden(): return 1\ndef test_it(golden): assert golden == 1\n"
    )
    project.runpytest_inprocess().assert_outcomes(passed=1)


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_example_of_the_page_works(project: pytest.Pytester) -> None:
    callback, tests = BLOCKS[:2]
    (project.path / "perplexity.py").write_text(callback)
    (project.path / "test_perplexity.py").write_text(tests)
    (project.path / "digits.mcap").write_bytes(EVALUATED.read_bytes())
    result = project.runpytest_inprocess("--offloop-update-golden", "-k", "always")
    result.assert_outcomes(passed=1, deselected=3)
    project.runpytest_inprocess().assert_outcomes(passed=4)


def test_the_asynchronous_example_of_the_page_works(project: pytest.Pytester) -> None:
    [tests] = [block for block in BLOCKS if "async def test_" in block]
    project.makepyfile(test_lowest=tests)
    (project.path / "digits.mcap").write_bytes(EVALUATED.read_bytes())
    project.runpytest_inprocess().assert_outcomes(passed=3)


@pytest.mark.parametrize("number", range(2, len(BLOCKS)))
def test_every_block_of_the_page_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "block.py").write_text(BLOCKS[number])
    runpy.run_path("block.py", run_name="__main__")
