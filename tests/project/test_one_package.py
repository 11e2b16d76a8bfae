"""What is installed has one name at its top level: no file and no package of the user's own is in its way."""

import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from paths import ROOT

NAMES = ("bus", "trainer", "consumers")

LOOP = """
    from offloop import Callback, Event, Publisher, Recording, Trainer

    with Publisher("loop") as publisher:
        for batch in range(3):
            publisher.publish(Event.BATCH_END, batch=batch, loss=1.0)
    print(len(list(Recording("runs/loop"))), Callback.__module__, Trainer.__module__)
"""


def run(folder: Path, *command: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    tracked = run(ROOT, "git", "ls-files", "-z", "bus", "consumers", "offloop", "trainer").stdout.split("\0")
    for name in filter(None, [*tracked, "pyproject.toml", "README.md", "LICENSE"]):
        to = source / name
        to.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            to.symlink_to(os.readlink(ROOT / name))
        elif (ROOT / name).exists():
            to.write_bytes((ROOT / name).read_bytes())
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(folder, *pip, "--wheel-dir", folder, source)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the wheel lies as pip installs it."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def test_the_wheel_has_one_name_at_its_top_level(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name.split("/")[0]} == {"offloop"}
    tracked = run(ROOT, "git", "ls-files", "bus", "consumers", "offloop", "trainer").stdout.split()
    files = {name if name.startswith("offloop/") else f"offloop/{name}" for name in tracked}
    assert {name for name in names if ".dist-info" not in name} == files - {f"offloop/{name}" for name in NAMES}


def test_a_script_beside_files_with_the_names_of_our_parts_works(tmp_path: Path, installed: Path) -> None:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the user')")
    (tmp_path / "train.py").write_text(textwrap.dedent(LOOP))
    done = run(tmp_path, sys.executable, "train.py", PYTHONPATH=str(installed), OFFLOOP_RUNS_DIR=str(tmp_path / "runs"))
    assert done.stdout.split()[1:] == ["offloop.consumers.api.callback", "offloop.trainer.trainer"]
