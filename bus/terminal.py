"""What the commands ``bus``, ``trainer`` and ``consumer`` share: how they end and how they report errors."""

import sys
from typing import Any, NoReturn

import click

from bus.errors import OffloopError

__all__ = ["HELP", "run_command"]

HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
"""Context settings of a command, also of one that is used apart from its group."""


def run_command(command: click.Command) -> NoReturn:
    """Runs a click command as a program: one line on standard error and exit code 1 for an error that the user can
    mend, 2 for wrong usage, 130 after Ctrl-C; a traceback only for a defect of ours."""
    try:
        code = command.main(standalone_mode=False)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else command.name
        _fail(f"{error.format_message()} (see '{where} --help')", 2)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except OffloopError as error:
        _fail(str(error), 1)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except OSError as error:
        _fail(str(error), 1)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    one_line = " ".join(message.split())
    click.echo(f"error: {one_line}", err=True)
    sys.exit(code)
