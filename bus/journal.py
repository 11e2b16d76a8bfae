"""The record of a run: written by the broker, read by everyone. The format is MCAP; ``docs/protocol.md`` says how it
is used."""

from bus.journal_reader import FileSource, JournalReader, Record, Source
from bus.journal_writer import JournalWriter
from bus.mcap_records import Position

__all__ = ["FileSource", "JournalReader", "JournalWriter", "Position", "Record", "Source"]
