"""Names and options of callbacks and loggers as people write them on a command line."""

from pathlib import Path

import pytest

from offloop.bus.errors import ConfigurationError
from offloop.bus.plugins import registry
from offloop.consumers import Callback
from offloop.consumers.cli.registry import create_selected

PLUGIN = """
from abc import ABC, abstractmethod
from offloop.consumers import Callback

class Peaks(Callback):
    def __init__(self, height, *, name="peak"):
        self.height = height
        self.name = name

class Fussy(Callback):
    def __init__(self, size=1):
        if size > 1:
            raise ValueError(f"size {size} is too much")

class Unfinished(Callback, ABC):
    @abstractmethod
    def measure(self): ...
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*registry.sys.path])
    (tmp_path / "plugin_under_test.py").write_text(PLUGIN)


@pytest.mark.parametrize(
    ("callback", "options", "hint"),
    [
        ("sped", [], "did you mean speed"),
        ("speed", ["speed.windowsize=3"], "did you mean window_size"),
        ("speed", ["speed.window_size=0"], "window_size is 0"),
        ("speed", ["sped.window_size=3"], "did you mean speed"),
        ("no.such.module:Thing", [], "ModuleNotFoundError"),
        ("nowhere.py:Thing", [], "no file nowhere.py"),
        ("json:JSONDecoder", [], "offloop.consumers.Callback"),
        ("plugin_under_test.py:Peaks", [], r"-o plugin_under_test.py:Peaks.height="),
        ("plugin_under_test.py:Fussy", ["Fussy.size=3"], "size 3 is too much"),
        ("plugin_under_test.py:Unfinished", [], "measure"),
    ],
)
@pytest.mark.usefixtures("plugin")
def test_mistakes_are_named_with_what_is_allowed(callback: str, options: list[str], hint: str) -> None:
    with pytest.raises(ConfigurationError, match=hint):
        create_selected([callback], ["console"], options)


@pytest.mark.parametrize("name", ["plugin_under_test.py:Peaks", "plugin_under_test:Peaks"])
@pytest.mark.usefixtures("plugin")
def test_a_class_is_found_in_a_file_and_in_a_module_of_the_current_directory(name: str) -> None:
    [peaks], _ = create_selected([name], [], ["Peaks.height=2.5", f"{name}.name=summit"])
    assert isinstance(peaks, Callback)
    assert (vars(peaks)["height"], vars(peaks)["name"]) == (2.5, "summit")
