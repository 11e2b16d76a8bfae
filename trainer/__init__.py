"""The training loop: :class:`Trainer`, with models, algorithms, evaluators and the tasks of the command ``trainer``.

The names are loaded on first use. Without torch, importing the package works and using a name says what to install."""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports
from offloop.trainer.arguments import explain_missing

if TYPE_CHECKING:
    from offloop.trainer.data.evaluator import Evaluator as Evaluator
    from offloop.trainer.data.models import Classifier as Classifier
    from offloop.trainer.data.models import LanguageModel as LanguageModel
    from offloop.trainer.data.spec import DataSpec as DataSpec
    from offloop.trainer.distributed.sampling import RankBatchSampler as RankBatchSampler
    from offloop.trainer.engine.engine import Engine as Engine
    from offloop.trainer.engine.state import Algorithm as Algorithm
    from offloop.trainer.engine.state import AlgorithmLogger as AlgorithmLogger
    from offloop.trainer.engine.state import State as State
    from offloop.trainer.trainer import Trainer as Trainer
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, explain_missing)
