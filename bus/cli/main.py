"""The command ``offloop``, also called ``bus``: runs and reports on them."""

import json
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

import click

from offloop.bus.cli import options
from offloop.bus.cli.compare import compare_runs
from offloop.bus.cli.logs import show_console
from offloop.bus.cli.manage import edit_runs, remove_runs
from offloop.bus.cli.recordings import convert_recordings, export_recording, import_log
from offloop.bus.cli.runs import list_runs, show_run
from offloop.bus.cli.server import server
from offloop.bus.errors import ConfigurationError
from offloop.bus.terminal import HELP, CliCommand, run_command
from offloop.bus.types.commands import COMMANDS, WAIT_SECONDS, check_command

EXIT_TROUBLE = 1
EXIT_PENDING = 3

COMMANDS_GROUP = "offloop.commands"  # entry points of other packages that add commands

_SECTIONS = {
    "Train and watch": ("train", "consume", "run", "ui", "alert"),
    "Runs": ("runs", "show", "logs", "compare", "backfill", "edit", "rm", "send"),
    "Recordings": ("export", "import", "convert"),
    "Services": ("mcp", "server"),
}  # the commands under each heading of the help


class _Commands(click.Group):
    """Own commands, and those of installed packages with entry points of the group ``offloop.commands``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *entry_points(group=COMMANDS_GROUP).names})

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        left = self.list_commands(ctx)
        sections = [(heading, [name for name in names if name in left]) for heading, names in _SECTIONS.items()]
        listed = {name for _, names in sections for name in names}
        sections.append(("More commands", [name for name in left if name not in listed]))
        width = max(map(len, left))
        for heading, names in sections:
            commands = [(name, command) for name in names if (command := self.get_command(ctx, name)) is not None]
            if not commands:
                continue
            with formatter.section(heading):
                formatter.write_dl(
                    [(name.ljust(width), command.get_short_help_str(formatter.width)) for name, command in commands]
                )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        for point in entry_points(group=COMMANDS_GROUP, name=cmd_name):
            try:
                command = point.load()
            # A package may raise anything when it is imported, and must not disable the other commands.
            except (Exception, SystemExit) as error:  # noqa: BLE001
                return _broken(point, f"{type(error).__name__}: {error}")
            if not isinstance(command, click.Command):
                return _broken(point, f"{point.value} is not a click command")
            return command
        return None


def _broken(point: EntryPoint, reason: str) -> click.Command:
    package = "a package" if point.dist is None else point.dist.name
    trouble = f"command {point.name!r} of {package} cannot be loaded: {reason}"

    def refuse(_arguments: tuple[str, ...]) -> NoReturn:
        raise ConfigurationError(f"{trouble}; update or remove {package}")

    return click.Command(
        point.name,
        callback=refuse,
        params=[click.Argument(["_arguments"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True},
        short_help=trouble,
        help=trouble,
    )


@click.group(name="offloop", cls=_Commands, context_settings=HELP)
@click.version_option(package_name="offloop", prog_name="offloop")
def bus() -> None:
    """Train models, and watch, compare and steer their runs."""


_SEND_HELP = """Send a live RUN a command, and wait until it has taken effect between two batches.

\b
{}

Exit code: 0 if it took effect, 1 if it was refused or its outcome is unknown, 3 if it has not taken effect yet.
""".format("\n".join(f"{name:<12}{effect}" for name, effect in COMMANDS.items()))


@bus.command(
    cls=CliCommand,
    help=_SEND_HELP,
    short_help="Command a live run.",
    context_settings={"ignore_unknown_options": True},
    frequent=("--reason", "--timeout", "--runs-dir"),
)
@click.argument("run")
@click.argument("command", type=click.Choice(list(COMMANDS)), metavar="COMMAND")
@click.argument("arguments", nargs=-1, metavar="[ARGUMENTS]")
@click.option("--reason", metavar="TEXT", help="Reason, for the training's output, 'offloop show' and dashboards.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=WAIT_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="Maximum wait until it takes effect.",
)
@options.ranks_option
@options.reporting
@options.place_options
def send(
    run: str,
    command: str,
    arguments: tuple[Any, ...],
    reason: str | None,
    timeout: float,
    ranks: tuple[int, ...],
    runs_dir: str | None,
    stream: str | None,
    report: options.Report,
) -> int:
    from offloop.bus.runs.directory import find_run
    from offloop.bus.subscriber.commands import perform, send_command, sent_by

    arguments = (*arguments[:1], *map(_plain_value, arguments[1:]), *([",".join(map(str, ranks))] if ranks else ()))
    why = sent_by("offloop send", reason)
    if stream is not None:
        from offloop.bus.jetstream.channel import StreamChannel
        from offloop.bus.jetstream.nats_connection import NatsConnection

        checked = check_command(command, arguments, why)
        outcome = perform(StreamChannel(NatsConnection.at(stream)), run, checked, timeout)
    else:
        outcome = send_command(find_run(run, runs_dir), command, *arguments, wait=timeout, reason=why)
    report(f"run {run}: {outcome}", {"run": run, **outcome._asdict()}, err=outcome.error is not None)
    return EXIT_TROUBLE if outcome.error else 0 if outcome.event or outcome.done else EXIT_PENDING


def _plain_value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, list | dict) else value


for _command in (
    compare_runs,
    convert_recordings,
    edit_runs,
    export_recording,
    import_log,
    list_runs,
    remove_runs,
    server,
    show_console,
    show_run,
):
    bus.add_command(_command)


def main() -> None:
    run_command(bus)


if __name__ == "__main__":
    main()
