"""Messages of the command ``consumer`` on standard error, and its exit codes."""

from collections.abc import Collection

from offloop.bus import printing
from offloop.bus.printing import shorten
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.replay import Replay
from offloop.bus.runs.directory import RUN_FILE, RunInfo, read_run
from offloop.bus.subscriber.subscriber import Subscriber
from offloop.bus.terminal import EXIT_LOST
from offloop.consumers.delivery.commit import Committed
from offloop.consumers.runner.places import Stream
from offloop.consumers.runner.statistics import RunnerStatistics

EXIT_TROUBLE = 1


def say(message: str) -> None:
    printing.say(message, err=True)


def say_start(stream: Stream, committed: Committed | None, _runner: object, name: str | None) -> None:
    if isinstance(stream, Subscriber) and stream.live:
        say(f"attached to run {stream.run_name}, which is live; Ctrl-C leaves it")
    if committed is None:
        return
    if committed.ending is not None:
        say(f"consumer {name} has handled this run to its end already: nothing is logged again")
    elif committed.last is not None:
        say(f"consumer {name} resumes after {committed.handled} events")


def report(stream: Stream, statistics: RunnerStatistics, fields: Collection[str]) -> int:
    for field in fields:
        _say_field(field, stream, statistics)
    for line in statistics.outcome_lines:
        say(line)
    lost = (f"missing: events {gap.first} to {gap.last} of rank {gap.rank}, which are lost" for gap in statistics.gaps)
    missing = shorten(lost, "ranges of events that are lost")
    problems = [*statistics.problems, *missing]
    for problem in problems:
        say(problem)
    for line in statistics.place_lines:
        say(line)
    handled, code = f"{statistics.handled} events handled", EXIT_TROUBLE if problems else 0
    if statistics.interrupted:
        say(f"detached from run {stream.run_name}: {handled}")
        return code
    if isinstance(stream, Replay) and statistics.ending is None:
        say(f"run {stream.run_name} was replayed until {stream.until}: {handled}")
        return code
    if statistics.ending is None or statistics.ending.status == "lost":
        return _report_no_end(stream, handled, code)
    say(f"run {stream.run_name} {statistics.ending}: {handled}{_damage(statistics.damage)}")
    return EXIT_LOST if statistics.damage else code


def _say_field(field: str, stream: Stream, statistics: RunnerStatistics) -> None:
    if field in statistics.fields_since:
        how = f"is available from batch {statistics.fields_since[field]} on, the first after its request"
    elif isinstance(stream, Recording | Replay):
        how = "is not in this recording: attach while the training runs, which requests it"
    else:
        how = "never came: it was not requested in time, or the training does not have it (see its output)"
    say(f"the field {field!r} {how}")


def _report_no_end(stream: Stream, handled: str, code: int) -> int:
    run = _newest_run(stream)
    if run is not None and run.live:
        say(f"run {stream.run_name} is still live: {handled}, all that is recorded so far")
        return code
    if isinstance(stream, Recording | Replay) and not stream.damage and Recording(stream.path).flight is not None:
        say(f"run {stream.run_name} had not ended when its flight recorder wrote this: {handled}")
        return code
    if run is not None and run.status != "lost" and run.last.error and not stream.damage:  # after a full disk
        say(f"run {stream.run_name} {run.status}, {run.last.error}: {handled}")
        return EXIT_LOST
    why = stream.ending.error if stream.ending is not None and stream.ending.error else "its end is unknown"
    say(f"run {stream.run_name} was lost, {why}: {handled}{_damage(stream.damage)}")
    return EXIT_LOST


def _damage(damage: str | None) -> str:
    return f"; {damage}, the rest was read" if damage else ""


def _newest_run(stream: Stream) -> RunInfo | None:
    """Return the run whose newest recording is the stream's."""
    if not isinstance(stream, Recording | Replay) or not (stream.path.parent / RUN_FILE).exists():
        return None
    run = read_run(stream.path.parent)
    return run if run.recording == stream.path else None
