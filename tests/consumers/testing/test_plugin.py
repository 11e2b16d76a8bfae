"""The pytest plug-in, in pytest runs of its own, and the page about it."""

import re
import runpy
from pathlib import Path

import pytest
from paths import RECORDINGS, ROOT

# Before any run in this process, which forgets the modules that it has imported.
from offloop.consumers import Callback  # noqa: F401

pytest_plugins = ["pytester"]

EVALUATED = RECORDINGS / "evaluated.mcap"
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
    assert f"there is no recording {places[0]} and no {places[1]}: use a path relative to the test" in lines(result)


ASYNC_TESTS = (
    CALLBACK
    + """
import asyncio
import pytest
pytestmark = pytest.mark.asyncio
async def test_replay(recording, replay):
    assert len(replay(Loss(), "it.mcap").metrics["loss"]) == 24
    logged = await asyncio.to_thread(replay, Loss(), recording("it.mcap"))
    assert logged.rows == replay(Loss(), "it.mcap").rows
async def test_a_failing_callback(replay):
    class Bug(Loss):
        def batch_end(self, state, logger):
            return state.loss / 0  # here
    replay(Bug(), "it.mcap")
"""
)


def test_the_fixtures_work_in_asynchronous_tests(project: pytest.Pytester) -> None:
    (project.path / "it.mcap").write_bytes(EVALUATED.read_bytes())
    project.makepyfile(ASYNC_TESTS)
    result = project.runpytest_inprocess("--asyncio-mode=strict")
    result.assert_outcomes(passed=1, failed=1)
    assert re.search(r"^>\s+return state\.loss / 0  # here$", lines(result), re.MULTILINE)
    assert re.search(r"^E\s+ZeroDivisionError", lines(result), re.MULTILINE)


# -- golden files -----------------------------------------------------------------------------------------------------


def test_golden_files_are_requested_written_and_compared(project: pytest.Pytester) -> None:
    project.makepyfile(test_it=GOLDEN_TEST)
    path = project.path / "golden" / "losses.jsonl"
    result = project.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    assert f"there is no golden file {path}" in lines(result)
    assert "pytest 'test_it.py::test_losses' --offloop-update-golden" in lines(result)
    assert not path.exists()

    result = project.runpytest_inprocess("--offloop-update-golden")
    result.assert_outcomes(passed=1)
    assert len(path.read_text().splitlines()) == 3

    result = project.runpytest_inprocess()
    result.assert_outcomes(passed=1)


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_example_of_the_page_works(project: pytest.Pytester) -> None:
    callback, tests = BLOCKS[:2]
    (project.path / "perplexity.py").write_text(callback)
    (project.path / "test_perplexity.py").write_text(tests)
    (project.path / "digits.mcap").write_bytes(EVALUATED.read_bytes())
    result = project.runpytest_inprocess("--offloop-update-golden", "-k", "always")
    result.assert_outcomes(passed=1, deselected=2)
    project.runpytest_inprocess().assert_outcomes(passed=3)


@pytest.mark.parametrize("number", range(2, len(BLOCKS)))
def test_every_block_of_the_page_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "block.py").write_text(BLOCKS[number])
    runpy.run_path("block.py", run_name="__main__")
