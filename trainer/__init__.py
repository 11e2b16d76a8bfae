"""The training loop: :class:`Trainer`, what it runs (models, algorithms, evaluators) and the tasks of the command
``trainer``.

Everything here but the command's help needs torch, so names are loaded when they are first used: without torch,
importing this package works and using it says what to install.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.arguments.config import CheckpointConfig, ComputeConfig, EvalConfig, StreamConfig
    from trainer.data.evaluator import Evaluator
    from trainer.data.models import Classifier, LanguageModel
    from trainer.data.spec import DataSpec
    from trainer.distributed.sampling import RankBatchSampler
    from trainer.engine.algorithm import Algorithm
    from trainer.engine.engine import Engine, Logger
    from trainer.engine.state import State
    from trainer.trainer import Trainer

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
from bus.lazy import lazy_exports  # noqa: E402
from trainer.arguments import explain_missing  # noqa: E402

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "trainer.arguments.config": ["CheckpointConfig", "ComputeConfig", "EvalConfig", "StreamConfig"],
        "trainer.data.evaluator": ["Evaluator"],
        "trainer.data.models": ["Classifier", "LanguageModel"],
        "trainer.data.spec": ["DataSpec"],
        "trainer.distributed.sampling": ["RankBatchSampler"],
        "trainer.engine.algorithm": ["Algorithm"],
        "trainer.engine.engine": ["Engine", "Logger"],
        "trainer.engine.state": ["State"],
        "trainer.trainer": ["Trainer"],
    },
    explain_missing,
)
