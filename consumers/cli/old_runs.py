"""Runs callbacks over runs that have ended, several at a time."""

import concurrent.futures
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from offloop.bus.cli.manage import choose_paths
from offloop.bus.cli.options import say_json
from offloop.bus.errors import ConfigurationError, OffloopError
from offloop.bus.printing import one_line, say, say_table
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.derived import derived_path
from offloop.bus.recording.recording import Recording
from offloop.bus.runs.directory import is_locked, read_run
from offloop.bus.types.commands import Command
from offloop.consumers.api.logger import RunContext
from offloop.consumers.callbacks.alert import Alert, Notice
from offloop.consumers.cli.registry import create_selected
from offloop.consumers.loggers.run import RunLogger
from offloop.consumers.runner.entries import requested_events
from offloop.consumers.runner.runner import Runner
from offloop.consumers.runner.without_effects import without_effects

EXIT_FAILED = 1


def run_over(
    callbacks: Sequence[str],
    runs: tuple[str, ...],
    where: str | None,
    runs_dir: str | None,
    options: tuple[str, ...],
    name: str,
    jobs: int,
    what_if: bool,
    as_json: bool,
) -> int:
    """Run callbacks over attempts of runs; return the exit code of ``offloop backfill``."""
    RunLogger(name)
    made, _ = create_selected(callbacks, [], options)
    requested_events(made)
    tasks = [Task(path, attempt, tuple(callbacks), options, name) for path, attempt in _attempts(runs, where, runs_dir)]
    act = _try_out if what_if else _add_results
    rows: list[tuple[str, str]] = []
    results: list[dict[str, Any]] = []
    # Not forked: threads of libraries may be at work here.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(jobs, len(tasks)) or 1, mp_context=context) as pool:
        doing = {pool.submit(act, task): task for task in tasks}
        try:
            for count, future in enumerate(concurrent.futures.as_completed(doing), 1):
                lines, is_failed = future.result()
                run, attempt = doing[future].run.name, doing[future].attempt
                results.append({"run": run, "attempt": attempt, "failed": is_failed, "results": lines})
                for line in lines:
                    rows.append((doing[future].shown, line))
                    say(f"[{count} of {len(tasks)}] {doing[future].shown}: {line}", err=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if as_json:
        say_json(sorted(results, key=lambda one: (one["run"], one["attempt"])))
    elif what_if:
        say_table(sorted(rows))
    return EXIT_FAILED if any(one["failed"] for one in results) else 0


class Task(NamedTuple):
    """One attempt of a run, and the callbacks to run over it."""

    run: Path
    attempt: int
    callbacks: tuple[str, ...]
    options: tuple[str, ...]
    name: str

    @property
    def shown(self) -> str:
        return self.run.name if self.attempt == 1 else f"{self.run.name}, attempt {self.attempt}"


def _attempts(runs: tuple[str, ...], where: str | None, runs_dir: str | None) -> Iterator[tuple[Path, int]]:
    for path in choose_paths(runs, where, runs_dir):
        if is_locked(path):
            say(f"run {path.name} is live, and left out: attach a consumer with '--log run'", err=True)
            continue
        for attempt in read_run(path).attempts:
            yield path, attempt.number


def _add_results(task: Task) -> tuple[list[str], bool]:
    """Run in a process of its own; return lines for people, and whether it failed."""
    result = derived_path(task.run, task.attempt, task.name)
    if result.exists():
        return [f"has results of {task.name!r} already"], False
    try:
        made, _ = create_selected(task.callbacks, [], task.options)
        statistics = Runner(Recording(task.run, task.attempt), made, [RunLogger(task.name)], on_error="stop").run()
        if statistics.interrupted or statistics.failed_destinations:
            raise OffloopError("; ".join(statistics.problems) or "interrupted")
    except OffloopError as error:
        with suppress(OSError):
            result.unlink()
        return [f"failed: {one_line(str(error))}"], True
    return [f"{statistics.handled:,} events"], False


def _try_out(task: Task) -> tuple[list[str], bool]:
    try:
        return list(_actions(task)) or ["nothing"], False
    except OffloopError as error:
        return [f"failed: {one_line(str(error))}"], True


def _actions(task: Task) -> Iterator[str]:
    commands: list[tuple[int, Command]] = []
    notices: list[Notice] = []
    made, _ = create_selected(task.callbacks, [], task.options)

    def note(notice: Notice, run: RunContext) -> None:
        notices.append(notice)

    for callback in made:
        if isinstance(callback, Alert):
            callback.act = note  # type: ignore[method-assign]

    def keep(state: Snapshot, command: Command) -> None:
        commands.append((state.timestamp.values.batch, command))

    recording = Recording(task.run, task.attempt)
    statistics = Runner(without_effects(recording, keep), made, on_error="stop").run()
    if statistics.interrupted:
        raise ConfigurationError("interrupted")
    trained = next(
        (one.reached.batch for one in read_run(task.run).attempts if one.number == task.attempt and one.reached), 0
    )
    known: set[str] = set()
    for batch, command in commands:
        # A stopped training would have sent no further one.
        if command.name not in known:
            known.add(command.name)
            saved = f", {1 - batch / trained:.0%} of it left" if command.name == "stop" and trained else ""
            yield f"{command.name} at batch {batch} of {trained}{saved}: {command.reason or ''}".rstrip(": ")
    firing = [notice for notice in notices if notice.status == "firing"]
    for rule in dict.fromkeys(notice.rule for notice in firing):
        of_rule = [notice for notice in firing if notice.rule == rule]
        first, times = of_rule[0], f", {len(of_rule)} times" if len(of_rule) > 1 else ""
        yield f"alert at batch {first.batch} of {trained}{times}: {first.text}"
