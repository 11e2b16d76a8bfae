"""Names and options of callbacks and loggers as people write them on a command line."""

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace

import pytest

from offloop.bus.errors import ConfigurationError
from offloop.bus.plugins import registry
from offloop.consumers import Callback, ConsoleLogger, JsonlLogger, LRMonitor, SpeedMonitor, TrainerMetrics
from offloop.consumers.cli.registry import CALLBACKS, LOGGERS, create_selected

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
    """A file with a callback in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*registry.sys.path])
    path = tmp_path / "plugin_under_test.py"
    path.write_text(PLUGIN)
    return path


def test_short_names_make_the_callbacks_and_loggers_in_the_order_given_each_once() -> None:
    callbacks, loggers = create_selected(["speed", "metrics", "lr", "speed"], ["jsonl", "console"], [])
    assert [type(callback) for callback in callbacks] == [SpeedMonitor, TrainerMetrics, LRMonitor]
    assert [type(logger) for logger in loggers] == [JsonlLogger, ConsoleLogger]


def test_options_reach_the_constructor_as_values_of_its_types(tmp_path: Path) -> None:
    texts = ["speed.window_size=1", "speed.gpu_flops_available=1e12", "speed.time_unit=seconds"]
    [speed], _ = create_selected(["speed"], [], texts)
    assert vars(speed)["_gpu_flops_available"] == 1e12
    assert vars(speed)["_divider"] == 1
    assert vars(speed)["_batches"].maxlen == 2


@pytest.mark.parametrize(
    ("callbacks", "options", "message"),
    [
        (
            ["sped"],
            [],
            r"there is no callback 'sped': did you mean speed\? there are activations, alert, .*; others as",
        ),
        (["zzz"], [], r"there is no callback 'zzz': there are activations, .*, threshold-stop"),
        (["speed"], ["speed.windowsize=3"], r"speed has no option 'windowsize': did you mean window_size\? it has gpu"),
        (["lr"], ["lr.x=3"], "lr has no option 'x': it has none"),
        (["speed"], ["speed.window_size=many"], "option speed.window_size takes a whole number, not 'many'"),
        (["speed"], ["speed.window_size=0"], "callback speed: window_size is 0: use a number from 1 on"),
        (["speed"], ["speed.time_unit=weeks"], "takes seconds or minutes or hours or days, not 'weeks'"),
        (["speed"], ["sped.window_size=3"], r"option for 'sped', which is not chosen: did you mean speed\? chosen are"),
        (["speed"], ["window_size=3"], r"'window_size=3' is not an option: write NAME.OPTION=VALUE"),
        (["speed"], ["speed.window_size"], "is not an option: write NAME.OPTION=VALUE"),
        (["no.such.module:Thing"], [], "cannot be imported from no.such.module: ModuleNotFoundError"),
        (["nowhere.py:Thing"], [], "there is no file nowhere.py"),
        (["json:JSONDecoder"], [], "has to be a subclass of offloop.consumers.Callback"),
        (["consumers:SpeedMonitors"], [], r"there is no 'SpeedMonitors' in consumers: did you mean SpeedMonitor"),
    ],
)
def test_what_is_not_allowed_is_refused_with_what_is(callbacks: list[str], options: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        create_selected(callbacks, ["console"], options)


def test_an_unknown_logger_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigurationError, match=r"there is no logger 'json': did you mean jsonl.*console, csv, jsonl"):
        create_selected([], ["json"], [])


@pytest.mark.parametrize("name", ["plugin_under_test.py:Peaks", "plugin_under_test:Peaks"])
def test_a_class_is_found_in_a_file_and_in_a_module_of_the_current_directory(plugin: Path, name: str) -> None:
    [peaks], _ = create_selected([name], [], ["Peaks.height=2.5", f"{name}.name=summit"])
    assert isinstance(peaks, Callback)
    assert (vars(peaks)["height"], vars(peaks)["name"]) == (2.5, "summit")


def test_an_option_that_has_to_be_given_is_asked_for(plugin: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"needs '-o plugin_under_test.py:Peaks.height=...'"):
        create_selected([f"{plugin.name}:Peaks"], [], [])


def test_what_a_class_refuses_and_a_class_that_is_not_complete_are_named(plugin: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"callback plugin_under_test.py:Fussy: size 3 is too much"):
        create_selected([f"{plugin.name}:Fussy"], [], ["Fussy.size=3"])
    with pytest.raises(ConfigurationError, match="Unfinished has to define measure"):
        create_selected([f"{plugin.name}:Unfinished"], [], [])


def test_the_class_s_name_can_stand_for_a_short_name_which_prevails() -> None:
    [speed], _ = create_selected(["speed"], [], ["speed.window_size=1", "SpeedMonitor.window_size=7"])
    assert vars(speed)["_batches"].maxlen == 2


def test_a_file_with_a_mistake_is_named_with_the_mistake(plugin: Path) -> None:
    plugin.write_text("class Peaks(:\n")
    with pytest.raises(ConfigurationError, match=r"plugin_under_test.py: SyntaxError"):
        create_selected([f"{plugin.name}:Peaks"], [], [])


def test_plug_ins_are_listed_and_a_broken_one_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints(
        EntryPoint(name, value, "offloop.callbacks")
        for name, value in [("mine", "consumers:LRMonitor"), ("broken", "no_such_module:X"), ("lr", "json:X")]
    )
    monkeypatch.setattr(registry, "distributions", lambda: [SimpleNamespace(name="plug-ins", entry_points=points)])
    assert CALLBACKS.find("mine") is CALLBACKS.find("lr") is LRMonitor
    entries = {entry.name: entry.summary for entry in CALLBACKS.entries()}
    assert {"broken", "lr", "metrics", "mine", "speed"} <= set(entries)
    assert list(entries) == sorted(entries)
    assert entries["mine"] == "Learning rate of every parameter group, after each batch."
    assert "cannot be used: " in entries["broken"]
    assert "ModuleNotFoundError" in entries["broken"]
    assert {"console", "csv", "jsonl"} <= set(LOGGERS.names())
