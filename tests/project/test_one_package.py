"""Files of the user's own that are called like packages of ours: what hides which, and what to do, is said."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


def run(folder: Path, *command: str | Path, path: str = "") -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": path}
    words: Sequence[str] = [str(word) for word in command]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    ("file", "front"),
    [
        ("bus.py", "from offloop import Publisher"),
        ("bus/__init__.py", "from offloop import Publisher"),
        ("trainer.py", "import offloop; offloop.Trainer"),
        ("consumers.py", "from offloop import Callback"),
        ("bus.py", "from offloop.trainer import Trainer"),
        ("bus.py", "from offloop.consumers import Callback"),
    ],
)
def test_a_file_beside_the_script_is_named(tmp_path: Path, file: str, front: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    (tmp_path / "train.py").write_text(front)
    done = run(tmp_path, sys.executable, "train.py")
    package = file.partition("/")[0].removesuffix(".py")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert f"{tmp_path / file} hides offloop's package '{package}'" in last
    assert f"rename it (my_{package}.py" in last


def test_a_file_that_hides_what_is_not_used_is_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text("from offloop import Event, Publisher\nprint(Publisher.__module__)\n")
    done = run(tmp_path, sys.executable, "trainer.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "offloop.bus.publisher.publisher\n", "")


@pytest.mark.parametrize(
    ("command", "package"),
    [("bus", "bus"), ("trainer", "trainer"), ("consumer", "consumers"), ("consumer", "bus"), ("offloop", "bus")],
)
def test_a_command_names_the_file_in_one_line(tmp_path: Path, command: str, package: str) -> None:
    hiding = tmp_path / f"{package}.py"
    hiding.write_text("")
    done = run(tmp_path, BIN / command, "--help", path=str(tmp_path))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert f"{hiding} hides offloop's package '{package}'" in done.stderr


def test_a_training_in_a_folder_with_such_files_is_recorded(tmp_path: Path) -> None:
    for name in ("bus", "trainer", "consumers"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the user')")
    done = run(tmp_path, BIN / "trainer", "digits", "--run-name", "r", "-d", "3ba", "--no-progress")
    assert done.returncode == 0, done.stderr
    shown = run(tmp_path, BIN / "consumer", "--replay", "r", "--callbacks", "metrics", "--log", "console")
    assert shown.returncode == 0, shown.stderr


def test_the_tests_of_a_project_with_such_files_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "bus.py").write_text("line = 7\n")
    (tmp_path / "test_lines.py").write_text("import offloop.bus\n\ndef test_line():\n    assert bus.line == 7\n")
    (tmp_path / "test_fixture.py").write_text("def test_it(recording):\n    recording('x.mcap')\n")
    done = run(tmp_path, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_lines.py")
    assert done.returncode == 0, done.stdout
    done = run(tmp_path, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_fixture.py")
    assert f"{tmp_path / 'bus.py'} hides offloop's package 'bus'" in done.stdout
