"""The training loop: :class:`Trainer`, what it runs (models, algorithms, evaluators) and the tasks of the command
``trainer``.

Everything here but the command's help needs torch, so names are loaded when they are first used: without torch,
importing this package works and using it says what to install.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.arguments.extras import missing_extra

if TYPE_CHECKING:
    from trainer.data.evaluator import Evaluator
    from trainer.data.models import Classifier, LanguageModel
    from trainer.data.spec import DataSpec
    from trainer.distributed.sampling import RankBatchSampler
    from trainer.engine.algorithm import Algorithm
    from trainer.engine.engine import Engine
    from trainer.engine.logger import Logger
    from trainer.engine.state import State
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
    "Algorithm": "trainer.engine.algorithm",
    "Classifier": "trainer.data.models",
    "DataSpec": "trainer.data.spec",
    "Engine": "trainer.engine.engine",
    "Evaluator": "trainer.data.evaluator",
    "LanguageModel": "trainer.data.models",
    "Logger": "trainer.engine.logger",
    "RankBatchSampler": "trainer.distributed.sampling",
    "State": "trainer.engine.state",
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
