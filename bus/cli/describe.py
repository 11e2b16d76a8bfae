"""The report on a run or a recording: values for programs, and lines of them, which ``offloop show`` and pages show."""

import math
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from offloop.bus.errors import BrokerError, RecordingError, RunNotFoundError
from offloop.bus.index.entry import GOING_ON, MetricValues, metric_values
from offloop.bus.net.channels import SocketChannel, ask
from offloop.bus.net.nats_addresses import how_to_list
from offloop.bus.printing import one_line
from offloop.bus.protocol.frames import EventBody
from offloop.bus.protocol.order import Gap
from offloop.bus.protocol.run_state import Reached
from offloop.bus.recording.recording import Recording
from offloop.bus.recording.source import RecordSource, is_mark
from offloop.bus.recording.summary import Summarizer
from offloop.bus.runs.bridged import BridgeStatus, bridge_of, how_to_send, read_bridge
from offloop.bus.runs.directory import IMPORTED_FROM, Origin, RunInfo, changed_in_words
from offloop.bus.runs.flight import list_dumps
from offloop.bus.types.event import Event
from offloop.bus.types.hyperparameters import chosen_first, value_text
from offloop.bus.types.source import Source
from offloop.bus.types.units import lasted, when

_LISTED = 20
_ALREADY_SAID = ("command", "git/", "version/", "config/", "machine/host")


def describe_run(run: RunInfo) -> dict[str, Any]:
    """A run's newest attempt, its recording, and, while it is live, what its broker, publishers and consumers say of
    themselves (see their ``statistics()``)."""
    described = describe_start(run)
    if (bridge := read_bridge(run.path)) is not None:
        described["bridge"] = asdict(bridge)
    if dumps := list_dumps(run.path):
        described["dumps"] = [_dump(path) for path in dumps]
    recorded = _recorded(run.recording)
    if run.last.gaps:
        recorded["gaps"] = [*recorded.get("gaps", ()), *(gap._asdict() for gap in run.last.gaps)]
    paused = None if run.paused is None else msgspec.structs.asdict(run.paused)
    return {**described, **recorded, "run": run.name, "paused": paused, **_statistics(run)}


def describe_start(run: RunInfo) -> dict[str, Any]:
    """The newest attempt of a run, as its folder has it without its recording. Times are seconds since 1970."""
    last, info = run.last, run.last.info
    versions = info.get("versions")
    described = {
        "run": run.name,
        "recorded_as": run.recorded_as,
        "id": run.id,
        "status": run.status,
        "error": last.error,
        "reason": last.reason,
        "attempt": last.number,
        "attempts": [attempt.number for attempt in run.attempts],
        "changed": run.changed,
        "started": last.started,
        "ended": last.ended,
        "command": [str(word) for word in info.get("command") or ()],
        "folder": info.get("cwd"),
        "host": info.get("host"),
        "world_size": last.world_size,
        "local_world_size": last.local_world_size,
        "versions": {"python": info.get("python"), **(versions if isinstance(versions, dict) else {})},
        "git_commit": info.get("git_commit"),
        "git_dirty": info.get("git_dirty"),
        "config": info.get("config", {}),
        **Source.of(info).describe(),
    }
    origin = Origin.of(info)
    if origin is not None:
        described["replay_of"] = origin._asdict()
    if isinstance(imported := info.get(IMPORTED_FROM), dict):
        described[IMPORTED_FROM] = imported
    return described


def _dump(path: Path) -> list[str]:
    try:
        reason, detail = Recording(path).flight or ("", "")
    except RecordingError as error:
        reason, detail = "", str(error)
    return [path.name, reason, detail]


def _recorded(path: Path) -> dict[str, Any]:
    try:
        return describe_recording(path)
    except RecordingError as error:
        # Everything else that is known of the run is shown all the same.
        return {"trouble": str(error)}


def describe_stream_run(stream: str, name: str) -> dict[str, Any]:
    """The details of a run in NATS.

    Raises:
        RunNotFoundError: there is no such run.
        BrokerError: the servers, or the bridge of the live run, do not answer.
    """
    from offloop.bus.jetstream.channel import StreamChannel
    from offloop.bus.jetstream.nats_connection import NatsConnection

    connection = NatsConnection.at(stream)
    for listed in connection.runs(name):
        described: dict[str, Any] = msgspec.to_builtins(listed)
        described["hosts"] = msgspec.to_builtins(connection.hosts(name))
        if listed.live:
            described["statistics"] = ask(StreamChannel(connection), "statistics", {"run": name})
        return described
    raise RunNotFoundError(f"NATS at {stream} has no run {name!r}: {how_to_list(stream)}", run=name)


def _statistics(run: RunInfo) -> dict[str, Any]:
    if not run.live or run.control_endpoint is None:
        return {}
    try:
        return {"statistics": ask(SocketChannel(run.control_endpoint), "statistics", {"run": run.recorded_as})}
    except BrokerError as error:
        # A run that ends at this moment, or a broker that is stopped: everything else is shown all the same.
        return {"statistics": None, "trouble": str(error)}


def describe_recording(path: Path) -> dict[str, Any]:
    """What is in a recording.

    Raises :class:`offloop.bus.errors.RecordingError` when that is nothing at all."""
    if path.is_file() and not path.stat().st_size:
        raise RecordingError(f"{path} is empty: nothing was recorded in it", path=path)
    source = RecordSource(path)
    counts: Counter[str] = Counter()
    last: EventBody | None = None
    described: dict[str, Any] = {}
    for record in source:
        if is_mark(record):
            continue
        name, last = record.topic.name, record.event
        counts[name] += 1
        if name == Event.INIT and not record.topic.rank:
            described = Source.of(last.fields).describe()
    with closing(Summarizer(path, source.run, source.attempt, source.run_id)) as summarizer:
        summarizer.work(math.inf, saves=False)
        summary = summarizer.summary
    return {
        **described,
        "run": source.run,
        "reached": msgspec.structs.asdict(Reached.of(last)) if last else {},
        "events": dict(counts.most_common()),
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
    """The last, the least and the greatest value of each metric, and the steps that these are of."""
    described = {}
    for name, values in metrics.items():
        is_known = values.low_step >= 0
        described[name] = {
            "last": values.last,
            "last_step": values.last_step,
            "min": values.low if is_known else None,
            "min_step": values.low_step if is_known else None,
            "max": values.high if is_known else None,
            "max_step": values.high_step if is_known else None,
        }
    return described


def _pause(source: RecordSource) -> dict[str, Any] | None:
    """Since when the training is paused, in seconds since 1970, and after which batch; ``None`` when it is not, or has
    ended."""
    if source.ending is not None:
        return None
    pause = None
    for outcome in source.outcomes:
        if outcome.error is None and outcome.command.name == "pause":
            pause = {"since": (outcome.time_ns or 0) / 1e9, "batch": outcome.batch}
        elif outcome.error is None and outcome.command.name in ("resume", "stop"):
            pause = None
    return pause


# -- for people -------------------------------------------------------------------------------------------------------


def lines(described: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What was described as pairs of a label and a text, without what is empty."""
    for label, text in _all_lines(described):
        if text not in ("", None):
            yield label, text


def hyperparameter_lines(described: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The hyperparameters as pairs of a name and a text, without what :func:`lines` says already."""
    hyperparameters = described.get("hyperparameters", {})
    for name in chosen_first(hyperparameters):
        if "command" not in described or not name.startswith(_ALREADY_SAID):
            yield name, value_text(hyperparameters[name])


def start_lines(described: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """By what, where and how a run was started, as pairs of a label and a text, without what is empty."""
    here, ranks, commit = described["local_world_size"], described["world_size"], described["git_commit"]
    found = {
        "recorded as": described["recorded_as"] if described["recorded_as"] != described["run"] else "",
        "id": described["id"],
        "command": shlex.join(described["command"]),
        "folder": described["folder"],
        "host": described["host"],
        "ranks": f"{here} of {ranks}: the others are recorded on their hosts" if here < ranks else str(ranks),
        "versions": _pairs({name: version for name, version in described["versions"].items() if version}),
        "git commit": f"{commit}{', with uncommitted changes' if described['git_dirty'] else ''}" if commit else "",
    }
    for label, text in found.items():
        if text:
            yield label, str(text)


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
    if described.get("replay_of"):
        yield "replay of", str(Origin(**described["replay_of"]))
    if imported := described.get(IMPORTED_FROM):
        yield "imported from", f"{imported.get('path')} ({imported.get('source')})"
    if "command" in described:
        yield from start_lines(described)
        yield "config", _pairs(described["config"])
    else:
        yield "host", described.get("host")
    if "unavailable" in described:
        yield "framework", described["framework"]
        yield "never gives", _never(**described["unavailable"])
    if "reached" in described:
        yield "reached", str(Reached(**described["reached"])) if described["reached"] else "nothing yet"
    if "recording" in described:
        yield "events", _pairs(described["events"])
        yield "recording", described["recording"]
        yield "flight", one_line(": ".join(filter(None, described.get("flight", ()))))
        yield "size", f"{described['size']:,} bytes"
        yield "missing", _gaps(described["gaps"])
        yield (
            "left out",
            f"{_gaps(described['left_out'])}, which another recording holds" if described["left_out"] else "",
        )
        yield "damage", "; ".join(described["damage"])
    if isinstance(bridge := described.get("bridge"), dict):
        yield "bridge", str(bridge_of(bridge) or "")
        yield "copy", _missing_copy(described, bridge_of(bridge))
    if hosts := described.get("hosts"):
        silent = [str(host.get("host")) for host in hosts if host["status"] in GOING_ON and not host["live"]]
        more = f" and {len(silent) - _LISTED} more" if len(silent) > _LISTED else ""
        yield "hosts", str(len(hosts)) if len(hosts) > 1 else ""
        yield "silent", f"{', '.join(silent[:_LISTED])}{more}: no bridge answers there" if silent else ""
    for name, *why in described.get("dumps", ()):
        yield "flight", one_line(f"{name}, {': '.join(filter(None, why))}")
    yield from _statistics_lines(described.get("statistics") or {})
    yield "trouble", described.get("trouble")


def _missing_copy(described: dict[str, Any], bridge: BridgeStatus | None) -> str:
    if bridge is None or described.get("status") in GOING_ON or "recording" not in described:
        return ""
    if bridge.has_all(described["attempt"]):
        return ""
    what = "incomplete" if bridge.copied else "missing"
    return f"{what}: {how_to_send(Path(described['recording']).parent, bridge.servers)}"


def _never(events: list[str], fields: dict[str, str]) -> str:
    listed = [f"{field} ({reason})" for field, reason in fields.items()]
    return ", ".join([*events, *listed])


def _statistics_lines(statistics: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    for publisher in sorted(statistics.get("publishers", []), key=lambda one: one["rank"]):
        if len(publisher) > 1:
            yield f"rank {publisher['rank']}", _publisher(publisher)
    consumers = statistics.get("consumers", [])
    if consumers:
        yield "consumers", str(len(consumers))
    for consumer in consumers[:_LISTED]:
        given, lag, gaps = (consumer.get(key, 0) for key in ("given", "lag", "missing"))
        yield f"  {consumer.get('name') or 'unnamed'}", f"{given:,} events, {lag:,} behind, {gaps:,} missing"
    yield "trouble", statistics.get("trouble")


def _publisher(publisher: dict[str, Any]) -> str:
    parts = [
        f"{publisher.get('published', 0):,} events, {publisher.get('lag', 0):,} of them not on disk yet",
        f"{publisher.get('nanoseconds_per_event', 0) / 1000:.1f} us each of the training thread's own time",
    ]
    named = {"dropped": "dropped", "resent": "sent again", "broker_restarts": "broker restarts"}
    parts += [f"{publisher[key]:,} {text}" for key, text in named.items() if publisher.get(key)]
    return ", ".join(parts)


def _gaps(gaps: list[dict[str, int]]) -> str:
    more = f" and {len(gaps) - _LISTED:,} more ranges of events" if len(gaps) > _LISTED else ""
    return ", ".join(_gap(Gap(**gap)) for gap in gaps[:_LISTED]) + more


def _gap(gap: Gap) -> str:
    which = f"event {gap.first}" if gap.first == gap.last else f"events {gap.first} to {gap.last}"
    return f"{which} of rank {gap.rank}"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
