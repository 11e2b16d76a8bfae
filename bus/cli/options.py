"""Options of several commands, each with one name and one help text."""

import functools
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import click
from click.core import ParameterSource

from offloop.bus.errors import ConfigurationError, OffloopError
from offloop.bus.net.nats_addresses import STREAM_VARIABLE
from offloop.bus.printing import say
from offloop.bus.types.time import Time

Report: TypeAlias = Callable[..., None]

_FILE = click.Path(path_type=Path, dir_okay=False)
_RUNS = ("run", "runs", "file", "arguments")  # parameters of commands that name runs

HELPS = {
    "--run-name": "The run's name. Default: a new one.",
    "--runs-dir": "Folder of runs. Default: $OFFLOOP_RUNS_DIR, else 'runs'.",
    "--stream": "NATS JetStream servers of runs: nats://HOST:4222. Default: $OFFLOOP_STREAM.",
}  # help of options that trainer has too; it makes its options from the trainer's arguments

runs_dir_option: Final = click.option("--runs-dir", metavar="DIR", help=HELPS["--runs-dir"])
run_name_option: Final = click.option("--run-name", metavar="NAME", help=HELPS["--run-name"])
json_option: Final = click.option("--json", "as_json", is_flag=True, help="As JSON, for programs.")
where_option: Final = click.option(
    "--where", metavar="EXPR", help="Only runs for which this is true, such as 'lr > 0.01'."
)
archived_option: Final = click.option("--archived", is_flag=True, help="Archived runs too.")
wait_option: Final = click.option("--wait", is_flag=True, help="Wait for a named run that does not exist yet.")
output_option: Final = click.option(
    "-o", "--output", metavar="FILE", help="The file to write. Default: named after the recording."
)
force_option: Final = click.option("--force", is_flag=True, help="Replace the file that is there.")
nkey_option: Final = click.option(
    "--nkey", type=_FILE, metavar="FILE", hidden=True, help="Seed of your nkey. Default: $OFFLOOP_NKEY."
)
stream_option: Final = click.option("--stream", metavar="ADDRESS", envvar=STREAM_VARIABLE, help=HELPS["--stream"])
ca_option: Final = click.option(
    "--ca", type=_FILE, metavar="FILE", hidden=True, help="CA file of NATS servers. Default: $OFFLOOP_CA."
)
certificate_option: Final = click.option("--certificate", type=_FILE, metavar="FILE", help="TLS certificate, as PEM.")
certificate_key_option: Final = click.option(
    "--certificate-key", type=_FILE, metavar="FILE", help="Secret key of the certificate, as PEM."
)


def say_json(value: Any) -> None:
    """Print dataclasses, maps, lists and plain values as JSON, for programs."""
    import msgspec

    from offloop.bus.strict_json import plain

    click.echo(json.dumps(plain(msgspec.to_builtins(value, enc_hook=str)), indent=2))


def reporting(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json``. The command receives ``report``, to call with each line for people, and values for programs."""

    @functools.wraps(command)
    def with_report(*args: Any, as_json: bool, **options: Any) -> Any:
        results: list[Any] = []

        def report(line: str, result: Any = None, *, err: bool = False) -> None:
            if not as_json:
                say(line, err=err)
            elif result is not None:
                results.append(result)

        try:
            return command(*args, report=report, **options)
        finally:
            if as_json:
                say_json(results)

    return json_option(with_report)


def split_names(
    _context: click.Context, _parameter: click.Parameter, value: str | Sequence[str] | None
) -> list[str] | None:
    if not value:
        return None
    text = value if isinstance(value, str) else ",".join(value)
    return [name.strip() for name in text.split(",") if name.strip()]


def _ranks_given(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    try:
        ranks = tuple(int(rank) for rank in (value or "").split(",") if rank.strip())
    except ValueError:
        ranks = (-1,)
    if min(ranks, default=0) < 0:
        raise click.BadParameter(f"{value!r} is not a list of ranks: write 17 or 17,18")
    return ranks


ranks_option: Final = click.option(
    "--ranks", callback=_ranks_given, metavar="RANK,...", help="Only these ranks, such as 17,18."
)


def stream_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--stream``, ``--nkey`` and ``--ca``.

    The command receives the servers' address as ``stream``, or ``None``, and runs with a connection to them.
    ``$OFFLOOP_STREAM`` applies unless a folder of runs or a path is given."""

    @functools.wraps(command)
    def with_stream(*args: Any, stream: str | None, nkey: Path | None, ca: Path | None, **options: Any) -> Any:
        is_local = options.get("runs_dir") or options.get("replay") or any(map(_is_path, map(options.get, _RUNS)))
        if is_local and not is_typed("stream"):
            stream = None
        if not stream:
            if nkey or ca:
                raise click.UsageError("--nkey and --ca are for NATS servers: name them with --stream")
            return command(*args, stream=None, **options)
        from offloop.bus.jetstream.connection import NatsServers
        from offloop.bus.jetstream.nats_connection import NatsConnection

        with NatsConnection.shared(NatsServers.parse(stream, nkey, ca)) as nats:
            return command(*args, stream=nats.address, **options)

    for option in (ca_option, nkey_option, stream_option):
        with_stream = option(with_stream)
    return with_stream


def is_typed(option: str) -> bool:
    return click.get_current_context().get_parameter_source(option) is ParameterSource.COMMANDLINE


def _is_path(value: str | tuple[str, ...] | None) -> bool:
    values = (value,) if isinstance(value, str) else value or ()
    return any(os.sep in one or os.path.exists(one) for one in values)


def place_options(command: Callable[..., Any]) -> Callable[..., Any]:
    connected = stream_options(command)

    @functools.wraps(connected)
    def with_place(*args: Any, **options: Any) -> Any:
        if is_typed("stream") and options["runs_dir"]:
            raise click.UsageError("--stream reads runs from NATS: it does not go with --runs-dir")
        return connected(*args, **options)

    return runs_dir_option(with_place)


def read_by(read: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Return a callback that reads an option's text with a function that raises our errors."""

    def convert(context: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else read(text)
        except OffloopError as error:
            raise click.BadParameter(str(error), context, parameter) from None

    return convert


def _rate(text: str) -> float:
    try:
        rate = math.inf if text.strip().lower() == "max" else float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        from offloop.bus.recording.replay import RATES

        raise ConfigurationError(f"{text!r} is not a rate: {RATES}")
    return rate


def _bound(text: str) -> Time:
    from offloop.bus.recording.window import parse_bound

    return parse_bound(text)


start_option: Final = click.option(
    "--start", callback=read_by(_bound), metavar="TIME", help="Begin there: 2ep, 100ba, 0.5dur, 90sec."
)
until_option: Final = click.option("--until", callback=read_by(_bound), metavar="TIME", help="End there, inclusive.")


rate_option: Final = click.option(
    "--rate", callback=read_by(_rate), metavar="RATE", show_default="max", help="Speed: 1 as it was, 10, max."
)


def bounds_in_words(start: Time | None, until: Time | None) -> str:
    since = "" if start is None else f"from {start} on"
    end = "" if until is None else f"until {until}"
    return " and ".join(part for part in (since, end) if part) or "in this recording"
