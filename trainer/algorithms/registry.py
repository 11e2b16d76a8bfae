"""The algorithms by name."""

from offloop.bus.plugins.registry import Registry
from offloop.trainer.engine.state import Algorithm

_BUILT_IN = {
    "blurpool": "BlurPool",
    "channels_last": "ChannelsLast",
    "cutmix": "CutMix",
    "cutout": "CutOut",
    "ema": "EMA",
    "gradient_clipping": "GradientClipping",
    "label_smoothing": "LabelSmoothing",
    "layer_freezing": "LayerFreezing",
    "mixup": "MixUp",
    "progressive_resizing": "ProgressiveResizing",
    "sam": "SAM",
    "selective_backprop": "SelectiveBackprop",
    "sequence_length_warmup": "SequenceLengthWarmup",
    "stochastic_depth": "StochasticDepth",
    "swa": "SWA",
}

# Abstract, but the registry makes only subclasses.
ALGORITHMS: Registry[Algorithm] = Registry(
    "algorithm",
    Algorithm,  # type: ignore[type-abstract]
    "offloop.algorithms",
    {name: f"offloop.trainer.algorithms:{class_name}" for name, class_name in _BUILT_IN.items()},
)
"""The values of ``trainer TASK --algorithms``. Other packages add theirs by entry points in ``offloop.algorithms``."""
