"""Options that several commands have: where runs are, and which part of a recording is replayed how fast."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offloop.bus.errors import InvalidTimeError
from offloop.bus.net.nats_addresses import is_nats

if TYPE_CHECKING:
    from offloop.bus.recording.window import Bound


_FILE = click.Path(path_type=Path)

runs_dir_option = click.option(
    "--runs-dir", metavar="DIR", help="Folder of runs. Default: $OFFLOOP_RUNS_DIR, else 'runs'."
)


def stream_options(command: Callable[..., Any], into: str = "broker") -> Callable[..., Any]:
    """Adds ``--stream``, ``--nkey`` and ``--ca`` to a command with ``--broker``, which gets the servers' address
    for the broker's: what is asked there is answered from JetStream as long as the command runs. One whose ``--broker``
    is for something else gets it as another argument, ``into``."""

    @functools.wraps(command)
    def with_stream(*args: Any, stream: str | None, nkey: Path | None, ca: Path | None, **options: Any) -> Any:
        broker = options.setdefault(into, None)
        if stream and broker:
            raise click.UsageError("--stream and --broker name two places to read from: give one of them")
        if broker and is_nats(broker):
            stream = broker
        if not stream:
            if nkey or ca:
                raise click.UsageError("--nkey and --ca are for NATS servers: name them with --stream")
            return command(*args, **options)
        from offloop.bus.jetstream.connection import NatsServers
        from offloop.bus.jetstream.nats_connection import NatsConnection

        if into == "broker" and (options.get("key") or options.get("broker_key")):
            raise click.UsageError("--key and --broker-key are for brokers: NATS takes --nkey and --ca")
        with NatsConnection.shared(NatsServers.parse(stream, nkey, ca)) as nats:
            return command(*args, **{**options, into: nats.address})

    for option in (
        click.option(
            "--ca",
            type=_FILE,
            metavar="FILE",
            help="With --stream: CA file. Default: $OFFLOOP_CA.",
        ),
        click.option("--nkey", type=_FILE, metavar="FILE", help="With --stream: nkey seed. Default: $OFFLOOP_NKEY."),
        click.option("--stream", metavar="ADDRESS", help="Read runs from NATS JetStream: nats://HOST:4222."),
    ):
        with_stream = option(with_stream)
    return with_stream


def broker_options(broker_help: str, *, reads: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds ``--broker``, ``--key`` and ``--broker-key``; to a command that reads there also ``--stream``."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in (
            click.option("--broker-key", metavar="FILE", help="The broker's public key. Default: $OFFLOOP_BROKER_KEY."),
            click.option("--key", metavar="FILE", help="Your secret key for it. Default: $OFFLOOP_KEY."),
            click.option("--broker", metavar="ADDRESS", help=broker_help),
        ):
            command = option(command)
        return stream_options(command) if reads else command

    return add


def check_broker(broker: str | None, key: str | None, broker_key: str | None, runs_dir: str | None = None) -> None:
    """Raises :class:`click.UsageError` for a broker beside a directory, and for keys without a broker."""
    if broker and runs_dir:
        raise click.UsageError("--broker reads everything through it: it does not go with --runs-dir")
    if (key or broker_key) and not broker:
        raise click.UsageError("--key and --broker-key are for a broker elsewhere: name it with --broker")


def rate_given(_context: click.Context, _parameter: click.Parameter, value: str | None) -> float | None:
    """How many times as fast as it was; infinity for ``max``. A callback of a click option.

    Raises:
        click.BadParameter: it is not a number over 0.
    """
    if value is None:
        return None
    try:
        rate = math.inf if value.strip().lower() == "max" else float(value)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        from offloop.bus.replay.pace import RATES

        raise click.BadParameter(f"{value!r} is not a rate: {RATES}")
    return rate


def parse_bound_option(_context: click.Context, _parameter: click.Parameter, value: str | None) -> "Bound | None":
    """Reads where a part of a run begins or ends. A callback of a click option.

    Raises:
        click.BadParameter: it is none.
    """
    from offloop.bus.recording.window import parse_bound

    try:
        return None if value is None else parse_bound(value)
    except InvalidTimeError as error:
        raise click.BadParameter(str(error)) from None


@dataclass(frozen=True)
class ReplayChoice:
    """What was chosen of how a recording is replayed; none of it when everything is as by default."""

    rate: float | None
    start: "Bound | None"
    until: "Bound | None"
    loop: bool

    @property
    def option(self) -> str | None:
        """An option that was given, if one was."""
        given = {
            "--rate": self.rate is not None,
            "--start": self.start is not None,
            "--until": self.until is not None,
            "--loop": self.loop,
        }
        return next((name for name, is_given in given.items() if is_given), None)

    @property
    def rate_or_max(self) -> float:
        """The rate; infinity for as fast as it can be."""
        return math.inf if self.rate is None else self.rate

    @property
    def bounds(self) -> str:
        """The bounds, in words."""
        since = "" if self.start is None else f"from {self.start} on"
        until = "" if self.until is None else f"until {self.until}"
        return " and ".join(part for part in (since, until) if part) or "in this recording"
