"""Tasks of the command ``trainer``: built-in ones, and your own. Start with ``digits``.

A task is a function that returns arguments for :class:`offloop.trainer.Trainer`::

    def my_task(*, batch_size: int = 64, lr: float = 0.1):
        \"\"\"Sort apples from pears.

        batch_size: fruits in a batch.
        lr: learning rate.
        \"\"\"
        ...
        return {"model": model, "train_dataloader": loader, "optimizers": optimizer, "max_duration": "5ep"}

Its keyword arguments become options of the command, with their defaults. Lines of the docstring of the form ``name:
text`` are their help; the rest of the docstring is the help of the task. A parameter with the name of one of the
command's own options, such as ``seed`` or ``device``, gets the value of that option. ``trainer module:function`` and
``trainer path/to/file.py:function`` find it. The random numbers are seeded before it is called."""

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from offloop.bus.errors import ConfigurationError
from offloop.trainer.arguments import missing_extra

__all__ = ["BUILT_IN", "Task", "find_task"]

BUILT_IN = {"chars": "offloop.trainer.tasks.chars:chars", "digits": "offloop.trainer.tasks.digits:digits"}
"""Name of a built-in task, to its function. Importing them does not import torch."""

_EXTRAS = {"sklearn": ("scikit-learn", "demo"), "torch": ("torch", ""), "torchmetrics": ("torchmetrics", "")}
_OPTION_HELP = re.compile(r"^(\w+): (.+(?:\n {4,}.+)*)\n?", re.MULTILINE)


@dataclass(frozen=True)
class Task:
    name: str
    function: Callable[..., Mapping[str, Any]]
    help: str
    options: tuple[click.Option, ...]

    def arguments(self, **options: Any) -> dict[str, Any]:
        try:
            returned = self.function(**options)
        except ModuleNotFoundError as error:
            raise _explained(error) from None
        if not isinstance(returned, Mapping):
            raise ConfigurationError(
                f"task {self.name!r} returned a {type(returned).__name__}: return a dict of arguments for Trainer"
            )
        return dict(returned)


def find_task(name: str) -> Task:
    """Return the task of a name: a built-in one, ``module:function``, or ``path/to/file.py:function``."""
    if ":" not in name and name not in BUILT_IN:
        close = get_close_matches(name, BUILT_IN, n=1, cutoff=0.5)
        meant = f"did you mean {close[0]!r}" if close else f"there are {', '.join(sorted(BUILT_IN))}"
        raise ConfigurationError(f"no task {name!r}: {meant}; your own is module:function or path/to/file.py:function")
    where = BUILT_IN.get(name, name)
    home, _, function_name = where.rpartition(":")
    function = getattr(_import(home), function_name, None)
    if not callable(function):
        raise ConfigurationError(f"no task {name!r}: {home} has no function {function_name!r}")
    return _describe(name, function)


def _import(home: str) -> ModuleType:
    try:
        if home.endswith(".py"):
            return _import_file(Path(home))
        # A user's module is expected in the current folder, which only `python -m` searches by itself.
        if "" not in sys.path:
            sys.path.insert(0, "")
        return importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name and (home == error.name or home.startswith(f"{error.name}.")):
            raise ConfigurationError(f"no module {home!r} was found: a task is named module:function") from None
        raise _explained(error) from None


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigurationError(f"no file {str(path)!r}: a task is named path/to/file.py:function")
    # Its neighbours can be imported, as when it is run as a script.
    sys.path.insert(0, str(path.parent.absolute()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # its name ends with .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _explained(error: ModuleNotFoundError) -> Exception:
    package, extra = _EXTRAS.get((error.name or "").partition(".")[0], ("", ""))
    if extra:
        return ConfigurationError(f"this task needs {package}; install it with: pip install 'offloop[{extra}]'")
    return ConfigurationError(missing_extra(package)) if package else error


def _describe(name: str, function: Callable[..., Any]) -> Task:
    text = inspect.cleandoc(function.__doc__ or "")
    named = inspect.signature(function, eval_str=True).parameters
    parameters = named.values()
    # Other prose may have a word and a colon at the front of a line.
    helps = {option: " ".join(help_text.split()) for option, help_text in _OPTION_HELP.findall(text) if option in named}
    text = _OPTION_HELP.sub(lambda match: "" if match[1] in named else match[0], text).strip()
    options = tuple(
        _option(name, parameter, helps)
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    )
    return Task(name, function, text, options)


def _option(task: str, parameter: inspect.Parameter, helps: Mapping[str, str]) -> click.Option:
    kind = parameter.annotation
    if kind not in (int, float, str, bool):
        kind = type(parameter.default)
    if kind not in (int, float, str, bool):
        kind = str
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise ConfigurationError(f"task {task!r} takes {parameter.name!r} by position only: make it a keyword argument")
    name = parameter.name
    dashed = name.replace("_", "-")
    declaration = f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}"
    # A default of None would count as given, and the option would not be required.
    is_required = parameter.default is parameter.empty
    default = {"required": True} if is_required else {"default": parameter.default, "show_default": True}
    return click.Option([declaration, name], type=kind, help=helps.get(name), **default)
