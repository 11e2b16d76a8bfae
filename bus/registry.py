"""Classes that are found by name: by a short one, from plug-ins, or by where they are."""

import importlib
import importlib.util
import inspect
import os
import re
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

from bus.errors import ConfigurationError
from bus.options import Option, close_matches, convert_options, options_of, parse_assignment

__all__ = ["Entry", "Registry", "options_for"]

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """What a list of such classes shows of one."""

    name: str
    summary: str
    """First sentence of the class's docstring, in one line, or why the class cannot be loaded."""
    options: tuple[Option, ...]


class Registry(Generic[T]):
    """Finds classes of one kind and makes objects of them.

    A name is a short name (of ours, or of an entry point in ``group``), ``package.module:Class``, or
    ``path/to/file.py:Class``.

    Args:
        kind: what messages call such an object.
        base: what the classes have to inherit from.
        group: the entry points by which other packages add theirs.
        own: short names, and for each ``package.module:Class``.
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
        except ValueError as error:
            raise ConfigurationError(f"{self.kind} {name}: {error}") from error

    def create_all(self, names: Iterable[str], assignments: Sequence[str]) -> list[T]:
        """Makes those of these names, each once, with options such as ``speed.window_size=50``.

        Raises:
            ConfigurationError: a name, an option or a value is not allowed, or an option belongs to none of the names.
        """
        chosen = {name: self.find(name) for name in names}
        options = options_for(chosen, assignments)
        return [self.create(name, options[name]) for name in chosen]

    def entries(self) -> list[Entry]:
        """Everything with a short name, in alphabetical order; a plug-in that cannot be loaded says why."""
        return [self._entry(name) for name in sorted(self._targets())]

    def listing(self) -> list[str]:
        """The lines of a list of :meth:`entries`: names and what they do, and below each its options."""
        entries = self.entries()
        width = max((len(entry.name) for entry in entries), default=0) + 3
        lines = []
        for entry in entries:
            lines.append(f"  {entry.name:<{width}}{entry.summary}")
            lines += [f"{'':<{width + 2}}-o {entry.name}.{option} ({option.kind})" for option in entry.options]
        return lines

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
            package = self._base.__module__.partition(".")[0]
            raise ConfigurationError(
                f"{self.kind} {name!r}: {attribute} has to be a subclass of {package}.{self._base.__name__}"
            )
        if inspect.isabstract(found):
            missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
            raise ConfigurationError(f"{self.kind} {name!r}: {attribute} has to define {missing}")
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
    first_sentence = re.split(r"(?<=\.)\s+(?=[A-Z])", first_paragraph)[0]
    return " ".join(first_sentence.replace("``", "").split())


def _import_module(name: str) -> ModuleType:
    # An installed command does not look for modules where it is called; `python -m` does, and people expect it.
    _look_in(os.getcwd())
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    # Under a name of its own, so that a file called json.py does not take the place of the library's json.
    name = f"offloop_file_{path.stem}_{zlib.crc32(bytes(path)):08x}"
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


def options_for(chosen: Mapping[str, type], assignments: Sequence[str]) -> dict[str, dict[str, str]]:
    """The options of each of the chosen classes by its name, from texts such as ``speed.window_size=50``. A class's own
    name can stand for the name that it was chosen by: ``Mine.size=3`` belongs to ``my.module:Mine``.

    Raises:
        ConfigurationError: a text is no option, or belongs to none of the classes.
    """
    options: dict[str, dict[str, str]] = {}
    for assignment in assignments:
        owner, option, text = parse_assignment(assignment)
        options.setdefault(owner, {})[option] = text
    owners = {*chosen, *(found.__name__ for found in chosen.values())}
    for owner in options:
        if owner not in owners:
            raise ConfigurationError(
                f"option for {owner!r}, which is not chosen: {close_matches(owner, sorted(owners))}"
                f"chosen are {', '.join(chosen) or 'none'}"
            )
    return {name: {**options.get(found.__name__, {}), **options.get(name, {})} for name, found in chosen.items()}
