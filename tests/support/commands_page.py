"""Writes ``docs/commands.md`` from the commands' own help: ``python tests/support/commands_page.py``."""

import click
from paths import ROOT

from bus.cli.main import bus
from consumers.cli.main import consumer
from trainer.cli.main import trainer

__all__ = ["COMMANDS", "PAGE", "page"]

PAGE = ROOT / "docs" / "commands.md"

WIDTH = 80
"""In characters: what fits on the site, whatever the terminal is that the page is written in."""

COMMANDS: tuple[click.Command, ...] = (trainer, consumer, bus)
"""The commands that offloop installs, in the order of the page."""


def page() -> str:
    """The page as it should be."""
    parts = ["# Commands\n\nWritten by `python tests/support/commands_page.py` from the commands themselves.\n"]
    for command in COMMANDS:
        parts += _help(command, None)
    return "\n".join(parts)


def _help(command: click.Command, parent: click.Context | None) -> list[str]:
    name = command.name if parent is None else f"{parent.command_path} {command.name}"
    settings = {**command.context_settings, "terminal_width": WIDTH, "max_content_width": WIDTH}
    context = click.Context(command, parent=parent, info_name=command.name, **settings)
    parts = [f"## {name}\n\n```\n{command.get_help(context)}\n```\n"]
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            assert found is not None
            parts += _help(found, context)
    return parts


if __name__ == "__main__":
    PAGE.write_text(page())
