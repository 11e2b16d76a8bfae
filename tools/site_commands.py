"""A hook of mkdocs: the page on commands shows what each of them says with ``--help``."""

from collections.abc import Iterable, Iterator
from typing import Any

import click

from offloop.bus.cli.main import bus
from offloop.consumers.cli.main import consumer
from offloop.run import offloop
from offloop.trainer.cli.main import trainer

COMMANDS: tuple[click.Command, ...] = (trainer, consumer, offloop, bus)
"""The commands that offloop installs, in the order of the page."""

_WIDTH = 80
"""In characters: what fits on the site, whatever the terminal in which it is built."""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Adds a section for each command to the page on commands."""
    if page.file.src_uri != "commands.md":
        return markdown
    sections = (f"## {context.command_path}\n\n```text\n{context.get_help()}\n```\n" for context in _contexts())
    return "\n".join([markdown, *sections])


def paths() -> list[str]:
    """Every command as it is typed, such as ``bus runs``."""
    return [context.command_path for context in _contexts()]


def _contexts(
    commands: Iterable[click.Command] = COMMANDS, parent: click.Context | None = None
) -> Iterator[click.Context]:
    for command in commands:
        settings = {**command.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}
        context = click.Context(command, parent=parent, info_name=command.name, **settings)
        yield context
        if isinstance(command, click.Group):
            children = (command.get_command(context, name) for name in command.list_commands(context))
            yield from _contexts((child for child in children if child is not None), context)
