"""Algorithms of the trainer, and :data:`ALGORITHMS`, which finds them and others by name.

Each class is loaded on first use, which imports torch. Start with ``gradients``; ``common`` is shared by several."""

from typing import TYPE_CHECKING

from offloop.bus.lazy import lazy_exports
from offloop.trainer.arguments import explain_missing

if TYPE_CHECKING:
    from offloop.trainer.algorithms.averaging import EMA as EMA
    from offloop.trainer.algorithms.averaging import SWA as SWA
    from offloop.trainer.algorithms.gradients import SAM as SAM
    from offloop.trainer.algorithms.gradients import GradientClipping as GradientClipping
    from offloop.trainer.algorithms.images import ChannelsLast as ChannelsLast
    from offloop.trainer.algorithms.images import CutOut as CutOut
    from offloop.trainer.algorithms.images import ProgressiveResizing as ProgressiveResizing
    from offloop.trainer.algorithms.layers import BlurPool as BlurPool
    from offloop.trainer.algorithms.layers import LayerFreezing as LayerFreezing
    from offloop.trainer.algorithms.layers import StochasticDepth as StochasticDepth
    from offloop.trainer.algorithms.registry import ALGORITHMS as ALGORITHMS
    from offloop.trainer.algorithms.rows import SelectiveBackprop as SelectiveBackprop
    from offloop.trainer.algorithms.rows import SequenceLengthWarmup as SequenceLengthWarmup
    from offloop.trainer.algorithms.targets import CutMix as CutMix
    from offloop.trainer.algorithms.targets import LabelSmoothing as LabelSmoothing
    from offloop.trainer.algorithms.targets import MixUp as MixUp
else:
    __getattr__, __dir__, __all__ = lazy_exports(__name__, explain_missing)
