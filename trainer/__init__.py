"""The training loop: :class:`Trainer`, what it runs (models, algorithms, evaluators) and the tasks of the command
``trainer``.

Everything here but the command's help needs torch, so names are loaded when they are first used: without torch,
importing this package works and using it says what to install.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.algorithm import Algorithm
    from trainer.data import DataSpec
    from trainer.engine import Engine
    from trainer.evaluator import Evaluator
    from trainer.logger import Logger
    from trainer.models import Classifier, LanguageModel
    from trainer.sampling import RankBatchSampler
    from trainer.state import State
    from trainer.trainer import Trainer

__all__ = [
    "Algorithm",
    "Classifier",
    "DataSpec",
    "Engine",
    "Evaluator",
    "LanguageModel",
    "Logger",
    "RankBatchSampler",
    "State",
    "Trainer",
]

_HOMES = {
    "Algorithm": "trainer.algorithm",
    "Classifier": "trainer.models",
    "DataSpec": "trainer.data",
    "Engine": "trainer.engine",
    "Evaluator": "trainer.evaluator",
    "LanguageModel": "trainer.models",
    "Logger": "trainer.logger",
    "RankBatchSampler": "trainer.sampling",
    "State": "trainer.state",
    "Trainer": "trainer.trainer",
}
_EXTRA = {"torch", "torchmetrics", "cloudpickle"}

_BUS = find_spec("bus")
if _BUS is not None and Path(str(_BUS.origin)).resolve().parent != Path(__file__).resolve().parents[1] / "bus":
    raise ImportError(
        f"{_BUS.origin} hides offloop's package 'bus', because it has the same name and Python finds it first: "
        "rename it (my_bus.py, for example) and what imports it, or start the script from another folder"
    )


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        raise ModuleNotFoundError(missing_extra(error.name), name=error.name) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def missing_extra(module: str) -> str:
    """What to tell somebody who installed offloop without what the trainer needs."""
    return f"the trainer needs {module}; install it with: pip install 'offloop[trainer]'"
