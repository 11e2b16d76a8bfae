"""Smoothed targets, and mixtures of two rows."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer.algorithms.common import check_images, check_key, random_span, soft_targets
from offloop.trainer.arguments.checks import check_number
from offloop.trainer.device.batch import BatchKey
from offloop.trainer.device.device import autocast
from offloop.trainer.engine.state import Algorithm, AlgorithmLogger, State


class Mixing(Algorithm):
    """Mixes each row of a microbatch with a random partner row.

    A subclass mixes the inputs. This class mixes the targets, which become probabilities, or, with
    ``interpolate_loss``, the losses for both sets of targets. After the loss the batch holds the original targets
    again, for metrics. Random numbers come from torch's generator on the host. With ``interpolate_loss`` another
    algorithm's change of the targets affects only the loss for the rows' own targets."""

    def __init__(self, alpha: float, interpolate_loss: bool, input_key: BatchKey, target_key: BatchKey) -> None:
        self.alpha: float = check_number(alpha, "alpha")
        self.interpolates_loss = interpolate_loss
        self.input_key: BatchKey = check_key("input_key", input_key)
        self.target_key: BatchKey = check_key("target_key", target_key)
        self._steps: dict[Event, Callable[[State], None]] = {Event.BEFORE_FORWARD: self._mix_inputs}
        if interpolate_loss:
            self._steps[Event.BEFORE_BACKWARD] = self._mix_losses
        else:
            self._steps |= {Event.BEFORE_LOSS: self._mix_targets, Event.AFTER_LOSS: self._restore_targets}
        self._targets: torch.Tensor | None = None
        self._partners = torch.empty(0, dtype=torch.long)
        self._share = 0.0

    @abstractmethod
    def mix(self, inputs: torch.Tensor, partners: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return ``inputs`` mixed with ``inputs[partners]`` in a new tensor, and the partners' share, from 0 to 1."""

    def match(self, event: Event, state: State) -> bool:
        return event in self._steps

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        self._steps[event](state)

    def draw_coefficient(self) -> float:
        """Draw a number from 0 to 1, from the Beta distribution; 0 for an ``alpha`` of 0."""
        if self.alpha == 0:
            return 0.0
        # Double precision, in which a small alpha does not end in 0 / 0.
        alpha = torch.tensor(self.alpha, dtype=torch.float64)
        return float(torch.distributions.Beta(alpha, alpha, validate_args=False).sample())

    def _mix_inputs(self, state: State) -> None:
        inputs = state.batch_get_item(self.input_key)
        if not isinstance(inputs, torch.Tensor):
            raise ConfigurationError(
                f"{type(self).__name__} cannot mix inputs of type {type(inputs).__name__}: it needs a tensor whose "
                "first dimension counts the rows; name it by input_key"
            )
        self._partners = torch.randperm(inputs.shape[0]).to(inputs.device)
        mixed, self._share = self.mix(inputs, self._partners)
        state.batch_set_item(self.input_key, mixed)

    def _mix_targets(self, state: State) -> None:
        targets = self._targets = self._get_targets(state)
        if not targets.is_floating_point():
            targets = soft_targets(targets, state.outputs)
        state.batch_set_item(self.target_key, _mixture(targets, targets[self._partners], self._share))

    def _restore_targets(self, state: State) -> None:
        state.batch_set_item(self.target_key, self._targets)
        self._targets = None

    def _mix_losses(self, state: State) -> None:
        targets = self._get_targets(state)
        state.batch_set_item(self.target_key, targets[self._partners])
        with autocast(state.precision, state.device):
            loss = state.model.loss(state.outputs, state.batch)
        state.batch_set_item(self.target_key, targets)
        state.loss = _mixture(state.loss, loss, self._share)

    def _get_targets(self, state: State) -> torch.Tensor:
        targets = state.batch_get_item(self.target_key)
        if isinstance(targets, torch.Tensor):
            return targets
        raise ConfigurationError(
            f"{type(self).__name__} cannot mix targets of type {type(targets).__name__}: it needs a tensor whose first "
            "dimension counts the rows; name it by target_key"
        )


class MixUp(Mixing):
    """Trains on ``(1 - mixing) * row + mixing * partner``, and on their targets in the same proportion.

    The partner is another row of the microbatch. For each microbatch a coefficient is drawn from Beta(alpha, alpha).
    The smaller one of it and its complement is used, so that a row's own target counts most and an accuracy over the
    original targets is meaningful.

    Args:
        alpha: parameter of the Beta distribution, 0 or more: the larger, the closer to equal parts; 0 for no mixing.
        interpolate_loss: mix the losses for both sets of targets, for losses that take no probabilities as targets.
        input_key, target_key: keys of inputs (floats of shape (rows, ...)) and targets (class numbers, probabilities or
            values) in the batch, see :mod:`offloop.trainer.device.batch`.

    Paper: Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization", arXiv:1710.09412. Reference:
    ``composer/algorithms/mixup``."""

    def __init__(
        self, alpha: float = 0.2, interpolate_loss: bool = False, input_key: BatchKey = 0, target_key: BatchKey = 1
    ) -> None:
        super().__init__(alpha, interpolate_loss, input_key, target_key)

    def mix(self, inputs: torch.Tensor, partners: torch.Tensor) -> tuple[torch.Tensor, float]:
        if not inputs.is_floating_point():
            raise ConfigurationError(
                f"MixUp cannot average inputs of type {inputs.dtype}: it needs floats; convert them in the dataloader"
            )
        coefficient = self.draw_coefficient()
        mixing = min(coefficient, 1 - coefficient)
        return inputs.lerp(inputs[partners], mixing), mixing


class CutMix(Mixing):
    """Replaces a box in each image by the same box of another image of the microbatch, and mixes their targets by area.

    The box is the same for all images of a microbatch. Its share of the area is drawn from Beta(alpha, alpha), and its
    sides have the image's proportions; it is cut off at the border.

    Args:
        alpha: parameter of the Beta distribution, 0 or more: the larger, the closer to equal parts; 0 for no mixing.
        interpolate_loss: mix the losses for both sets of targets, for losses that take no probabilities as targets.
        uniform_sampling: every pixel is in the box with the same probability. By default the box's middle is drawn from
            all pixels, as in the paper.
        input_key, target_key: keys of images (of shape (rows, channels, height, width)) and targets (class numbers,
            probabilities or values) in the batch, see :mod:`offloop.trainer.device.batch`.

    Paper: Yun et al. 2019, "CutMix: Regularization Strategy to Train Strong Classifiers with Localizable Features",
    arXiv:1905.04899. Reference: ``composer/algorithms/cutmix``."""

    def __init__(
        self,
        alpha: float = 1.0,
        interpolate_loss: bool = False,
        uniform_sampling: bool = False,
        input_key: BatchKey = 0,
        target_key: BatchKey = 1,
    ) -> None:
        super().__init__(alpha, interpolate_loss, input_key, target_key)
        self.uniform_sampling = uniform_sampling

    def mix(self, inputs: torch.Tensor, partners: torch.Tensor) -> tuple[torch.Tensor, float]:
        height, width = check_images(inputs, "CutMix").shape[2:]
        side = math.sqrt(self.draw_coefficient())
        rows = random_span(height, int(side * height), self.uniform_sampling)
        columns = random_span(width, int(side * width), self.uniform_sampling)
        mixed = inputs.clone()
        mixed[:, :, rows, columns] = inputs[partners, :, rows, columns]
        area = (rows.stop - rows.start) * (columns.stop - columns.start)
        return mixed, area / (height * width)


def _mixture(own: Any, partners: Any, share: float) -> Any:
    if isinstance(own, Mapping):
        return {name: _mixture(part, partners[name], share) for name, part in own.items()}
    if isinstance(own, list | tuple):
        return [_mixture(*parts, share) for parts in zip(own, partners, strict=True)]
    return (1 - share) * own + share * partners


_EVENTS = frozenset({Event.BEFORE_LOSS, Event.AFTER_LOSS})


class LabelSmoothing(Algorithm):
    """Moves the targets towards the uniform distribution: ``(1 - smoothing) * target + smoothing / classes``.

    The loss must take probabilities as targets, as ``torch.nn.functional.cross_entropy`` does. Targets are class
    numbers of shape (...) or probabilities of shape (..., classes), for outputs of shape (..., classes). After the loss
    the batch holds the original targets again, for metrics. A row with a negative class number adds nothing to the
    loss, but a mean over rows counts it.

    Args:
        smoothing: share of the uniform distribution, from 0 to 1.
        target_key: key of the targets in the batch, see :mod:`offloop.trainer.device.batch`.

    Paper: Szegedy et al. 2016, "Rethinking the Inception Architecture for Computer Vision", arXiv:1512.00567, section
    7.
    Reference: ``composer/algorithms/label_smoothing``."""

    def __init__(self, smoothing: float = 0.1, target_key: BatchKey = 1) -> None:
        self.smoothing: float = check_number(smoothing, "smoothing", most=1)
        self.target_key: BatchKey = check_key("target_key", target_key)
        self._original: torch.Tensor | None = None

    def match(self, event: Event, state: State) -> bool:
        return event in _EVENTS

    def apply(self, event: Event, state: State, logger: AlgorithmLogger) -> None:
        if event is Event.AFTER_LOSS:
            state.batch_set_item(self.target_key, self._original)
            self._original = None
            return
        self._original = state.batch_get_item(self.target_key)
        targets = soft_targets(self._original, state.outputs)
        # The sum of a row is 1, or 0 without a target.
        uniform = targets.sum(dim=-1, keepdim=True) / targets.shape[-1]
        state.batch_set_item(self.target_key, (1 - self.smoothing) * targets + self.smoothing * uniform)
