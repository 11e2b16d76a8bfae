"""Callbacks and loggers of other packages and files: found by their entry points, or by where they are."""

import sys
from pathlib import Path

import pytest
from commands import Outcome, Run, command
from consumers_stream import record_run, snapshots_of_training
from paths import ROOT
from plugin_files import install

from offloop.bus.errors import ConfigurationError
from offloop.consumers.cli.main import main
from offloop.consumers.cli.registry import CALLBACKS

EXAMPLES = ROOT / "examples"

MODULE = '''
from offloop.consumers import Callback, LoggerDestination

print("imported")

class Counter(Callback):
    """Counts batches."""

    def __init__(self, start: int = 0):
        self.count = start

    def batch_end(self, state, logger):
        self.count += 1
        logger.log_metrics({"count": self.count})

class Shouting(LoggerDestination):
    """Prints in capitals."""

    def log_rows(self, rows, state):
        for row in rows:
            print(*(f"{name.upper()}={value:g}" for name, value in row.metrics.items()))
'''

ENTRY_POINTS = """
[offloop.callbacks]
count = plugin_package:Counter
broken = plugin_package_with_a_mistake:Broken
lr = plugin_package:Counter

[offloop.loggers]
shouting = plugin_package:Shouting [extra]
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a package with callbacks and a logger on the path of this process and its children."""
    (tmp_path / "plugin_package.py").write_text(MODULE)
    (tmp_path / "plugin_package_with_a_mistake.py").write_text("import math\n\nlimit = math.tau / 0\n")
    install(tmp_path, "plugin-package", ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def consumer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return the command, which runs in this process as if nothing of the package had been imported."""
    run = command("consumer", main, monkeypatch, capsys)

    def run_anew(*arguments: object) -> Outcome:
        for name in [name for name in sys.modules if "plugin_package" in name]:
            monkeypatch.delitem(sys.modules, name)
        return run(*arguments)

    return run_anew


def test_an_installed_package_adds_callbacks_and_loggers_by_short_names(
    consumer: Run, packages: Path, runs_dir: Path
) -> None:
    run = record_run(runs_dir, "done", snapshots_of_training(batches=2))
    done = consumer("--replay", run, "--callbacks", "count", "--log", "shouting", "-o", "count.start=10")
    assert done.code == 0, done.err
    assert done.out == "imported\nCOUNT=11\nCOUNT=12\n"
    done = consumer("--replay", run, "--callbacks", "lr")
    assert (done.code, "imported" in done.out, "  lr  " in done.out) == (0, False, True)


def test_the_list_shows_plugins_and_why_any_cannot_be_used(consumer: Run, packages: Path) -> None:
    done = consumer("--list")
    assert done.code == 0, done.err
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    assert "count Counts batches. (from plugin-package)" in lines
    assert "-o count.start=0 (a whole number)" in lines
    assert "shouting Prints in capitals. (from plugin-package)" in lines
    [broken] = [line for line in lines if line.startswith("broken ")]
    assert broken.startswith("broken cannot be used (from plugin-package): callback 'broken' cannot be imported from")
    assert broken.endswith(
        f"ZeroDivisionError: float division by zero ({packages / 'plugin_package_with_a_mistake.py'}, line 3)"
    )


def test_a_package_with_a_taken_name_or_unreadable_entry_points_hides_no_other(
    packages: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(packages, "zz-second", "[offloop.callbacks]\ncount = json:JSONDecoder\nfresh = plugin_package:Counter\n")
    install(packages, "damaged", "[offloop.callbacks]\nthis is no entry point\n")
    assert {name: CALLBACKS.find(name).__name__ for name in ("count", "fresh")} == {
        "count": "Counter",
        "fresh": "Counter",
    }
    assert "the entry points of package damaged cannot be read" in caplog.text


def test_a_file_that_failed_is_loaded_again_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    path = tmp_path / "mended.py"
    path.write_text("from offloop.consumers import Callback\n\nundefined_name\nclass Mine(Callback):\n    pass\n")
    with pytest.raises(
        ConfigurationError, match=r"NameError: name 'undefined_name' is not defined \(.*mended.py, line 3"
    ):
        CALLBACKS.find(f"{path}:Mine")
    path.write_text("from offloop.consumers import Callback\nclass Mine(Callback):\n    pass\n")
    assert CALLBACKS.find(f"{path}:Mine").__name__ == "Mine"


def test_the_examples_of_ten_lines_run(consumer: Run, runs_dir: Path) -> None:
    run = record_run(runs_dir, "done", snapshots_of_training(batches=4))
    callback, logger = f"{EXAMPLES}/lowest_loss.py:LowestLoss", f"{EXAMPLES}/markdown_logger.py:MarkdownLogger"
    options = ("-o", "LowestLoss.below=0.5", "-o", "MarkdownLogger.digits=2")
    done = consumer("--replay", run, "--callbacks", callback, "--log", logger, *options)
    assert done.code == 0, done.err
    assert done.out.splitlines()[2:] == ["| 3 | loss/lowest | 0.33 |", "| 4 | loss/lowest | 0.25 |"]
