"""Checks command lines that people are told to type: what they name has to exist."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

import click
from documents import ROOT, CommandLine, blocks

from offloop.bus.cli.main import bus
from offloop.bus.errors import ConfigurationError
from offloop.bus.plugins.options import convert_options, options_of
from offloop.bus.plugins.registry import Registry, options_for
from offloop.consumers.cli.main import consumer
from offloop.consumers.cli.registry import CALLBACKS, LOGGERS
from offloop.trainer.algorithms import ALGORITHMS
from offloop.trainer.cli.main import trainer

COMMANDS: Mapping[str, click.Command] = {"bus": bus, "consumer": consumer, "offloop": bus, "trainer": trainer}
"""The programs that offloop installs."""

_NAMED: Mapping[str, Registry[Any]] = {"callbacks": CALLBACKS, "loggers": LOGGERS, "algorithms": ALGORITHMS}
_TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
_EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def problem(line: CommandLine) -> str | None:
    """Return what is wrong with a command line; ``None`` for a right one, and for programs of others."""
    first, *rest = line.words
    if first == "torchrun" and "trainer" in rest:
        first, rest = "trainer", rest[rest.index("trainer") + 1 :]
    if first in COMMANDS:
        return _wrong(COMMANDS[first], rest, first, line)
    if first == "make":
        targets = [word for word in rest if re.fullmatch(r"[a-z-]+", word)]
        return next((f"there is no target {target!r}" for target in targets if target not in _TARGETS), None)
    if first == "pip":
        extras = [extra for word in rest for found in re.findall(r"offloop\[(.*)]", word) for extra in found.split(",")]
        return next((f"there is no extra {extra!r}" for extra in extras if extra not in _EXTRAS), None)
    if first in ("python", "torchrun"):
        files = [word for word in rest if re.fullmatch(r"(tests|examples|benchmarks|fuzz|tools)/.*\.py", word)]
        return next((f"there is no file {file}" for file in files if not (ROOT / file).is_file()), None)
    return None


def _wrong(command: click.Command, words: Sequence[str], name: str, line: CommandLine) -> str | None:
    context = click.Context(command, info_name=name, **command.context_settings)
    try:
        values, rest, _ = command.make_parser(context).parse_args(list(words))
    except click.BadOptionUsage as error:
        return error.message if line.is_whole else None
    except click.UsageError as error:
        return error.message
    if isinstance(command, click.Group):
        return _wrong_child(command, context, rest, line)
    if rest:
        return f"{name} takes no {' '.join(rest)!r}"
    for parameter in command.get_params(context):
        given = values.get(parameter.name)
        if line.is_whole and parameter.required and given is None and "help" not in values and "version" not in values:
            return f"{name} lacks {parameter.human_readable_name}"
        if isinstance(parameter.type, click.Choice) and isinstance(given, str) and given not in parameter.type.choices:
            return f"{given!r} is none of {', '.join(parameter.type.choices)}"
    return _wrong_names(values, _plugins(line.page))


def _wrong_child(group: click.Group, context: click.Context, words: Sequence[str], line: CommandLine) -> str | None:
    if not words:
        return None
    name, *rest = words
    # The name of a task of one's own, or one that stands for any.
    is_any = isinstance(group.name, str) and group.name == "trainer" and (":" in name or name.isupper())
    child = group.get_command(context, "digits" if is_any else name)
    if child is None:
        return f"{group.name} has no command {name!r}"
    return _wrong(child, rest, f"{group.name} {name}", line)


def _plugins(page: str) -> set[str]:
    """Return the names that a page gives to classes of other packages, in the ``pyproject.toml`` that it shows."""
    shown = [tomllib.loads(block.text).get("project", {}).get("entry-points", {}) for block in blocks(page, "toml")]
    return {name for groups in shown for names in groups.values() for name in names}


def _listed(value: object) -> list[str]:
    """Return the names in an option that can be given once, or several times."""
    # A missing argument has click's mark for it.
    return (value if isinstance(value, str) else ",".join(value if isinstance(value, Sequence) else ())).split(",")


def _wrong_names(values: Mapping[str, Any], plugins: set[str]) -> str | None:
    """Return what is wrong with callbacks, loggers and algorithms by name, and with their options."""
    chosen: dict[str, type] = {}
    has_others = False
    try:
        for parameter, registry in _NAMED.items():
            for name in _listed(values.get(parameter)):
                if ":" in name or name.isupper() or name in plugins:
                    has_others = True
                elif name:
                    chosen[name] = registry.find(name)
        given = [
            *(values.get("options") or ()),
            *(values.get("algorithm_options") or ()),
        ]
        assignments = [one for one in given if not one.startswith("NAME.")]
        if has_others:
            assignments = [one for one in assignments if one.partition(".")[0] in chosen]
        for name, options in options_for(chosen, assignments).items():
            convert_options(name, options_of(chosen[name]), options)
    except ConfigurationError as error:
        return str(error)
    return None
