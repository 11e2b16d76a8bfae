"""The command ``offloop``, also called ``bus``: runs and reports on them."""

import json
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

import click

from offloop.bus.cli import options
from offloop.bus.errors import ConfigurationError, close_matches
from offloop.bus.terminal import HELP, CliCommand, run_command
from offloop.bus.types.commands import COMMANDS, WAIT_SECONDS, check_command

EXIT_TROUBLE = 1
EXIT_PENDING = 3

COMMANDS_GROUP = "offloop.commands"  # entry points of other packages that add commands

# The commands under each heading of the help. Their modules are imported when one is called, because all of them take
# longer than most commands.
_SECTIONS = {
    "Train and watch": {
        "train": "Train a task, such as digits, as a run.",
        "consume": "Run callbacks and loggers on a run.",
        "run": "Run a script as a run, without changing it.",
        "ui": "Show all runs, or the named ones, in the browser.",
        "alert": "Send messages about runs to your phone.",
    },
    "Runs": {
        "runs": "List the runs.",
        "show": "Show one run or recording.",
        "logs": "Show what a run has printed.",
        "compare": "Compare the results or events of runs.",
        "backfill": "Run callbacks over runs that have ended.",
        "edit": "Tag, note, pin, archive or rename runs.",
        "rm": "Delete runs.",
        "send": "Command a live run.",
    },
    "Recordings": {
        "export": "Write runs for people and other tools.",
        "import": "Make a run of another tool's log.",
        "convert": "Repair, join or cut recordings.",
    },
    "Services": {
        "mcp": "Serve runs to agents (MCP).",
        "server": "Copy runs into NATS JetStream, and set it up.",
    },
}
_OWN = {
    "compare": ("compare", "compare_runs"),
    "convert": ("recordings", "convert_recordings"),
    "edit": ("manage", "edit_runs"),
    "export": ("recordings", "export_recording"),
    "import": ("recordings", "import_log"),
    "logs": ("logs", "show_console"),
    "rm": ("manage", "remove_runs"),
    "runs": ("runs", "list_runs"),
    "server": ("server", "server"),
    "show": ("runs", "show_run"),
}  # module and function of each command


class _Commands(click.Group):
    """Own commands, and those of installed packages with entry points of the group ``offloop.commands``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_OWN, *entry_points(group=COMMANDS_GROUP).names})

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        left = self.list_commands(ctx)
        sections = {heading: {name: one[name] for name in one if name in left} for heading, one in _SECTIONS.items()}
        listed = {name for names in sections.values() for name in names}
        sections["More commands"] = {
            name: command.get_short_help_str(formatter.width)
            for name in left
            if name not in listed and (command := self.get_command(ctx, name)) is not None
        }
        width = max(map(len, left))
        for heading, commands in sections.items():
            if commands:
                with formatter.section(heading):
                    formatter.write_dl([(name.ljust(width), text) for name, text in commands.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            # click knows only the commands that are imported already.
            meant = close_matches(args[0], self.list_commands(ctx)).strip()
            if args[0].startswith("-") or not meant:
                raise
            raise click.UsageError(f"No such command {args[0]!r}: {meant}", error.ctx) from None

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is None and cmd_name in _OWN:
            module, function = _OWN[cmd_name]
            own = getattr(import_module(f"offloop.bus.cli.{module}"), function)
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


def main() -> None:
    run_command(bus)


if __name__ == "__main__":
    main()
