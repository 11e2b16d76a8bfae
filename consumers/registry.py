"""Which callbacks and loggers there are: by short name, from plug-ins, or by where their class is."""

import importlib
import importlib.util
import inspect
import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

from bus.errors import ConfigurationError
from consumers.callback import Callback
from consumers.logger import LoggerDestination
from consumers.options import Option, close_matches, convert_options, options_of, parse_assignment

__all__ = ["CALLBACKS", "LOGGERS", "Entry", "Registry", "create_selected"]

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """What a list of callbacks or loggers shows of one."""

    name: str
    summary: str
    """First paragraph of the class's docstring, in one line, or why the class cannot be loaded."""
    options: tuple[Option, ...]


class Registry(Generic[T]):
    """Finds classes of one kind and makes objects of them.

    A name is a short name (of ours, or of an entry point in ``group``), ``package.module:Class``, or
    ``path/to/file.py:Class``.
    """

    def __init__(self, kind: str, base: type[T], group: str, own: Mapping[str, str]) -> None:
        self.kind = kind
        self._base = base
        self._group = group
        self._own = own

    def names(self) -> list[str]:
        """Every short name: ours, then those of plug-ins."""
        return list(self._targets())

    def find(self, name: str) -> type[T]:
        """The class of that name.

        Raises:
            ConfigurationError: there is none, it cannot be imported, or it is of another kind.
        """
        if ":" in name:
            return self._load(name, name)
        targets = self._targets()
        if name not in targets:
            raise ConfigurationError(
                f"there is no {self.kind} {name!r}: {close_matches(name, targets)}"
                f"there are {', '.join(sorted(targets))}; others as package.module:Class or file.py:Class"
            )
        return self._load(name, targets[name])

    def create(self, name: str, options: Mapping[str, str]) -> T:
        """Makes one, with options as they stand on a command line.

        Raises:
            ConfigurationError: as :meth:`find`, and for options that it does not have or does not take.
        """
        found = self.find(name)
        arguments = convert_options(name, options_of(found), options)
        try:
            return found(**arguments)
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.kind} {name}: {error}") from None

    def entries(self) -> list[Entry]:
        """Everything with a short name, in alphabetical order; a plug-in that cannot be loaded says why."""
        return [self._entry(name) for name in sorted(self._targets())]

    def _entry(self, name: str) -> Entry:
        try:
            found = self.find(name)
        except ConfigurationError as error:
            return Entry(name, f"cannot be used: {error}", ())
        return Entry(name, _summary(found), tuple(options_of(found)))

    def _targets(self) -> dict[str, str]:
        plugins = {point.name: point.value for point in entry_points(group=self._group)}
        return {**plugins, **self._own}

    def _load(self, name: str, target: str) -> type[T]:
        place, _, attribute = target.rpartition(":")
        module = self._import(name, place)
        found = getattr(module, attribute.strip(), None)
        if found is None:
            classes = [key for key, value in vars(module).items() if isinstance(value, type)]
            raise ConfigurationError(
                f"{self.kind} {name!r}: there is no {attribute!r} in {place}: {close_matches(attribute, classes)}"
                f"write {place}:Class with a class that it has"
            )
        if not (isinstance(found, type) and issubclass(found, self._base)):
            raise ConfigurationError(
                f"{self.kind} {name!r}: {attribute} has to be a subclass of consumers.{self._base.__name__}"
            )
        return found

    def _import(self, name: str, place: str) -> ModuleType:
        is_file = place.endswith(".py")
        if is_file and not Path(place).is_file():
            raise ConfigurationError(f"{self.kind} {name!r}: there is no file {place}")
        try:
            return _import_file(Path(place)) if is_file else _import_module(place)
        except (ImportError, SyntaxError, ValueError) as error:
            raise ConfigurationError(
                f"{self.kind} {name!r} cannot be imported from {place or 'nowhere'}: {type(error).__name__}: {error}"
            ) from error


def _summary(found: type) -> str:
    first_paragraph = (inspect.getdoc(found) or "no description").split("\n\n")[0]
    return " ".join(first_paragraph.replace("``", "").split())


def _import_module(name: str) -> ModuleType:
    # An installed command does not look for modules where it is called; `python -m` does, and people expect it.
    _look_in(os.getcwd())
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    # Under a name of its own, so that a file called json.py does not take the place of the library's json.
    name = f"consumer_file_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, as `import` does: dataclasses and type hints look their module up.
    sys.modules[name] = module
    _look_in(str(path.parent))
    spec.loader.exec_module(module)
    return module


def _look_in(directory: str) -> None:
    if directory not in sys.path:
        sys.path.append(directory)


CALLBACKS: Registry[Callback] = Registry(
    "callback",
    Callback,
    "offloop.callbacks",
    {
        "lr": "consumers.callbacks.lr_monitor:LRMonitor",
        "metrics": "consumers.callbacks.trainer_metrics:TrainerMetrics",
        "speed": "consumers.callbacks.speed_monitor:SpeedMonitor",
    },
)
"""What ``--callbacks`` takes."""

LOGGERS: Registry[LoggerDestination] = Registry(
    "logger",
    LoggerDestination,
    "offloop.loggers",
    {
        "console": "consumers.loggers.console:ConsoleLogger",
        "csv": "consumers.loggers.csv:CsvLogger",
        "jsonl": "consumers.loggers.jsonl:JsonlLogger",
    },
)
"""What ``--log`` takes."""


def create_selected(
    callbacks: Sequence[str], loggers: Sequence[str], assignments: Sequence[str]
) -> tuple[list[Callback], list[LoggerDestination]]:
    """Makes the callbacks and loggers of those names, each once, with options such as ``speed.window_size=50``.

    The class of a long name can stand for it: ``Mine.size=3`` belongs to ``my.module:Mine``.

    Raises:
        ConfigurationError: a name, an option or a value is not allowed, or an option belongs to none of the names.
    """
    options: dict[str, dict[str, str]] = {}
    for assignment in assignments:
        owner, option, text = parse_assignment(assignment)
        options.setdefault(owner, {})[option] = text
    owners = {key: name for name in (*callbacks, *loggers) for key in (name.rpartition(":")[2], name)}
    for owner in options:
        if owner not in owners:
            raise ConfigurationError(
                f"option for {owner!r}, which is not chosen: {close_matches(owner, owners)}"
                f"chosen are {', '.join(dict.fromkeys(owners.values()))}"
            )

    def options_for(name: str) -> dict[str, str]:
        return {**options.get(name.rpartition(":")[2], {}), **options.get(name, {})}

    return (
        [CALLBACKS.create(name, options_for(name)) for name in dict.fromkeys(callbacks)],
        [LOGGERS.create(name, options_for(name)) for name in dict.fromkeys(loggers)],
    )
