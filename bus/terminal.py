"""The common parts of the commands: help, errors, signals and exit codes."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import click

from offloop.bus.errors import OffloopError
from offloop.bus.printing import one_line, say

_A_MOMENT = 0.01

HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
"""Context settings of a command, also of one used apart from its group."""

_COLUMN = 30  # the widest first column of the help: wider options have a line of their own, as in click

_HELP_IS_WANTED: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""Raised by newer versions of click for a group without a command. Its message is the help."""


class CliCommand(click.Command):
    """A command whose help lists the frequent options first, and the others under "More options".

    Args:
        frequent: Names of the frequent options, such as ``--where``, in the order of the help. Without any, the help
            has one list of options."""

    def __init__(self, *arguments: Any, frequent: Sequence[str] = (), **settings: Any) -> None:
        settings["context_settings"] = {**HELP, **(settings.get("context_settings") or {})}
        super().__init__(*arguments, **settings)
        self._frequent = frequent

    def split_options(self, ctx: click.Context) -> tuple[list[click.Option], list[click.Option]]:
        options = [one for one in self.get_params(ctx) if isinstance(one, click.Option)]
        by_name = {name: one for one in options for name in one.opts}
        first = [by_name[name] for name in self._frequent] or options
        return first, [one for one in options if one not in first]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        first, others = self.split_options(ctx)
        write_options({"Options": first, "More options": others}, ctx, formatter)


def write_options(
    sections: Mapping[str, Sequence[click.Option]], ctx: click.Context, formatter: click.HelpFormatter
) -> None:
    records = {
        heading: [record for one in options if (record := one.get_help_record(ctx))]
        for heading, options in sections.items()
    }
    width = max(len(names) for listed in records.values() for names, _ in listed)
    for heading, listed in records.items():
        if listed:
            with formatter.section(heading):
                formatter.write_dl([(names.ljust(min(width, _COLUMN)), text) for names, text in listed])


EXIT_LOST = 3  # exit code of every command that found a part of a recording lost or damaged, and did the rest


def run_command(command: click.Command) -> NoReturn:
    """Run a click command as a program.

    An error that the user can repair is one line on standard error with exit code 1; wrong usage exits with 2, Ctrl-C
    with 130. Only a defect of ours shows a traceback."""
    try:
        with _no_interrupt_lost():
            code = command.main(standalone_mode=False)
    except click.UsageError as error:
        if isinstance(error, _HELP_IS_WANTED):
            click.echo(error.format_message(), err=True)
            sys.exit(2)
        where = error.ctx.command_path if error.ctx else command.name
        _fail(f"{error.format_message()} (see '{where} --help')", 2)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except OffloopError as error:
        _fail(str(error), 1)
    except (KeyboardInterrupt, click.Abort):
        say("interrupted", err=True)
        sys.exit(130)
    except OSError as error:
        _fail(describe_os_error(error), 1)
    sys.exit(code if isinstance(code, int) else 0)


@contextlib.contextmanager
def _no_interrupt_lost() -> Iterator[None]:
    """Raise a ``KeyboardInterrupt`` again where Python only prints it, such as in the callback of a weak reference."""
    before = sys.unraisablehook
    main = threading.get_ident()

    def interrupt(ignored: "sys.UnraisableHookArgs") -> None:
        if not issubclass(ignored.exc_type, KeyboardInterrupt):
            before(ignored)
            return
        try:
            # A moment later, after the callback. The signal also ends a wait of the main thread.
            again = threading.Timer(_A_MOMENT, signal.pthread_kill, (main, signal.SIGINT))
            again.daemon = True
            again.start()
        except KeyboardInterrupt:  # on a busy machine the moment is over before the timer's start returns
            interrupt(ignored)

    sys.unraisablehook = interrupt
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def handle_signals(handler: Callable[..., object], *signals: signal.Signals) -> Iterator[None]:
    """Handle signals within the block, except ignored ones."""
    before = {number: old for number in signals if (old := signal.getsignal(number)) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def exit_on_signal(words: str) -> Iterator[None]:
    """End a waiting command that has nothing to lose.

    Ctrl-C exits with code 130, SIGTERM with 0, as service managers expect. Both print ``words`` on standard error."""

    def end(_number: int, _frame: object) -> NoReturn:
        say(words, err=True)
        sys.exit(0)

    with handle_signals(end, signal.SIGTERM):
        try:
            yield
        except KeyboardInterrupt:
            say(words, err=True)
            sys.exit(130)


def describe_os_error(error: OSError) -> str:
    if error.filename is None or error.strerror is None:
        return error.strerror or str(error)
    return f"{error.filename} cannot be used: {error.strerror}"


def _fail(message: str, code: int) -> NoReturn:
    say(f"error: {one_line(message)}", err=True)
    sys.exit(code)
