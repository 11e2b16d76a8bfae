"""The training loop: :class:`Trainer`, what it runs (models, algorithms, evaluators) and the tasks of the command
``trainer``.

Everything here but the command's help needs torch, so names are loaded when they are first used: without torch,
importing this package works and using it says what to install.
"""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports
from offloop.trainer.arguments import explain_missing

if TYPE_CHECKING:
    from offloop.trainer.arguments.config import CheckpointConfig, ComputeConfig, EvalConfig, StreamConfig
    from offloop.trainer.data.evaluator import Evaluator
    from offloop.trainer.data.models import Classifier, LanguageModel
    from offloop.trainer.data.spec import DataSpec
    from offloop.trainer.distributed.sampling import RankBatchSampler
    from offloop.trainer.engine.algorithm import Algorithm
    from offloop.trainer.engine.engine import AlgorithmLogger, Engine
    from offloop.trainer.engine.state import State
    from offloop.trainer.trainer import Trainer

__all__ = [
    "Algorithm",
    "AlgorithmLogger",
    "CheckpointConfig",
    "Classifier",
    "ComputeConfig",
    "DataSpec",
    "Engine",
    "EvalConfig",
    "Evaluator",
    "LanguageModel",
    "RankBatchSampler",
    "State",
    "StreamConfig",
    "Trainer",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "offloop.trainer.arguments.config": ["CheckpointConfig", "ComputeConfig", "EvalConfig", "StreamConfig"],
        "offloop.trainer.data.evaluator": ["Evaluator"],
        "offloop.trainer.data.models": ["Classifier", "LanguageModel"],
        "offloop.trainer.data.spec": ["DataSpec"],
        "offloop.trainer.distributed.sampling": ["RankBatchSampler"],
        "offloop.trainer.engine.algorithm": ["Algorithm"],
        "offloop.trainer.engine.engine": ["Engine", "AlgorithmLogger"],
        "offloop.trainer.engine.state": ["State"],
        "offloop.trainer.trainer": ["Trainer"],
    },
    explain_missing,
)
