"""Classes found by a short name, as plug-ins, or by module or file."""

import importlib
import importlib.util
import inspect
import logging
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

from offloop.bus.errors import ConfigurationError, close_matches
from offloop.bus.plugins.options import PluginOption, convert_options, options_of, parse_assignment
from offloop.bus.processes import current_folder

T = TypeVar("T")
_log = logging.getLogger("offloop")


@dataclass(frozen=True)
class Entry:
    name: str
    summary: str  # first sentence of the class's docstring, and the package of a plug-in; or why it cannot be loaded
    options: tuple[PluginOption, ...]


class Registry(Generic[T]):
    """Finds classes of one kind and creates objects.

    A name is a short name (of ours, or of an entry point in ``group``), ``package.module:Class``, or
    ``path/to/file.py:Class``.

    Args:
        kind: the word for such an object in messages.
        base: base class of all classes.
        group: entry points of other packages. They are imported only when requested. A name of ours, or of an earlier
            package, takes precedence.
        own: short name to ``package.module:Class``.
        adapt: makes a class of ours of one that does not inherit from ``base``, or returns ``None``.
        importing: context manager around imports of other people's modules."""

    def __init__(
        self,
        kind: str,
        base: type[T],
        group: str,
        own: Mapping[str, str],
        *,
        adapt: Callable[[object], type[T] | None] | None = None,
        importing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.kind = kind
        self._base = base
        self._group = group
        self._own = own
        self._adapt = adapt
        self._importing = importing

    def find(self, name: str) -> type[T]:
        """Return the class of that name. Raises ConfigurationError if missing, not importable, or of another kind."""
        if name in self._own:
            return self._load(name, self._own[name])
        if ":" in name:
            return self._load(name, name)
        if name.endswith(".py"):
            raise ConfigurationError(
                f"{self.kind} {name!r} is a file: add the name of the class, as in {name}:MyClass", name=name
            )
        plugins = self._plugins()
        if name not in plugins:
            names = sorted([*self._own, *plugins])
            raise ConfigurationError(
                f"there is no {self.kind} {name!r}: {close_matches(name, names)}"
                f"there are {', '.join(names)}; others as package.module:Class or file.py:Class",
                name=name,
            )
        return self._load(name, plugins[name].value)

    def create(self, name: str, options: Mapping[str, str]) -> T:
        """Create an object with options from a command line. Raises ConfigurationError."""
        found = self.find(name)
        arguments = convert_options(name, options_of(found), options)
        try:
            return found(**arguments)
        except ValueError as error:
            raise ConfigurationError(f"{self.kind} {name}: {error}", name=name) from error

    def create_all(self, names: Iterable[str], assignments: Sequence[str]) -> list[T]:
        """Create one object per name, with options such as ``speed.window_size=50``. Raises ConfigurationError."""
        chosen = {name: self.find(name) for name in names}
        options = options_for(chosen, assignments)
        return [self.create(name, options[name]) for name in chosen]

    def entries(self) -> list[Entry]:
        """Return all classes with short names, sorted; a plug-in that cannot be loaded has the reason."""
        plugins = self._plugins()
        return [self._entry(name, plugins.get(name)) for name in sorted([*self._own, *plugins])]

    def listing(self) -> list[str]:
        entries = self.entries()
        width = max((len(entry.name) for entry in entries), default=0) + 3
        lines = []
        for entry in entries:
            lines.append(f"  {entry.name:<{width}}{entry.summary}")
            lines += [f"{'':<{width + 2}}-o {entry.name}.{option} ({option.kind})" for option in entry.options]
        return lines

    def _entry(self, name: str, plugin: EntryPoint | None) -> Entry:
        package = "" if plugin is None or plugin.dist is None else f" (from {plugin.dist.name})"
        try:
            found = self.find(name)
            return Entry(name, _summary(found) + package, tuple(options_of(found)))
        except Exception as error:  # noqa: BLE001  other people's constructors may be annotated with anything
            return Entry(name, f"cannot be used{package}: {error}", ())

    def _plugins(self) -> dict[str, EntryPoint]:
        # Of two installations of a package the first on the path counts. Of two packages with the same name for a
        # plug-in, the first by the package's name.
        packages = {str(one.name): one for one in reversed([*distributions()])}
        found: dict[str, EntryPoint] = {}
        for package, one in sorted(packages.items()):
            try:
                points = one.entry_points.select(group=self._group)
            except Exception as error:  # noqa: BLE001  a damaged file of one package must not hide all others
                _log.warning("the entry points of package %s cannot be read (%s): install it again", package, error)
                continue
            for point in points:
                if point.name not in self._own:
                    found.setdefault(point.name, point)
        return found

    def _load(self, name: str, target: str) -> type[T]:
        # An entry point may name extras after the class: "module:Class [extra]".
        place, _, attribute = (part.strip() for part in target.partition("[")[0].rpartition(":"))
        with nullcontext() if name in self._own else self._importing():
            module = self._import(name, place)
        found = getattr(module, attribute, None)
        if found is None:
            classes = [key for key in dir(module) if isinstance(getattr(module, key, None), type)]
            raise ConfigurationError(
                f"{self.kind} {name!r}: there is no {attribute!r} in {place}: {close_matches(attribute, classes)}"
                f"write {place}:Class with a class in it",
                name=name,
            )
        if not (isinstance(found, type) and issubclass(found, self._base)):
            adapted = None if self._adapt is None else self._adapt(found)
            if adapted is not None:
                return adapted
            package = ".".join(self._base.__module__.split(".")[:2])
            raise ConfigurationError(
                f"{self.kind} {name!r}: {attribute} must be a subclass of {package}.{self._base.__name__}", name=name
            )
        if inspect.isabstract(found):
            missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
            raise ConfigurationError(f"{self.kind} {name!r}: {attribute} must define {missing}", name=name)
        return found

    def _import(self, name: str, place: str) -> ModuleType:
        is_file = place.endswith(".py")
        if is_file and not Path(place).is_file():
            raise ConfigurationError(f"{self.kind} {name!r}: there is no file {place}", name=name)
        try:
            if is_file:
                return _import_file(Path(place))
            # Unlike `python -m`, an installed command does not search the current folder, but people expect it.
            _look_in(current_folder())
            return importlib.import_module(place)
        except (Exception, SystemExit) as error:  # other people's modules do anything when they are imported
            raise ConfigurationError(
                f"{self.kind} {name!r} cannot be imported from {place or 'nowhere'}: {type(error).__name__}: {error}"
                f"{_line_in(error)}",
                name=name,
            ) from error


def _summary(found: type) -> str:
    first_paragraph = (inspect.getdoc(found) or "no description").split("\n\n")[0]
    first_sentence = re.split(r"(?<=\.)\s+(?=[A-Z])", first_paragraph)[0]
    return " ".join(first_sentence.replace("``", "").split())


def _line_in(error: BaseException) -> str:
    """Return the place in the imported module, unless the error names it or the module was not found."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    where = frames[-1] if frames else None
    if where is None or isinstance(error, SyntaxError) or where.filename in (__file__, importlib.__file__):
        return ""
    return f" ({where.filename}, line {where.lineno})"


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    # Under its own name, so that a file called json.py does not replace the library's json.
    name = f"offloop_file_{path.stem}_{zlib.crc32(bytes(path)):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, as `import` does: dataclasses and type hints look their module up.
    sys.modules[name] = module
    _look_in(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _look_in(directory: str) -> None:
    if directory not in sys.path:
        sys.path.append(directory)


def options_for(chosen: Mapping[str, type], assignments: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the options of each class from texts such as ``speed.window_size=50``, by name or class name."""
    options: dict[str, dict[str, str]] = {}
    for assignment in assignments:
        owner, option, text = parse_assignment(assignment)
        options.setdefault(owner, {})[option] = text
    owners = {*chosen, *(found.__name__ for found in chosen.values())}
    for owner in options:
        if owner not in owners:
            raise ConfigurationError(
                f"option for {owner!r}, but it is not chosen: {close_matches(owner, sorted(owners))}"
                f"chosen are {', '.join(chosen) or 'none'}",
                name=owner,
            )
    return {name: {**options.get(found.__name__, {}), **options.get(name, {})} for name, found in chosen.items()}
