"""The options of the command ``trainer`` for every task.

An omitted option is ``None``: the task's value applies, then the trainer's default."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import click

from offloop.bus.cli.options import HELPS, read_by, split_names
from offloop.bus.errors import ConfigurationError
from offloop.trainer.arguments.config import Argument, Option, arguments_of
from offloop.trainer.config import GROUPS, TrainerArguments


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _make_option(argument: Argument, form: Option) -> click.Option:
    declared = (form.name or _dashed(argument.name)).split()
    text = HELPS.get(declared[0]) or form.help or argument.help
    settings: dict[str, Any] = {"type": _click_type(argument, form), "metavar": form.metavar}
    if form.sets is not None or argument.type is bool:
        settings = {"is_flag": True}
        if form.sets is None and argument.default:
            declared = [f"{declared[0]}/{declared[0].replace('--', '--no-')}"]
    elif isinstance(argument.default, str | float):
        text += f"  [default: {argument.default}]"
    if form.many:
        settings |= {"multiple": True, "callback": split_names}
    elif form.read is not None:
        settings["callback"] = read_by(form.read)
    return click.Option(declared, default=None, help=text[:1].upper() + text[1:], **settings)


def _click_type(argument: Argument, form: Option) -> Any:
    if form.choices:
        return click.Choice(form.choices)
    if form.path is not None:
        return click.Path(exists=form.path == "existing", path_type=Path)
    if argument.type is float:
        return click.FLOAT
    if form.read is None and int in (argument.type, *get_args(argument.type)):
        return click.INT if form.least is None else click.IntRange(form.least, form.most)
    return None


COMMON_OPTIONS: dict[str, list[click.Option]] = {
    "Training": [],
    **{group.heading: [] for group in GROUPS},
    "Algorithms": [
        click.Option(
            ["--algorithms"],
            metavar="NAME[,NAME...]",
            multiple=True,
            callback=split_names,
            help="Algorithms to train with; 'trainer --list-algorithms' shows them. Others as package.module:Class or "
            "file.py:Class.",
        ),
        click.Option(
            ["-o", "algorithm_options"],
            metavar="NAME.OPTION=VALUE",
            multiple=True,
            callback=lambda _context, _parameter, values: list(values) or None,
            help="Sets an option of an algorithm, such as EMA.half_life=10ba.",
        ),
    ],
}
"""The options by their heading in the help."""

_ARGUMENTS: dict[str, tuple[Argument, Option]] = {}

for _argument in arguments_of(TrainerArguments):
    _home = next((one.heading for one in GROUPS if _argument.name in one.__dataclass_fields__), "Training")
    for _form in _argument.options:
        _option = _make_option(_argument, _form)
        COMMON_OPTIONS[_home].append(_option)
        _ARGUMENTS[str(_option.name)] = _argument, _form

OPTION_NAMES = frozenset(str(option.name) for options in COMMON_OPTIONS.values() for option in options)


def trainer_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the options' values to arguments of the trainer, except the algorithms."""
    given: dict[str, Any] = {}
    for name, (argument, form) in _ARGUMENTS.items():
        value = values[name] if form.sets is None or not values[name] else form.sets
        if value is not None:
            given[argument.name] = value
    return given


def check_together(values: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Refuse an option that needs an argument which neither the command line nor the task gives."""
    for name, (_, form) in _ARGUMENTS.items():
        for needed in form.needs if values[name] is not None else ():
            if arguments.get(needed) is None:
                raise ConfigurationError(
                    f"{_dashed(name)} needs {_dashed(needed)}: add it, or leave {_dashed(name)} out"
                )
