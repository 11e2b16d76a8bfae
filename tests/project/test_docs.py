"""The docs: code on every page runs, commands and names on them exist, and what is generated is not stale."""

import contextlib
import importlib
import json
import os
import pkgutil
import re
import runpy
import shlex
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import build_site
import pytest
from command_lines import COMMANDS, problem
from commands import command
from documents import PAGES, ROOT, Block, CommandLine, blocks, command_lines
from markdown.extensions.toc import slugify  # type: ignore[import-untyped]

from offloop.consumers.cli.main import main as consumer_main
from offloop.consumers.cli.registry import CALLBACKS

CODE = [block for page in PAGES for block in blocks(page, "python")]
RUN_BY_THE_TEST_OF_THEIR_PART = {"docs/algorithms.md", "docs/checkpoints.md", "docs/notebooks.md", "docs/testing.md"}
"""Pages all of whose blocks another test runs, with what they need around them."""
RUNNING = list(
    {
        # Once, where several pages show the same.
        block.text: block
        for block in reversed(CODE)
        if block.is_run and block.page not in RUN_BY_THE_TEST_OF_THEIR_PART
    }.values()
)[::-1]
README = [block for block in CODE if block.page == "README.md"]

LOOP = """
from offloop import Event, Publisher

with Publisher("my-run") as publisher:
    for batch in range(1, 101):
        loss = 1 / batch
        publisher.publish(Event.BATCH_END, epoch=0, batch=batch, sample=32 * batch, loss=loss, lr=[0.1])
"""
"""What the callbacks and loggers on the pages are attached to."""
REFERENCE = "docs/reference"
EXPORTING = (
    "offloop.bus",
    "offloop.consumers",
    "offloop.consumers.testing",
    "offloop.trainer",
    "offloop.trainer.algorithms",
    "offloop.trainer.schedulers",
    "offloop",
)
"""The packages whose public names are all on reference pages."""


@pytest.fixture(autouse=True)
def _forget_modules(tmp_path: Path) -> Iterator[None]:
    """Forget modules of a test: the next one has others of these names."""
    yield
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(module, "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path], None]:
    """Run a program of Python, in this process and in the test's own folder."""
    monkeypatch.chdir(tmp_path)
    # As in a console: what is in the current folder can be imported, also by the processes that it starts.
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))

    def run_script(file: Path) -> None:
        monkeypatch.setattr(sys, "argv", [file.name])
        runpy.run_path(str(file), run_name="__main__")

    return run_script


# Code


# Transformers pins memory where there is no GPU, too.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found:UserWarning")
@pytest.mark.parametrize("block", RUNNING, ids=str)
def test_code_on_the_pages_runs(
    block: Block,
    script: Callable[[Path], None],
    runs_dir: Path,
    tmp_path: Path,
) -> None:
    # Those that its page has shown before are beside it.
    for one in (other for other in CODE if other.page == block.page and other.line <= block.line):
        (tmp_path / one.file_name).write_text(one.text)
    file = tmp_path / block.file_name
    if "\ndef test_" in block.text:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, file]
        subprocess.run(command, cwd=tmp_path, timeout=200, check=True)
    else:
        script(file)


# What the guides say of their examples


def test_the_guides_callbacks_and_loggers_do_what_they_say(
    script: Callable[[Path], None],
    runs_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for block in CODE:
        if block.page in ("docs/write_callback.md", "docs/write_logger.md"):
            (tmp_path / block.file_name).write_text(block.text)
    (tmp_path / "loop.py").write_text(LOOP)
    script(tmp_path / "loop.py")
    (tmp_path / "explosion.py").write_text(README[0].text)
    callbacks = "explosion.py:Explosion,spikes.py:Spikes,journal.py:Journal,ratio.py:UpdateRatio,enough.py:Enough"
    loggers = "tsv.py:Tsv,summary.py:Summary,table.py:SqlTable"
    options = ("-o", "Tsv.digits=3", "-o", "Spikes.factor=1000", "-o", "Explosion.limit=0.4")
    consumer = command("consumer", consumer_main, monkeypatch, capsys)
    done = consumer("--run", "my-run", "--callbacks", callbacks, "--log", loggers, *options)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert {"1\tloss/over_mean\t1", "2\tloss/over_mean\t0.5"} <= set(lines)
    assert [line for line in lines if line.startswith("loss ")] == ["loss 1.0 at batch 1", "loss 0.5 at batch 2"]
    assert set(json.loads((runs_dir / "my-run" / "summary.json").read_text())) == {"loss/over_mean"}
    rows = "SELECT count(*), max(step), max(value) FROM metrics WHERE run = 'my-run-1' AND name = 'loss/over_mean'"
    with contextlib.closing(sqlite3.connect(tmp_path / "metrics.sqlite")) as database:
        assert database.execute(rows).fetchall() == [(100, 100, 1.0)]


# Commands


def test_the_page_of_commands_has_every_command_that_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["scripts"]) == set(COMMANDS)
    named = set(re.findall(r"^\| `([^`]+)`", (ROOT / "docs" / "commands.md").read_text(), re.MULTILINE))
    assert named == set(build_site.commands()) - {"offloop"}


def test_commands_on_the_pages_exist() -> None:
    lines = [line for page in PAGES for line in command_lines(page)]
    # The README's picture is made of these.
    typed = re.findall(r'film\.type\(\w+, "([^"&]+)', (ROOT / "tools" / "tour.py").read_text())
    lines += [CommandLine("README.md", number, tuple(shlex.split(line)), True) for number, line in enumerate(typed)]
    wrong = [f"{line}: {what}" for line in lines if (what := problem(line)) is not None]
    assert not wrong, "\n".join(wrong)


# Names


def documented() -> dict[str, str]:
    """Return the names that reference pages document, and on which page."""
    found: dict[str, str] = {}
    for page in PAGES:
        if page.startswith(REFERENCE):
            found |= dict.fromkeys(re.findall(r"^::: (\S+)$", (ROOT / page).read_text(), re.MULTILINE), page)
    return found


def test_every_public_name_is_on_a_reference_page() -> None:
    # Names that two packages export are documented where most people import them from.
    documented_objects = {id(pkgutil.resolve_name(name)) for name in documented()}
    for package in map(importlib.import_module, EXPORTING):
        missing = [name for name in package.__all__ if id(getattr(package, name)) not in documented_objects]
        assert not missing, f"add '::: {package.__name__}.NAME' to a page in {REFERENCE} for {', '.join(missing)}"


def test_every_callback_is_on_its_page() -> None:
    page = (ROOT / "docs" / "callbacks.md").read_text()
    for entry in CALLBACKS.entries():
        name = CALLBACKS.find(entry.name).__name__
        assert f"\n| [`{entry.name}`](reference/callbacks.md#offloop.consumers.{name}) | `{name}` |" in page


def test_links_outside_of_the_site_lead_somewhere() -> None:
    # Those between the pages of the site are checked when it is built.
    for page in (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/llms.txt")):
        for target, anchor in re.findall(r"\]\(([^)#:\s]+)#?([^)#:\s]*)\)", page.read_text()):
            assert (page.parent / target).exists(), target
            headings = re.findall(r"^#+ (.*)$", (page.parent / target).read_text(), re.MULTILINE) if anchor else []
            assert not anchor or anchor in {slugify(one, "-") for one in headings}, f"{target}#{anchor}"
