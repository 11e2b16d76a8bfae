"""Recordings as JSON: lines of it, and MCAP files for viewers that know JSON."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mcap.well_known import MessageEncoding, SchemaEncoding
from mcap.writer import Writer

from offloop.bus.recording.source import Recorded
from offloop.bus.strict_json import json_text
from offloop.bus.tools.rows import as_row, clock
from offloop.bus.tools.shape import Shape


def write_jsonl(records: Iterable[Recorded], path: Path) -> None:
    """Writes one object for each event in a line of its own. Maps and lists stay what they are. The JSON is strict: NaN
    and infinities are the strings ``NaN``, ``Infinity`` and ``-Infinity``, bytes are base64."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for record in records:
            row = as_row(record)
            row["utc"] = clock(row["utc"])
            file.write(f"{json_text(row)}\n")


def write_json_mcap(records: Iterable[Recorded], path: Path) -> None:
    """Writes an MCAP file of JSON messages with JSON schemas, as Foxglove and PlotJuggler read them: a topic
    ``/EVENT/RANK`` for each event and rank, ``log_time`` the event's own time, the values as :func:`write_jsonl` has
    them. What is nothing is left out, because a schema has no word for it.

    ``records`` is gone through twice: for the schemas, and for the messages."""
    shapes: dict[str, Shape] = {}
    for record in records:
        shapes.setdefault(record.topic.name, Shape()).see_members(_message(record))
    with path.open("wb") as file:
        writer = Writer(file)
        writer.start(library="offloop")
        schemas = {name: _register(writer, name, shape) for name, shape in shapes.items()}
        channels: dict[str, int] = {}
        for record in records:
            name = record.topic.name
            # A dollar sign has a meaning of its own in Foxglove's paths.
            topic = f"/{name.lstrip('$')}/{record.topic.rank}"
            if topic not in channels:
                channels[topic] = writer.register_channel(topic, MessageEncoding.JSON, schemas[name])
            time, sequence = record.event.time, record.event.seq & 0xFFFFFFFF
            writer.add_message(channels[topic], time, json_text(_message(record)).encode(), time, sequence)
        writer.finish()


def _message(record: Recorded) -> dict[str, Any]:
    row = as_row(record)
    row["utc"] = clock(row["utc"])
    return {name: value for name, value in row.items() if value is not None}


def _register(writer: Writer, name: str, shape: Shape) -> int:
    members = {member: one.json_schema() for member, one in shape.members.items()}
    properties = {member: schema for member, schema in members.items() if schema is not None}
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": properties}
    identity: int = writer.register_schema(f"offloop.{name}", SchemaEncoding.JSONSchema, json.dumps(schema).encode())
    return identity
