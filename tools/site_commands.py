"""A hook of mkdocs: the page on commands shows what each of them says with ``--help``."""

from collections.abc import Iterator
from typing import Any

import click

from offloop.bus.cli.main import bus

_WIDTH = 80
"""In characters: what fits on the site, whatever the terminal in which it is built."""


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Adds a section for each command to the page on commands."""
    if page.file.src_uri != "commands.md":
        return markdown
    sections = (f"## {context.command_path}\n\n```text\n{context.get_help()}\n```\n" for context in _contexts())
    return "\n".join([markdown, *sections])


def paths() -> list[str]:
    """Every command as it is typed, such as ``offloop runs``."""
    return [context.command_path for context in _contexts()]


def _contexts(
    command: click.Command = bus, name: str | None = bus.name, parent: click.Context | None = None
) -> Iterator[click.Context]:
    settings = {**command.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}
    context = click.Context(command, parent=parent, info_name=name, **settings)
    yield context
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            if found is not None:
                yield from _contexts(found, child, context)
