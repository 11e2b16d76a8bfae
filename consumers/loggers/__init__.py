"""The destinations that come with offloop."""

from consumers.loggers.console import ConsoleLogger
from consumers.loggers.csv import CsvLogger
from consumers.loggers.jsonl import JsonlLogger

__all__ = ["ConsoleLogger", "CsvLogger", "JsonlLogger"]
