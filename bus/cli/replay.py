"""The command ``offloop replay``: a recording served as if it were live."""

import signal
from typing import TYPE_CHECKING

import click

from offloop.bus.cli.options import (
    loop_option,
    rate_option,
    run_name_option,
    runs_dir_option,
    stream_options,
)
from offloop.bus.cli.recordings import recording_of
from offloop.bus.errors import ConfigurationError
from offloop.bus.printing import say
from offloop.bus.terminal import CliCommand, handle_signals

if TYPE_CHECKING:
    from offloop.bus.replay.serving import ServedReplay


EXIT_TROUBLE = 1


@click.command(
    cls=CliCommand,
    short_help="Serve a recording as if it were live.",
    frequent=("--rate", "--loop", "--run-name"),
)
@click.argument("run", metavar="RECORDING")
@rate_option("1")
@loop_option
@run_name_option
@runs_dir_option
@stream_options
def replay(
    run: str,
    rate: float,
    loop: bool,
    run_name: str | None,
    runs_dir: str | None,
    stream: str | None,
) -> int:
    """Serve a RECORDING as if it were live, to any number of consumers.

    RECORDING is a file, or the name or the folder of a run; with --stream the name of a run there. It becomes a run of
    its own, to which consumers attach before, during and after. Nothing can be sent to it.

    Exit code: 0 when it was served to its end, or until Ctrl-C; 1 when nothing could be, or a part is damaged.
    """
    from offloop.bus.recording.recording import Recording
    from offloop.bus.replay.pace import Pace
    from offloop.bus.replay.serving import ReplayServer
    from offloop.bus.runs.directory import new_run_name

    path, place = recording_of(run, runs_dir, stream)
    recording = Recording(path)
    if run_name is not None:
        _check_name(run_name, runs_dir)
    served_name = run_name or new_run_name("replay", runs_dir)
    server = ReplayServer(
        recording,
        served_name,
        pace=Pace(rate),
        runs_dir=runs_dir,
        place=stream,
    )
    where = f" --runs-dir {runs_dir}" if runs_dir else ""

    def say_start() -> None:
        say(
            f"replaying {place} (run {recording.run_name}, attempt {recording.attempt}) as run {served_name}; "
            f"attach with: consumer --run {served_name}{where}"
        )

    def stop(*_: object) -> None:
        server.stop()
        # A second signal ends it at once.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)

    with handle_signals(stop, signal.SIGINT, signal.SIGTERM):
        served = server.serve(say_start)
        while loop and not server.stopped:
            served = server.serve(lambda: say(f"again from the start, as the next attempt of {served_name}"))
    return _report(served)


def _check_name(name: str, where: str | None) -> None:
    """Raises :class:`offloop.bus.errors.ConfigurationError` when there is a run of that name that is not a replay."""
    from offloop.bus.runs.directory import RUN_FILE, Origin, read_run, runs_dir

    path = runs_dir(where) / name
    if (path / RUN_FILE).exists() and Origin.of(read_run(path).last.info) is None:
        raise ConfigurationError(
            f"{name!r} is a run that was trained, and a replay would become its newest attempt: "
            "choose another '--run-name'"
        )


def _report(served: "ServedReplay") -> int:
    say(f"run {served.run_name} {served.ending}: {served.events} events served")
    if served.damage:
        say(f"{served.damage}; all else was served", err=True)
        return EXIT_TROUBLE
    return 0
