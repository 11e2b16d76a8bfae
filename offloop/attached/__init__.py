"""What all adapters share: a training in another framework's loop, as a run.

May import: bus.checkpoints, bus.protocol, bus.publisher, bus.runs, trainer.arguments, trainer.control, trainer.data,
trainer.device, trainer.distributed, trainer.engine, trainer.fields, trainer.stream. Begin with ``training``. An adapter
imports what it needs from here, so that a file of the user's own that hides one of these packages is named first.
"""

from offloop.packages import check_packages, missing

check_packages("bus", "trainer")
from trainer.arguments import missing_extra  # noqa: E402

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(missing_extra("torch"), name=error.name) from None

from bus.errors import ConfigurationError  # noqa: E402
from bus.types.event import Event  # noqa: E402
from bus.types.time import TimeInput  # noqa: E402
from bus.types.timestamp import Timestamp, TrainingTime  # noqa: E402
from offloop.attached.containment import contain, contained  # noqa: E402
from offloop.attached.options import Options, check_options  # noqa: E402
from offloop.attached.position import LoopPosition, length_of  # noqa: E402
from offloop.attached.training import (  # noqa: E402
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
from offloop.attached.wrapping import Wrapped  # noqa: E402
from trainer.arguments.checks import as_list  # noqa: E402
from trainer.control.remote_control import LATER  # noqa: E402

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
    "length_of",
    "missing",
    "numbers_in",
    "precision_of",
    "time_reached",
    "unwrapped",
]
