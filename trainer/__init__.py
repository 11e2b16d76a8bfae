"""The training loop: :class:`Trainer`, what it runs (models, algorithms, evaluators) and the tasks of the command
``trainer``.

Everything here but the command's help needs torch, so names are loaded when they are first used: without torch,
importing this package works and using it says what to install.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offloop.trainer.arguments.config import CheckpointConfig, ComputeConfig, EvalConfig, StreamConfig
    from offloop.trainer.data.evaluator import Evaluator
    from offloop.trainer.data.models import Classifier, LanguageModel
    from offloop.trainer.data.spec import DataSpec
    from offloop.trainer.distributed.sampling import RankBatchSampler
    from offloop.trainer.engine.algorithm import Algorithm
    from offloop.trainer.engine.engine import Engine, Logger
    from offloop.trainer.engine.state import State
    from offloop.trainer.trainer import Trainer

__all__ = [
    "Algorithm",
    "CheckpointConfig",
    "Classifier",
    "ComputeConfig",
    "DataSpec",
    "Engine",
    "EvalConfig",
    "Evaluator",
    "LanguageModel",
    "Logger",
    "RankBatchSampler",
    "State",
    "StreamConfig",
    "Trainer",
]

_BUS = find_spec("bus")
if _BUS is not None and Path(str(_BUS.origin)).resolve().parent != Path(__file__).resolve().parents[1] / "bus":
    raise ImportError(
        f"{_BUS.origin} hides offloop's package 'bus', because it has the same name and Python finds it first: "
        "rename it (my_bus.py, for example) and what imports it, or start the script from another folder"
    )

# Only now is it known that this 'bus' is ours.
from offloop.bus.lazy import lazy_exports  # noqa: E402
from offloop.trainer.arguments import explain_missing  # noqa: E402

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "offloop.trainer.arguments.config": ["CheckpointConfig", "ComputeConfig", "EvalConfig", "StreamConfig"],
        "offloop.trainer.data.evaluator": ["Evaluator"],
        "offloop.trainer.data.models": ["Classifier", "LanguageModel"],
        "offloop.trainer.data.spec": ["DataSpec"],
        "offloop.trainer.distributed.sampling": ["RankBatchSampler"],
        "offloop.trainer.engine.algorithm": ["Algorithm"],
        "offloop.trainer.engine.engine": ["Engine", "Logger"],
        "offloop.trainer.engine.state": ["State"],
        "offloop.trainer.trainer": ["Trainer"],
    },
    explain_missing,
)
