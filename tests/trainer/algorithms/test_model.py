"""Changes to a model's layers: where they are laid out, blurred, left out or frozen."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from algorithm_runs import Image, image_batches, note, row_batches
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import conv2d

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer import Algorithm, AlgorithmLogger, Classifier, State, Trainer
from offloop.trainer.algorithms import BlurPool, ChannelsLast, LayerFreezing, StochasticDepth
from offloop.trainer.device.device import CpuDevice


def start(algorithm: Algorithm, model: nn.Module) -> AlgorithmLogger:
    """Start an algorithm as the trainer does."""
    state = State(model=model, device=CpuDevice(), seed=1, run_name="r")
    logger = AlgorithmLogger(state)
    algorithm.check(state)
    assert algorithm.match(Event.INIT, state)
    algorithm.apply(Event.INIT, state, logger)
    return logger


def test_channels_are_neighbours_in_memory_and_nothing_else_changes() -> None:
    model = Image()
    parameters = list(model.parameters())
    before = copy.deepcopy(model.state_dict())
    start(ChannelsLast(), model)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert model.module[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model.module[0](image_batches()[0][0]).is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(before[name], values) for name, values in model.state_dict().items())


def impulse() -> Tensor:
    images = torch.zeros(2, 1, 9, 9)
    images[:, :, 4, 4] = 1
    return images


def test_a_max_pool_samples_blurred_maxima() -> None:
    model = nn.Sequential(nn.MaxPool2d(2))
    start(BlurPool(), model)
    # The maxima of 2 by 2 are 1 at rows and columns 3 and 4; blurred, [1, 3, 3, 1] from 2 to 5.
    expected = torch.zeros(4, 4)
    expected[1:3, 1:3] = torch.tensor([1.0, 3.0]).outer(torch.tensor([1.0, 3.0])) / 16
    torch.testing.assert_close(model(impulse()), expected.expand(2, 1, 4, 4))


@pytest.mark.parametrize("blur_first", [True, False])
def test_the_blur_comes_before_or_after_the_convolution(blur_first: bool) -> None:
    images = torch.rand(2, 16, 9, 9)
    model = nn.Sequential(nn.Conv2d(16, 4, 3, stride=2))
    weight, bias = model[0].weight, model[0].bias
    start(BlurPool(blur_first=blur_first), model)

    def blur(images: Tensor, stride: int) -> Tensor:
        kernel = torch.tensor([1.0, 2.0, 1.0]).outer(torch.tensor([1.0, 2.0, 1.0])).expand(images.shape[1], 1, 3, 3)
        return conv2d(images, kernel / 16, stride=stride, padding=1, groups=images.shape[1])

    first, after = conv2d(blur(images, 1), weight, bias, stride=2), blur(conv2d(images, weight, bias), 2)
    torch.testing.assert_close(model(images), first if blur_first else after)


@given(
    kernel=st.integers(1, 4),
    stride=st.tuples(st.integers(1, 3), st.integers(2, 3)),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    size=st.integers(8, 13),
    blur_first=st.booleans(),
)
def test_shapes_are_those_of_the_layers_that_were_not_blurred(
    kernel: int, stride: tuple[int, int], padding: int, dilation: int, size: int, blur_first: bool
) -> None:
    images = torch.rand(2, 2, size, size)
    options: dict[str, Any] = {"stride": stride, "dilation": dilation}
    pool = nn.MaxPool2d(kernel, padding=min(padding, kernel // 2), **options)
    for layer in (pool, nn.Conv2d(2, 3, kernel, padding=padding, **options)):
        model = nn.Sequential(layer)
        shape = model(images).shape
        start(BlurPool(blur_first=blur_first, min_channels=2), model)
        assert model(images).shape == shape


def blurrable() -> nn.Sequential:
    rest = nn.Conv2d(16, 16, 3), nn.MaxPool2d(2, 1), nn.MaxPool2d(2, ceil_mode=True)
    return nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.Conv2d(16, 16, 3, stride=2), nn.MaxPool2d(2), *rest)


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        ({}, [1, 2]),
        ({"replace_maxpools": False}, [1]),
        ({"min_channels": 3}, [0, 1, 2]),
    ],
)
def test_layers_that_sample_down_are_blurred_and_parameters_stay(arguments: dict[str, Any], changed: list[int]) -> None:
    model = blurrable()
    kinds, parameters = [type(layer) for layer in model], dict(model.named_parameters())
    logger = start(BlurPool(**arguments), model)
    assert [at for at, (layer, kind) in enumerate(zip(model, kinds, strict=True)) if type(layer) is not kind] == changed
    assert all(isinstance(layer, kind) for layer, kind in zip(model, kinds, strict=True))
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert model.state_dict().keys() == blurrable().state_dict().keys()
    ((_, logged),) = logger.take()
    assert logged == {
        "blurpool/num_blurpool_layers": 2 in changed,
        "blurpool/num_blurconv_layers": len(set(changed) - {2}),
    }


def test_a_model_without_anything_to_blur_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        start(BlurPool(), nn.Sequential(nn.Conv2d(3, 16, 3, stride=2)))


class Residual(nn.Module):
    """Adds a linear function of what goes in, and counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        added: Tensor = inputs + self.linear(inputs)
        return added


def residuals(layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*(Residual() for _ in range(layers)))


@pytest.mark.parametrize(
    ("distribution", "rates"), [("linear", [0.1, 0.2, 0.3, 0.4]), ("uniform", [0.4, 0.4, 0.4, 0.4])]
)
def test_layers_are_left_out_as_often_as_they_should(distribution: str, rates: list[float]) -> None:
    model = residuals()
    start(StochasticDepth("Residual", drop_rate=0.4, drop_distribution=distribution), model)
    torch.manual_seed(8)
    for _ in range(2000):
        model(torch.ones(1, 8))
    left_out = [1 - layer.calls / 2000 for layer in model]
    assert left_out == pytest.approx(rates, abs=0.03)


def test_a_layer_that_is_left_out_gives_its_input_and_gets_no_gradient() -> None:
    model, plain = residuals(1), residuals(1)
    plain.load_state_dict(model.state_dict())
    start(StochasticDepth("Residual", drop_rate=0.5), model)
    inputs = torch.rand(3, 8, requires_grad=True)
    seen = set()
    for seed in range(8):
        torch.manual_seed(seed)
        model.zero_grad()
        outputs = model(inputs)
        outputs.sum().backward()
        is_left_out = torch.equal(outputs, inputs)
        assert (model[0].linear.weight.grad is None) == is_left_out
        if not is_left_out:
            torch.testing.assert_close(outputs, inputs + 2 * plain[0].linear(inputs))
        seen.add(is_left_out)
    assert seen == {True, False}
    assert torch.equal(model.eval()(inputs), plain(inputs))


def test_rows_are_left_out_one_by_one() -> None:
    model, plain = residuals(1), residuals(1)
    plain.load_state_dict(model.state_dict())
    start(StochasticDepth("Residual", "sample", drop_rate=0.25), model)
    inputs = torch.rand(4000, 8)
    torch.manual_seed(8)
    outputs = model(inputs)
    left_out = (outputs == inputs).all(dim=1)
    assert left_out.float().mean().item() == pytest.approx(0.25, abs=0.03)
    torch.testing.assert_close(outputs[~left_out], (inputs + plain[0].linear(inputs) / 0.75)[~left_out])
    assert torch.equal(model.eval()(inputs), plain(inputs))


@pytest.mark.parametrize(("warmup", "length"), [("0.5dur", 4), ("1ep", 4)])
def test_rates_grow_from_nothing(warmup: str, length: int) -> None:
    depth = StochasticDepth("Residual", drop_rate=0.4, drop_warmup=warmup)

    calls: list[list[int]] = []
    watch = note(calls, lambda state: [layer.calls for layer in state.model.module[0]], Event.BATCH_END)
    classifier = Classifier(nn.Sequential(residuals(2), nn.Linear(8, 4)))
    sgd = torch.optim.SGD(classifier.parameters(), lr=0.1)
    settings: dict[str, Any] = {"max_duration": "8ba", "seed": 1, "publish": False, "progress_bar": False}
    with Trainer(classifier, row_batches(), optimizers=sgd, algorithms=[depth, watch], **settings) as trainer:
        trainer.fit()
        logged = [metrics["stochastic_depth/drop_rate"] for _, metrics in trainer.logger.take()]
    expected = [0.4 * min(1, batch / length) for batch in range(8)]
    if warmup == "1ep":
        expected = [0.0] * 4 + [0.4] * 4
    assert logged == pytest.approx(expected)
    assert calls[0] == [1, 1]


def test_layers_that_are_not_residual_are_refused() -> None:
    class Doubling(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return torch.cat([inputs, inputs])

    for method in ("block", "sample"):
        model = nn.Sequential(Doubling())
        start(StochasticDepth("Doubling", method, drop_rate=1e-9), model)
        with pytest.raises(ConfigurationError, match="Doubling"):
            model(torch.rand(2, 3))


def stack() -> Classifier:
    return Classifier(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.ReLU(), nn.Linear(8, 4)))


def freeze(freezing: LayerFreezing, model: Classifier, epochs: int = 4) -> tuple[list[list[bool]], list[Any], Any]:
    """After each epoch, which layers are not as they were at its beginning; what was logged; the optimizer."""
    snapshots: list[list[Tensor]] = []
    layers = [layer for layer in model.module if isinstance(layer, nn.Linear)]
    look = note(snapshots, lambda state: [layer.weight.detach().clone() for layer in layers], Event.EPOCH_START)
    last = note(snapshots, lambda state: [layer.weight.detach().clone() for layer in layers], Event.FIT_END)
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings: dict[str, Any] = {"max_duration": epochs, "seed": 1, "publish": False, "progress_bar": False}
    with Trainer(model, row_batches(), optimizers=adam, algorithms=[freezing, look, last], **settings) as trainer:
        trainer.fit()
        logged = [metrics for _, metrics in trainer.logger.take()]
    trained = [
        [not torch.equal(*pair) for pair in zip(before, after, strict=True)] for before, after in pairwise(snapshots)
    ]
    return trained, logged, adam


def test_layers_are_frozen_from_the_first_one_on() -> None:
    model = stack()
    trained, logged, adam = freeze(LayerFreezing(freeze_start=0.0), model)
    # Of the four layers before the last one, a quarter more after each quarter of the training.
    assert trained == [[number >= epoch for number in range(5)] for epoch in range(4)]
    assert [one["layer_freezing/layers_frozen"] for one in logged] == [1, 2, 3, 4]
    assert [one["layer_freezing/percentage_frozen"] for one in logged] == [0.25, 0.5, 0.75, 1.0]
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert names == ["module.5.weight", "module.5.bias"]
    assert len(adam.param_groups[0]["params"]) == 2
    assert len(adam.state) == 2
    assert model.module[0].weight.grad is None


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        ({}, [0, 0, 2, 4]),
        ({"freeze_start": 0.25, "freeze_level": 0.75}, [0, 1, 2, 3]),
        ({"freeze_start": 0.0, "freeze_level": 0.0}, [0, 0, 0, 0]),
    ],
)
def test_freezing_follows_its_schedule(arguments: dict[str, float], counts: list[int]) -> None:
    _, logged, _ = freeze(LayerFreezing(**arguments), stack())
    assert [one["layer_freezing/layers_frozen"] for one in logged] == counts
