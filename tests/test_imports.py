"""A laptop that watches a cluster has the base install only: no torch, nothing of the other extras. And what is not
needed is not loaded: a command shows its help at once."""

import importlib
import subprocess
import sys

import click
import pytest

from offloop.bus.cli.main import bus
from offloop.bus.cli.server import server

IMPORT_WITHOUT_EXTRAS = """
import importlib, pkgutil, sys

class Absent:
    names = {"torch", "torchmetrics", "safetensors", "cloudpickle", "sklearn", "numpy", "psutil", "pytest", "rich"}
    names |= {"lightning", "pytorch_lightning", "transformers", "accelerate", "composer", "keras", "ignite"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
package = importlib.import_module("offloop")
names = [package.__name__] + [
    module.name
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=str)
    # What only pytest loads needs pytest; watch() is to be reached through offloop; the trainer needs torch.
    if not module.name.endswith("__main__") and module.name not in ("offloop.pytest_plugin", "offloop.own_loop")
    if not module.name.startswith("offloop.trainer")
]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        # An adapter needs its framework.
        assert name.startswith("offloop.") and "install it with: pip install" in str(error), (name, error)
try:
    package.watch
except ModuleNotFoundError as error:
    assert "pip install 'offloop[trainer]'" in str(error)
print(*names)
present = Absent.names & set(sys.modules)
assert not present, present
"""


def test_every_module_imports_without_the_extras():
    result = subprocess.run([sys.executable, "-c", IMPORT_WITHOUT_EXTRAS], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert {"offloop.bus.types.event", "offloop.consumers.runner.runner"} <= set(result.stdout.split())


HEAVY = {"asyncio", "mcap", "nicegui", "numpy", "rich", "torch", "zmq"}


def loaded_by(code: str, *arguments: str) -> set[str]:
    """The modules that a new process has loaded after ``code``."""
    code = f"{code}\nimport sys; sys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


HELP = """
import sys
from offloop import commands
for line in sys.argv[1:]:
    program, *sys.argv[1:] = *line.split(), "--help"
    try:
        getattr(commands, program)()
    except SystemExit:
        pass
"""


def test_help_imports_no_heavy_package() -> None:
    of_bus = [f"offloop {name}" for name in bus.list_commands(click.Context(bus))]
    of_server = [f"offloop server {name}" for name in server.commands]
    programs = ["offloop", "trainer", "trainer digits", "trainer chars", "consumer"]
    loaded = loaded_by(HELP, *programs, *of_bus, *of_server)
    assert "click" in loaded
    assert not loaded & HEAVY


@pytest.mark.slow
def test_a_training_imports_no_commands_displays_or_metrics() -> None:
    displays = {"click", "rich", "nicegui", "offloop.consumers.dashboard"}
    loaded = loaded_by("from offloop import watch; from offloop.trainer import Trainer")
    assert not loaded & {*displays, "torchmetrics", "transformers"}


def test_public_names_are_listed_and_loaded_on_use() -> None:
    packages = [f"offloop.{name}" for name in ("bus", "consumers", "consumers.callbacks", "consumers.loggers")]
    for package in packages:
        found = importlib.import_module(package)
        assert set(found.__all__) <= set(dir(found))
        assert all(getattr(found, name) is not None for name in found.__all__)
        with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Nothing'"):
            _ = found.Nothing
    assert not loaded_by(f"import {', '.join(packages)}") & HEAVY
