"""Reports on runs and recordings: values for programs, and lines for people. Commands import it when they need it."""

import contextlib
import math
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import msgspec

from offloop.bus.errors import BrokerError, RecordingError, RunDirectoryError
from offloop.bus.index.checkpoints import checkpoint_rows
from offloop.bus.index.columns import facts_of
from offloop.bus.index.entry import GOING_ON, MetricValues, RunEntry, metric_values
from offloop.bus.index.table import differences
from offloop.bus.net.channels import SocketChannel, ask
from offloop.bus.net.nats_addresses import no_such_run
from offloop.bus.printing import LONGEST_NAME, cut_in_the_middle, one_line, say, say_table, shorten, table
from offloop.bus.protocol.frames import EventBody
from offloop.bus.protocol.order import Gap
from offloop.bus.protocol.run_state import Reached
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.source import RecordSource, is_mark
from offloop.bus.recording.summary import MAX_LEFT_OUT, MAX_METRICS, Summarizer
from offloop.bus.runs.bridged import bridge_of, how_to_send, read_bridge
from offloop.bus.runs.console import last_traceback
from offloop.bus.runs.directory import IMPORTED_FROM, RunInfo, changed_in_words, read_run
from offloop.bus.runs.flight import STACKS, list_dumps, read_verdict
from offloop.bus.types.actor import is_actor
from offloop.bus.types.event import Event
from offloop.bus.types.hyperparameters import chosen_first, is_of_the_training, value_text
from offloop.bus.types.metrics import MetricNames, Mode, direction_of, goals_in
from offloop.bus.types.source import Source
from offloop.bus.types.units import BYTES, lasted, number_text, when

_LISTED = 20
_RESULTS = ("run", "status", "error", "reason", "started", "lasted", "config")  # details that the results show too
_ALREADY_SAID = ("command", "git/", "version/", "config/", "machine/host")


def describe_run(run: RunInfo) -> dict[str, Any]:
    """Return the details of a run, for ``offloop show``."""
    described = describe_start(run)
    if (bridge := read_bridge(run.path)) is not None:
        described["bridge"] = asdict(bridge)
    if dumps := list_dumps(run.path):
        described["dumps"] = [_dump(path) for path in dumps]
    if stacks := list_dumps(run.path, STACKS):
        described["stacks"] = [[path.name, read_verdict(path)] for path in stacks]
    try:
        described |= describe_recording(run.recording)
    except RecordingError as error:
        # The rest is shown all the same.
        described["trouble"] = str(error)
    if run.last.gaps:
        described["gaps"] = [*described.get("gaps", ()), *(gap._asdict() for gap in run.last.gaps)]
    described |= {"run": run.name, "paused": msgspec.to_builtins(run.paused)}
    if run.live and run.control_endpoint is not None:
        try:
            channel = SocketChannel(run.control_endpoint)
            described["statistics"] = ask(channel, "statistics", {"run": run.recorded_as})
        except BrokerError as error:
            # The run may just have ended, or its broker may be stopped.
            described |= {"statistics": None, "trouble": str(error)}
    return described


def describe_start(run: RunInfo) -> dict[str, Any]:
    """Describe the newest attempt of a run without its recording. Times are seconds since 1970."""
    last, info = run.last, run.last.info
    versions = info.get("versions")
    described = {
        "run": run.name,
        **{name: getattr(run, name) for name in ("recorded_as", "id", "status", "changed")},
        **{name: getattr(last, name) for name in ("error", "reason", "started", "ended")},
        **{name: getattr(last, name) for name in ("world_size", "local_world_size")},
        "actors": [str(publisher.get("name")) for publisher in last.publishers if "role" in publisher],
        "attempt": last.number,
        "attempts": [attempt.number for attempt in run.attempts],
        "command": [str(word) for word in info.get("command") or ()],
        "folder": info.get("cwd"),
        "versions": {"python": info.get("python"), **(versions if isinstance(versions, dict) else {})},
        **{name: info.get(name) for name in ("host", "git_commit", "git_dirty")},
        "config": info.get("config", {}),
        **Source.of(info).describe(),
    }
    if isinstance(imported := info.get(IMPORTED_FROM), dict):
        described[IMPORTED_FROM] = imported
    return described


def _dump(path: Path) -> list[str]:
    try:
        reason, detail = Recording(path).flight or ("", "")
    except RecordingError as error:
        reason, detail = "", str(error)
    return [path.name, reason, detail]


def describe_stream_run(stream: str, name: str) -> dict[str, Any]:
    """Describe a run in NATS. Raises RunNotFoundError, or BrokerError if servers or bridge do not answer."""
    from offloop.bus.jetstream.channel import StreamChannel
    from offloop.bus.jetstream.nats_connection import NatsConnection

    connection = NatsConnection.at(stream)
    for listed in connection.runs(name):
        described: dict[str, Any] = msgspec.to_builtins(listed)
        described["hosts"] = msgspec.to_builtins(connection.hosts(name))
        if listed.live:
            described["statistics"] = ask(StreamChannel(connection), "statistics", {"run": name})
        return described
    raise no_such_run(stream, name)


def describe_recording(path: Path) -> dict[str, Any]:
    """Describe a recording. Raises RecordingError if nothing was recorded."""
    source = RecordSource(path)
    counts: Counter[str] = Counter()
    last: EventBody | None = None
    described: dict[str, Any] = {}
    for record in source:
        if is_mark(record):
            continue
        name = record.topic.name
        counts[name] += 1
        if is_actor(record.topic.rank):
            continue
        last = record.event
        if name == Event.INIT and not record.topic.rank:
            described = Source.of(last.fields).describe()
    with contextlib.closing(Summarizer(path, source.run, source.attempt, source.run_id)) as summarizer:
        summarizer.work(math.inf, saves=False)
        summary = summarizer.summary
    return {
        **described,
        "run": source.run,
        "reached": msgspec.structs.asdict(Reached.of(last)) if last else {},
        "events": dict(counts.most_common()),
        "tables": summary.rows,
        "recording": str(path),
        **({} if (flight := Recording(path).flight) is None else {"flight": list(flight)}),
        "size": os.path.getsize(path),
        "gaps": [gap._asdict() for gap in source.gaps],
        "left_out": [gap._asdict() for gap in source.left_out],
        "damage": source.damage,
        "paused": _pause(source),
        "hyperparameters": summary.hyperparameters,
        "metrics": describe_metrics(metric_values([summary])),
    }


def describe_metrics(metrics: Mapping[str, MetricValues]) -> dict[str, dict[str, Any]]:
    names = ("last", "last_step", "min", "min_step", "max", "max_step")
    described = {name: dict(zip(names, msgspec.structs.astuple(one), strict=False)) for name, one in metrics.items()}
    for one in described.values():
        if one["min_step"] < 0:
            one |= dict.fromkeys(names[2:])
    return described


def summary(path: Path, entry: RunEntry) -> dict[str, Any]:
    """Return a run as ``offloop runs --json`` has it."""
    paused = None
    if entry.status == "paused":
        with contextlib.suppress(RunDirectoryError):  # just deleted
            paused = read_run(path).paused
    known = msgspec.structs.asdict(entry)
    reached = {name: known.pop(name) for name in ("epoch", "batch", "sample", "planned")}
    return {
        **known,
        "paused": msgspec.to_builtins(paused),
        "reached": None if entry.epoch is None else reached,
        "recording": str(path / entry.recording) if entry.recording else None,
        "path": str(path),
        "checkpoints": [msgspec.structs.asdict(one) for one in entry.checkpoints],
        "metrics": describe_metrics(entry.metrics),
    }


def describe_comparison(entries: Sequence[RunEntry], *, everything: bool = False) -> dict[str, Any]:
    """Return the names of runs, the hyperparameters that differ, and the metrics, each with a value for every run."""
    metrics = [describe_metrics(entry.metrics) for entry in entries]
    goals = goals_in(entry.hyperparameters for entry in entries)
    return {
        "runs": [entry.run for entry in entries],
        "hyperparameters": {
            name: values for name, values in differences(entries).items() if everything or is_of_the_training(name)
        },
        "metrics": {name: _compared(metrics, name, goals) for name in dict.fromkeys(chain.from_iterable(metrics))},
    }


def _compared(metrics: Sequence[dict[str, dict[str, Any]]], name: str, goals: dict[str, Mode]) -> dict[str, Any]:
    mode = direction_of(name, goals)
    of_runs = [one.get(name, {}) for one in metrics]
    found = {key: [one.get(key) for one in of_runs] for key in ("last", "last_step")}
    best = [one.get(str(mode)) for one in of_runs]
    known = {value for value in best if value is not None}
    # Equal values have no best one.
    winner = (min if mode == "min" else max)(known) if len(known) > 1 else None
    is_best = [value is not None and value == winner for value in best]
    return {"mode": mode, **found, "best": best, "best_step": [one.get(f"{mode}_step") for one in of_runs]} | {
        "is_best": is_best
    }


def _pause(source: RecordSource) -> dict[str, Any] | None:
    """Start of the pause in seconds since 1970, and the last batch; ``None`` for a training that is not paused."""
    if source.ending is not None:
        return None
    pause = None
    for outcome in source.outcomes:
        if outcome.error is None and outcome.command.name == "pause":
            pause = {"since": (outcome.time_ns or 0) / 1e9, "batch": outcome.batch}
        elif outcome.error is None and outcome.command.name in ("resume", "stop"):
            pause = None
    return pause


def lines(described: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for label, text in _all_lines(described):
        if text:
            yield label, text


def hyperparameter_lines(described: dict[str, Any]) -> Iterator[tuple[str, str]]:
    hyperparameters = described.get("hyperparameters", {})
    for name in chosen_first(hyperparameters):
        if "command" not in described or not name.startswith(_ALREADY_SAID):
            yield name, value_text(hyperparameters[name])


def start_lines(described: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield how a run was started: each label with its text."""
    here, ranks, commit = described["local_world_size"], described["world_size"], described["git_commit"]
    found = {
        "recorded as": described["recorded_as"] if described["recorded_as"] != described["run"] else "",
        "id": described["id"],
        "command": shlex.join(described["command"]),
        "folder": described["folder"],
        "host": described["host"],
        "ranks": f"{here} of {ranks}: the others are recorded on their hosts" if here < ranks else str(ranks),
        "actors": ", ".join(shorten(described["actors"], "actors", _LISTED)),
        "versions": _pairs({name: version for name, version in described["versions"].items() if version}),
        "git commit": f"{commit}{', with uncommitted changes' if described['git_dirty'] else ''}" if commit else "",
    }
    yield from ((label, str(text)) for label, text in found.items() if text)


def _all_lines(described: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    yield "run", described["run"]
    if "status" in described:
        yield "status", described["status"]
        yield "error", described["error"]
        yield "reason", described.get("reason")
        yield "attempt", f"{described['attempt']} of {len(described['attempts'])}"
        yield "changed", changed_in_words(described.get("changed", {}))
        yield "started", when(described["started"])
        yield "lasted", lasted(described["started"], described["ended"], live=described["status"] in GOING_ON)
    if described.get("paused"):
        yield "paused", f"since {when(described['paused']['since'])}, after batch {described['paused']['batch']}"
    if imported := described.get(IMPORTED_FROM):
        yield "imported from", f"{imported.get('path')} ({imported.get('source')})"
    if "command" in described:
        yield from start_lines(described)
        yield "config", _pairs(described["config"])
    else:
        yield "host", described.get("host")
    if "unavailable" in described:
        yield "framework", described["framework"]
        events, fields = described["unavailable"]["events"], described["unavailable"]["fields"]
        yield "never gives", ", ".join([*events, *(f"{field} ({reason})" for field, reason in fields.items())])
    if "reached" in described:
        yield "reached", str(Reached(**described["reached"])) if described["reached"] else "nothing yet"
    if "recording" in described:
        yield "events", _pairs(described["events"])
        yield "recording", described["recording"]
        yield "flight", one_line(": ".join(filter(None, described.get("flight", ()))))
        yield "size", f"{described['size']:,} bytes"
        yield "missing", _gaps(described["gaps"])
        left_out = _gaps(described["left_out"])
        yield "left out", left_out and f"{left_out}, which another recording holds"
        yield "damage", "; ".join(described["damage"])
    if (bridge := bridge_of(described.get("bridge"))) is not None:
        yield "bridge", str(bridge)
        is_over = "recording" in described and described["status"] not in GOING_ON
        if is_over and not bridge.has_all(described["attempt"]):
            what = "incomplete" if bridge.copied else "missing"
            yield "copy", f"{what}: {how_to_send(Path(described['recording']).parent, bridge.servers)}"
    if hosts := described.get("hosts"):
        silent = [str(host.get("host")) for host in hosts if host["status"] in GOING_ON and not host["live"]]
        more = f" and {len(silent) - _LISTED} more" if len(silent) > _LISTED else ""
        yield "hosts", str(len(hosts)) if len(hosts) > 1 else ""
        yield "silent", f"{', '.join(silent[:_LISTED])}{more}: no bridge answers there" if silent else ""
    for name, *why in described.get("dumps", ()):
        yield "flight", one_line(f"{name}, {': '.join(filter(None, why))}")
    for name, verdict in described.get("stacks", ()):
        yield "stacks", one_line(f"{name}: {verdict}")
    yield from _statistics_lines(described.get("statistics") or {})
    yield "trouble", described.get("trouble")


def _statistics_lines(statistics: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    for publisher in sorted(statistics.get("publishers", []), key=lambda one: one["rank"]):
        if len(publisher) > 1:
            parts = [
                f"{publisher.get('published', 0):,} events, {publisher.get('lag', 0):,} of them not on disk yet",
                f"{publisher.get('nanoseconds_per_event', 0) / 1000:.1f} us each of the training thread's own time",
            ]
            named = {"dropped": "{:,} dropped", "resent": "{:,} sent again", "broker_restarts": "broker restarts: {:,}"}
            parts += [text.format(publisher[key]) for key, text in named.items() if publisher.get(key)]
            yield publisher.get("name") or f"rank {publisher['rank']}", ", ".join(parts)
    consumers = statistics.get("consumers", [])
    yield "consumers", str(len(consumers) or "")
    for consumer in consumers[:_LISTED]:
        given, lag, gaps = (consumer.get(key, 0) for key in ("given", "lag", "missing"))
        yield f"  {consumer.get('name') or 'unnamed'}", f"{given:,} events, {lag:,} behind, {gaps:,} missing"
    yield "trouble", statistics.get("trouble")


def _gaps(gaps: list[dict[str, int]]) -> str:
    texts = []
    for rank, first, last in (Gap(**gap) for gap in gaps):
        texts.append(f"{f'event {first}' if first == last else f'events {first} to {last}'} of rank {rank}")
    return ", ".join(shorten(texts, "ranges of events", _LISTED))


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def say_results(info: RunInfo, entry: RunEntry) -> None:
    """Print how a run went: facts, metrics, checkpoints, hyperparameters, and the traceback of one that failed."""
    say_table([line for line in _result_lines(info, entry) if line[1]])
    _say_metrics(describe_metrics(entry.metrics), entry.hyperparameters)
    if entry.left_out:
        more = "or more " if entry.left_out >= MAX_LEFT_OUT else ""
        say(f"  and {entry.left_out:,} {more}beyond the limit of {MAX_METRICS:,}")
    if entry.checkpoints:
        say("checkpoints")
        rows = [(f"  {path}", *row) for path, *row in checkpoint_rows(entry.checkpoints, entry.metrics)]
        say_table([("  FILE", "BATCH", "SIZE", "METRIC", "VALUE", ""), *rows])
    if names := chosen_first(filter(is_of_the_training, entry.hyperparameters)):
        say("hyperparameters")
        say_table([(f"  {name}", one_line(value_text(entry.hyperparameters[name]))) for name in names])
    if entry.error and (trace := last_traceback(info.path, info.last.number, entry.error)):
        for line in trace.splitlines():
            say(line)


def say_details(described: dict[str, Any]) -> None:
    """Print everything about a recording or a run in NATS."""
    for line in table(list(lines(described))):
        say(line)
    _say_metrics(described.get("metrics", {}), described.get("hyperparameters", {}))
    if described.get("hyperparameters"):
        say("hyperparameters")
        for line in table([(f"  {name}", text) for name, text in hyperparameter_lines(described)]):
            say(line)


def say_more_details(described: dict[str, Any]) -> None:
    """Print the details of a run that its results do not have."""
    more = [(label, text) for label, text in lines(described) if label not in _RESULTS]
    more += [(name, text) for name, text in hyperparameter_lines(described) if not is_of_the_training(name)]
    for line in ("details", *table([(f"  {label}", text) for label, text in more])):
        say(line)


def _result_lines(info: RunInfo, entry: RunEntry) -> Iterator[tuple[str, str]]:
    yield "run", info.name
    yield "status", f"{entry.status}, pinned" if entry.pinned else entry.status
    yield "error", entry.error or ""
    yield "reason", entry.reason or ""
    yield from facts_of(entry)
    yield "size", f"{number_text(entry.size, BYTES)} in {info.path}"
    yield from zip(chain(["note"], repeat("")), entry.note.splitlines(), strict=False)


def _say_metrics(metrics: dict[str, dict[str, Any]], hyperparameters: dict[str, Any]) -> None:
    if not metrics:
        return
    names, goals = MetricNames(metrics), goals_in([hyperparameters])
    rows: list[tuple[str, ...]] = [("  NAME", "LAST", "STEP", "", "BEST", "STEP", "FULL NAME")]
    for name, values in metrics.items():
        mode = direction_of(name, goals)
        best = ("", "", "")
        if mode is not None and values[mode] is not None:
            best = mode, number_text(values[mode]), str(values[f"{mode}_step"])
        short = cut_in_the_middle(one_line(names.short(name)), LONGEST_NAME)
        rows.append((f"  {short}", number_text(values["last"]), str(values["last_step"]), *best, name))
    say("metrics")
    say_table(rows)
