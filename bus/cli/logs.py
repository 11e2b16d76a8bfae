"""The command ``offloop logs``."""

import json
import os
import sys
import time
from pathlib import Path

import click

from offloop.bus.cli import options
from offloop.bus.errors import ConfigurationError
from offloop.bus.printing import columns_of, escape, is_screen, say, shorten
from offloop.bus.terminal import CliCommand

_POLL_SECONDS = 0.2


@click.command(
    cls=CliCommand,
    name="logs",
    short_help="Show what a run has printed.",
    frequent=("--rank", "--attempt", "--follow", "--json", "--runs-dir"),
)
@click.argument("run")
@click.option("--rank", metavar="RANK|all", help="This rank, or all ranks. Default: the first.")
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="This attempt. Default: the newest.")
@click.option("-f", "--follow", is_flag=True, help="Continue until the run has ended.")
@click.option("--json", "as_json", is_flag=True, help="A line of JSON for each line.")
@options.runs_dir_option
def show_console(
    run: str, rank: str | None, attempt: int | None, follow: bool, as_json: bool, runs_dir: str | None
) -> None:
    """Show the console output of a RUN on this host, live or ended.

    Progress bars are shown as they were last. With all ranks, each line begins with its rank."""
    from offloop.bus.runs.console import console_path, list_ranks
    from offloop.bus.runs.directory import find_run, read_run

    info = find_run(run, runs_dir)
    number = attempt or info.last.number
    ranks = list_ranks(info.path, number)
    chosen = ranks if rank == "all" else [one for one in ranks if str(one) == rank] if rank else ranks[:1]
    if not chosen:
        of_rank = f" of rank {rank}" if ranks else ""
        there = f" (there: {', '.join(shorten(map(str, ranks), 'ranks'))})" if ranks else ""
        raise ConfigurationError(
            f"run {info.name!r} has no captured output{of_rank} in attempt {number} on this host{there}; "
            "'trainer' and 'offloop run' capture it, others with capture_console=True"
        )
    outputs = [_Output(console_path(info.path, number, one), one, as_json, rank == "all") for one in chosen]
    try:
        while True:
            newest = read_run(info.path)
            is_over = not follow or newest.last.number != number or not (newest.live or newest.away)
            for output in outputs:
                output.show(is_over)
            if is_over:
                return
            time.sleep(_POLL_SECONDS)
    except BrokenPipeError:  # such as of head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Output:
    """Prints the output of a rank, once or as it grows."""

    def __init__(self, path: Path, rank: int, as_json: bool, is_one_of_many: bool) -> None:
        self._path, self._rank, self._as_json = path, rank, as_json
        self._prefix = f"[{rank}] " if is_one_of_many else ""
        self._is_repainted = not as_json and not is_one_of_many and is_screen(sys.stdout)
        self._place = 0
        self._shown: list[str] = []  # lines since that place
        self._printed: list[str] = []

    def show(self, is_over: bool) -> None:
        from offloop.bus.runs.console import read_console

        part = read_console(self._path, self._place)
        if part.begin != self._place:
            self._shown, self._printed = [], []
        lines, settled = (part.settled + part.rest).split("\n"), part.settled.count("\n")
        if self._is_repainted:
            self._repaint(lines, is_over)
        else:
            self._print(lines, settled, is_over)
        self._place, self._shown, self._printed = part.end, lines[settled:], self._printed[settled:]

    def _print(self, lines: list[str], settled: int, is_over: bool) -> None:
        """Print finished lines, once they have not changed for a moment: they may be bars."""
        for at, line in enumerate(lines if is_over and lines[-1] else lines[:-1]):
            if self._printed[at : at + 1] == [line]:
                continue
            if at >= settled and not is_over and self._shown[at : at + 1] != [line]:
                break
            if self._as_json:
                click.echo(json.dumps({"rank": self._rank, "line": line}))
            else:
                say(f"{self._prefix}{line.expandtabs()}")
            self._printed[at : at + 1] = [line]

    def _repaint(self, lines: list[str], is_over: bool) -> None:
        """Replace the lines on the terminal from the first changed one on. The cursor is at the end of the last one."""
        if lines == self._shown and not is_over:
            return
        columns, text, both = columns_of(sys.stdout), "", list(zip(lines, self._shown, strict=False))
        same = next((at for at, (now, before) in enumerate(both) if now != before), max(0, len(both) - 1))
        if self._shown:
            up = sum(max(1, -(-len(_shown(line)) // columns)) for line in self._shown[same:]) - 1
            text = f"\r\x1b[{up}A\x1b[J" if up else "\r\x1b[J"
        sys.stdout.write(text + "\n".join(map(_shown, lines[same:])) + "\n" * (is_over and bool(lines[-1])))
        sys.stdout.flush()


def _shown(line: str) -> str:
    return escape(line.expandtabs())
