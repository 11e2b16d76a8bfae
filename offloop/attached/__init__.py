"""What all adapters share: a training in another framework's loop, as a run.

Begin with ``training``. An adapter imports what it needs from here.
"""

from offloop.trainer.arguments import missing_extra

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(missing_extra("torch"), name=error.name) from None

from offloop.attached.containment import contain, contained
from offloop.attached.missing import missing
from offloop.attached.options import Options, check_options, is_enabled
from offloop.attached.position import LoopPosition, length_of
from offloop.attached.training import (
    ALWAYS,
    EVALUATION,
    EVALUATION_BATCHES,
    PREDICTION,
    AttachedTraining,
    Framework,
    numbers_in,
    precision_of,
    time_reached,
    unwrapped,
)
from offloop.attached.wrapping import Wrapped
from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.bus.types.time import TimeInput
from offloop.bus.types.timestamp import Timestamp, TrainingTime
from offloop.trainer.arguments.checks import as_list
from offloop.trainer.control.remote_control import LATER

__all__ = [
    "ALWAYS",
    "EVALUATION",
    "EVALUATION_BATCHES",
    "LATER",
    "PREDICTION",
    "AttachedTraining",
    "ConfigurationError",
    "Event",
    "Framework",
    "LoopPosition",
    "Options",
    "TimeInput",
    "Timestamp",
    "TrainingTime",
    "Wrapped",
    "as_list",
    "check_options",
    "contain",
    "contained",
    "is_enabled",
    "length_of",
    "missing",
    "numbers_in",
    "precision_of",
    "time_reached",
    "unwrapped",
]
