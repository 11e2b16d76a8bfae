"""What ``bus info`` knows of a run or a recording, as values and as lines for people."""

import os
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from bus.errors import BrokerError, ProtocolError, RecordingError, RunNotFoundError
from bus.journal import JournalReader
from bus.run_source import ask_broker, list_remote_runs
from bus.runs import RunInfo
from bus.security import ClientSecurity
from bus.stream import Gap, StreamOrder
from bus.wire import CUT, END, EventBody, decode_event, parse_topic

__all__ = ["describe_recording", "describe_remote_run", "describe_run", "lasted", "lines", "when"]


def describe_run(run: RunInfo) -> dict[str, Any]:
    """A run's newest attempt, its recording, and, while it is live, what its broker, publishers and consumers say of
    themselves (see their ``statistics()``). Times are seconds since 1970."""
    last, told = run.last, run.last.info
    described = {
        "run": run.name,
        "status": run.status,
        "error": last.error,
        "attempt": last.number,
        "attempts": [attempt.number for attempt in run.attempts],
        "started": last.started,
        "ended": last.ended,
        "command": [str(word) for word in told.get("command", [])],
        "host": told.get("host"),
        "versions": {"python": told.get("python"), **told.get("versions", {})},
        "git_commit": told.get("git_commit"),
        "git_dirty": told.get("git_dirty"),
        "config": told.get("config", {}),
    }
    return {**described, **describe_recording(run.recording), "run": run.name, **_statistics(run)}


def describe_remote_run(address: str, name: str, security: ClientSecurity | None = None) -> dict[str, Any]:
    """What a broker on another machine knows of a run.

    Raises:
        RunNotFoundError: it has no such run.
        BrokerError: nobody answers there.
    """
    for told in list_remote_runs(address, security, name):
        if not told.get("live"):
            return told
        return {**told, "statistics": ask_broker(address, "statistics", {"run": name}, security)}
    raise RunNotFoundError(f"the broker at {address} has no run {name!r}: 'bus runs --broker {address}' lists them")


def _statistics(run: RunInfo) -> dict[str, Any]:
    if not run.live or run.door is None:
        return {}
    try:
        return {"statistics": ask_broker(run.door, "statistics", {"run": run.name})}
    except BrokerError as error:
        # A run that ends at this moment, or a broker that is stopped: everything else can be told all the same.
        return {"statistics": None, "trouble": str(error)}


def describe_recording(path: Path) -> dict[str, Any]:
    """What is in a recording.

    Raises :class:`bus.errors.RecordingError` when that is nothing at all."""
    if not path.stat().st_size:
        raise RecordingError(f"{path} is empty: nothing was recorded in it")
    counts: Counter[str] = Counter()
    last: EventBody | None = None
    with JournalReader(path) as reader:
        order: StreamOrder | None = None
        for records in reader.read():
            order = order or StreamOrder(reader.metadata.get("run", ""), _number(reader.metadata.get("attempt")), None)
            for record in records:
                counts[record.topic] += 1
                order.from_record(record.topic, record.body)
            bodies = [one.body for one in records if f"/{END}/" not in one.topic and f"/{CUT}/" not in one.topic]
            last = _decoded(bodies[-1]) if bodies else last
        metadata, cut = reader.metadata, reader.cut
        problems = [*reader.damage, *([cut] if cut else [])]
    return {
        "run": metadata.get("run"),
        "reached": {"epoch": last.timestamp[1], "batch": last.timestamp[2], "sample": last.timestamp[3]}
        if last
        else {},
        "events": dict(_by_event(counts).most_common()),
        "recording": str(path),
        "size": os.path.getsize(path),
        "gaps": [gap._asdict() for gap in (order.gaps if order else ())],
        "damage": problems,
    }


def _by_event(counts: Counter[str]) -> Counter[str]:
    names: Counter[str] = Counter()
    for topic, count in counts.items():
        name = parse_topic(topic.encode()).name
        if not name.startswith("$"):
            names[name] += count
    return names


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 1


def _decoded(body: bytes) -> EventBody | None:
    try:
        return decode_event(body)
    except ProtocolError:
        return None


# -- for people -------------------------------------------------------------------------------------------------------


def lines(described: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What was described as pairs of a label and a text, without what is empty."""
    for label, text in _all_lines(described):
        if text not in ("", None):
            yield label, text


def _all_lines(described: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    yield "run", described["run"]
    if "status" in described:
        yield "status", described["status"]
        yield "error", described["error"]
        yield "attempt", f"{described['attempt']} of {len(described['attempts'])}"
        yield "started", when(described["started"])
        yield "lasted", lasted(described["started"], described["ended"], live=described["status"] == "live")
    if "command" in described:
        yield "command", " ".join(described["command"])
        yield "host", described["host"]
        yield "versions", _pairs({name: version for name, version in described["versions"].items() if version})
        yield "git commit", _commit(described)
        yield "config", _pairs(described["config"])
    if "recording" in described:
        reached = described["reached"]
        yield (
            "reached",
            f"{reached['epoch']}ep {reached['batch']}ba {reached['sample']}sp" if reached else "nothing yet",
        )
        yield "events", _pairs(described["events"])
        yield "recording", described["recording"]
        yield "size", f"{described['size']:,} bytes"
        yield "missing", ", ".join(_gap(Gap(**gap)) for gap in described["gaps"][:20])
        yield "damage", "; ".join(described["damage"])
    yield from _statistics_lines(described.get("statistics") or {})
    yield "trouble", described.get("trouble")


def _statistics_lines(told: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    for rank, publisher in sorted(told.get("publishers", {}).items()):
        if publisher:
            yield f"rank {rank}", _publisher(publisher)
    consumers = told.get("consumers", [])
    if consumers:
        yield "consumers", str(len(consumers))
    for consumer in consumers[:20]:
        given, lag, gaps = (consumer.get(key, 0) for key in ("given", "lag", "missing"))
        yield f"  {consumer.get('name') or 'unnamed'}", f"{given:,} events, {lag:,} behind, {gaps:,} missing"
    yield "trouble", told.get("trouble")


def _publisher(told: dict[str, Any]) -> str:
    parts = [
        f"{told.get('published', 0):,} events, {told.get('lag', 0):,} of them not on disk yet",
        f"{told.get('nanoseconds_per_event', 0) / 1000:.1f} us each for the training",
    ]
    named = {"dropped": "dropped", "resent": "sent again", "broker_restarts": "broker restarts"}
    parts += [f"{told[key]:,} {text}" for key, text in named.items() if told.get(key)]
    return ", ".join(parts)


def _gap(gap: Gap) -> str:
    which = f"event {gap.first}" if gap.first == gap.last else f"events {gap.first} to {gap.last}"
    return f"{which} of rank {gap.rank}"


def _commit(described: dict[str, Any]) -> str:
    commit = described["git_commit"]
    return f"{commit}{' with changes' if described['git_dirty'] else ''}" if commit else ""


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def when(seconds: float) -> str:
    """A time as people write it, in the local zone."""
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def lasted(started: float, ended: float | None, *, live: bool) -> str:
    """How long something took, or has taken so far."""
    end = time.time() if live else ended
    return "?" if end is None else _duration(end - started)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02.0f}s" if minutes else f"{rest:.1f}s"
