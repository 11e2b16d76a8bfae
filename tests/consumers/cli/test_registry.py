"""Names and options of callbacks and loggers as people write them on a command line."""

from pathlib import Path

import pytest

from offloop.bus.errors import ConfigurationError
from offloop.bus.plugins import registry
from offloop.consumers import Callback
from offloop.consumers.cli.registry import create_selected

PLUGIN = '''
from abc import ABC, abstractmethod
from offloop.consumers import Callback

class Peaks(Callback):
    """Finds peaks.

    At length.
    """

    def __init__(self, height, *, name="peak"):
        self.height = height
        self.name = name

class Unrelated:
    pass

class Fussy(Callback):
    def __init__(self, size=1):
        if size > 1:
            raise ValueError(f"size {size} is too much")

class Unfinished(Callback, ABC):
    @abstractmethod
    def measure(self): ...
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*registry.sys.path])
    path = tmp_path / "plugin_under_test.py"
    path.write_text(PLUGIN)
    return path


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
    ],
)
def test_invalid_options_are_refused_with_the_allowed_ones(callback: str, options: list[str], hint: str) -> None:
    with pytest.raises(ConfigurationError, match=hint):
        create_selected([callback], ["console"], options)


@pytest.mark.parametrize("name", ["plugin_under_test.py:Peaks", "plugin_under_test:Peaks"])
def test_a_class_is_found_in_a_file_and_in_a_module_of_the_current_directory(plugin: Path, name: str) -> None:
    [peaks], _ = create_selected([name], [], ["Peaks.height=2.5", f"{name}.name=summit"])
    assert isinstance(peaks, Callback)
    assert (vars(peaks)["height"], vars(peaks)["name"]) == (2.5, "summit")


def test_a_missing_required_option_is_named(plugin: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"-o plugin_under_test.py:Peaks.height="):
        create_selected([f"{plugin.name}:Peaks"], [], [])


def test_errors_of_a_constructor_and_abstract_classes_are_reported(plugin: Path) -> None:
    with pytest.raises(ConfigurationError, match="size 3 is too much"):
        create_selected([f"{plugin.name}:Fussy"], [], ["Fussy.size=3"])
    with pytest.raises(ConfigurationError, match="measure"):
        create_selected([f"{plugin.name}:Unfinished"], [], [])
