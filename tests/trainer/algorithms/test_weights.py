"""Averaged weights, clipped gradients and sharpness-aware steps, against formulas and plain loops."""

from typing import Any

import pytest
import torch
from algorithm_runs import note, row_batches, train
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader

from offloop.bus.errors import CheckpointError, ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer import Algorithm, Classifier, State, Trainer
from offloop.trainer.algorithms import EMA, SAM, SWA, GradientClipping

BATCHES = row_batches()


def normalized() -> Classifier:
    return Classifier(nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)))


def weights_of(state: State) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in state.model.parameters()]


def weights_at(algorithms: list[Algorithm], *events: Event, **settings: Any) -> list[list[Tensor]]:
    """Return the model's weights at each of the events, in a training on BATCHES."""
    notes: list[list[Tensor]] = []
    train(BATCHES, [*algorithms, note(notes, weights_of, *events)], **settings)
    return notes


def same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def moving_average(weights: list[list[Tensor]], smoothing: float, first: int, every: int) -> list[Tensor]:
    """Return the average after all these batches (or epochs), begun at number ``first`` and updated at multiples."""
    average = weights[first - 1]
    for number in range(first + 1, len(weights) + 1):
        if number % every == 0:
            average = [
                smoothing * one + (1 - smoothing) * new for one, new in zip(average, weights[number - 1], strict=True)
            ]
    return average


@pytest.mark.parametrize(
    ("ema", "smoothing", "first", "every"),
    [
        (EMA(half_life="6ba", update_interval="3ba"), 0.5**0.5, 1, 3),
        (EMA(half_life=None, smoothing=0.8), 0.8, 1, 1),
        (EMA(half_life=None, smoothing=0.8, ema_start="0.5dur", update_interval="2ba"), 0.8, 4, 2),
    ],
)
def test_evaluation_sees_the_moving_average_and_training_does_not(
    ema: EMA, smoothing: float, first: int, every: int
) -> None:
    expected = weights_at([], Event.BATCH_END, max_duration="8ba")
    settings = {"max_duration": "8ba", "eval_dataloader": BATCHES[:1], "eval_interval": "8ba"}
    seen = weights_at([ema], Event.BATCH_END, Event.EVAL_START, Event.EVAL_AFTER_ALL, **settings)
    average, after = seen.pop(-2), seen.pop(-1)
    assert all(same_bits(*pair) for pair in zip(seen, expected, strict=True))
    assert same_bits(after, expected[-1])
    torch.testing.assert_close(average, moving_average(expected, smoothing, first, every))


def test_the_moving_average_can_follow_the_ends_of_epochs() -> None:
    expected = weights_at([], Event.EPOCH_END, max_duration="3ep")
    settings = {"max_duration": "3ep", "eval_dataloader": BATCHES[:1], "eval_interval": "3ep"}
    (average,) = weights_at([EMA(half_life="1ep")], Event.EVAL_START, **settings)
    torch.testing.assert_close(average, moving_average(expected, 0.5, 1, 1))


def test_until_it_begins_there_is_no_moving_average() -> None:
    settings = {"eval_dataloader": BATCHES[:1], "eval_interval": "1ba"}
    seen = weights_at([EMA(ema_start="3ba")], Event.BATCH_END, Event.EVAL_START, **settings)
    assert [same_bits(*seen[at : at + 2]) for at in (0, 2, 4, 6)] == [True, True, True, False]


def test_statistics_of_batch_normalization_are_averaged_and_counts_are_not() -> None:
    means: list[Tensor] = []
    counts: list[int] = []
    ema = EMA(half_life=None, smoothing=0.8)
    watch = [
        note(means, lambda state: state.model.module[1].running_mean.clone(), Event.BATCH_END, Event.EVAL_START),
        note(counts, lambda state: int(state.model.module[1].num_batches_tracked), Event.EVAL_START),
    ]
    train(BATCHES, [ema, *watch], normalized, eval_dataloader=BATCHES[:1], eval_interval="4ba")
    expected = moving_average([[mean] for mean in means[:-1]], 0.8, 1, 1)
    torch.testing.assert_close([means[-1]], expected)
    assert counts == [4]


def test_evaluations_and_predictions_by_themselves_use_the_moving_average() -> None:
    model = Classifier(nn.Linear(8, 4))
    seen: list[list[Tensor]] = []
    watch = note(seen, weights_of, Event.EVAL_BATCH_START)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"max_duration": "4ba", "seed": 1, "publish": False, "progress_bar": False}
    ema = EMA(half_life="2ba")
    with Trainer(model, BATCHES, optimizers=sgd, algorithms=[ema, watch], **settings) as trainer:
        trainer.fit()
        trained, average = weights_of(trainer.state), ema.state_dict()["average"]
        average = {name.removeprefix("module."): value.clone() for name, value in average.items()}
        trainer.eval(BATCHES[:1])
        (outputs,) = trainer.predict(BATCHES[:1])
    assert same_bits(seen[0], [average["weight"], average["bias"]])
    assert not same_bits(seen[0], trained)
    assert torch.equal(outputs, nn.functional.linear(BATCHES[0][0], average["weight"], average["bias"]))
    assert same_bits(weights_of(trainer.state), trained)


def test_the_average_of_another_model_is_refused() -> None:
    ema, other = EMA(), EMA()
    train(BATCHES, ema)
    train(BATCHES, other, normalized)
    with pytest.raises(CheckpointError):
        ema.load_state_dict(other.state_dict())


def mean_of(weights: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack(several).mean(0) for several in zip(*weights, strict=True)]


@pytest.mark.parametrize(
    ("swa", "duration", "event", "taken"),
    [
        (SWA("0.5dur", "1dur"), "4ep", Event.EPOCH_END, [2, 3, 4]),
        (SWA("3ba", "9ba", "3ba"), "9ba", Event.BATCH_END, [3, 6, 9]),
        # No epoch ends once it is time: the end of the training does it.
        (SWA("0.3dur"), "10ba", Event.EPOCH_END, [1, 2]),
    ],
)
def test_the_model_ends_as_the_mean_of_its_weights(swa: SWA, duration: str, event: Event, taken: list[int]) -> None:
    weights = weights_at([], event, max_duration=duration)
    state = train(BATCHES, swa, max_duration=duration)
    torch.testing.assert_close(weights_of(state), mean_of([weights[number - 1] for number in taken]))


def test_training_continues_from_the_mean() -> None:
    weights = weights_at([], Event.BATCH_END, max_duration="6ba")
    swa = SWA("2ba", "4ba", "1ba")
    seen = weights_at([swa], Event.BATCH_START, Event.BATCH_END, max_duration="6ba")
    after = seen[1::2]
    assert all(same_bits(*pair) for pair in zip(after[:3], weights[:3], strict=True))
    torch.testing.assert_close(after[3], mean_of(weights[1:4]))
    assert same_bits(seen[8], after[3])
    assert not same_bits(after[5], after[3])
    assert swa.state_dict() == {"is_over": True}


def test_statistics_of_batch_normalization_are_those_of_the_averaged_weights() -> None:
    momenta: list[Any] = []
    watch = note(momenta, lambda state: (state.model.module[1].momentum, state.model.training), Event.FIT_END)
    settings = {"max_duration": "4ep", "device_train_microbatch_size": 3}
    state = train(BATCHES, [SWA("0.5dur", "1dur"), watch], normalized, **settings)
    layers = state.model.module
    with torch.no_grad():
        outputs = [layers[0](part) for inputs, _ in BATCHES for part in inputs.split(3)]
    torch.testing.assert_close(layers[1].running_mean, torch.stack([one.mean(0) for one in outputs]).mean(0))
    torch.testing.assert_close(layers[1].running_var, torch.stack([one.var(0) for one in outputs]).mean(0))
    assert momenta == [(0.1, True)]


@pytest.mark.parametrize("strategy", ["linear", "cos"])
def test_learning_rates_go_where_they_should_whatever_the_schedulers_say(strategy: str) -> None:
    model = Classifier(nn.Linear(8, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    rates: list[float] = []
    watch = note(rates, lambda state: state.optimizers[0].param_groups[0]["lr"], Event.BEFORE_TRAIN_BATCH)
    swa = SWA("3ba", "9ba", "1ba", schedule_swa_lr=True, anneal_strategy=strategy, anneal_steps=4, swa_lr=0.02)
    settings: dict[str, Any] = {"max_duration": "9ba", "seed": 1, "publish": False, "progress_bar": False}
    settings |= {"schedulers": ExponentialLR(sgd, 0.9), "step_schedulers_every_batch": True}
    with Trainer(model, BATCHES, optimizers=sgd, algorithms=[swa, watch], **settings) as trainer:
        trainer.fit()

    expected = [0.1 * 0.9**batch for batch in range(3)]
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1 * 0.9**3)
    annealing = SWALR(other, swa_lr=0.02, anneal_epochs=4, anneal_strategy=strategy)
    for _ in range(6):
        other.step()
        annealing.step()
        expected.append(other.param_groups[0]["lr"])
    assert rates == pytest.approx(expected)


def test_no_pass_over_the_data_is_begun_where_it_would_disturb_the_epoch() -> None:
    class Resumable(DataLoader[Any]):
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    rows = Resumable(list(zip(*BATCHES[0], strict=True)), batch_size=3)
    train(rows, SWA("1ba", "2ba", "1ba"))
    train(rows, SWA("0.2dur", "1dur"), normalized, max_duration="1ep")
    with pytest.raises(ConfigurationError):
        train(rows, SWA("1ba", "2ba", "1ba"), normalized)


def gradients_before_and_after(clipping: GradientClipping) -> list[tuple[list[Tensor], list[Tensor]]]:
    def look(state: State) -> list[Tensor]:
        return [parameter.grad.clone() for parameter in state.model.parameters()]

    before: list[list[Tensor]] = []
    after: list[list[Tensor]] = []
    # In front of the batch's end, algorithms run in reverse order.
    watch = [note(before, look, Event.AFTER_TRAIN_BATCH), note(after, look, Event.BATCH_END)]
    train(BATCHES, [clipping, *watch], normalized)
    return list(zip(before, after, strict=True))


def test_the_norm_of_all_gradients_is_limited() -> None:
    for before, after in gradients_before_and_after(GradientClipping("norm", 0.1)):
        norm = torch.cat([one.flatten() for one in before]).norm()
        assert norm > 0.1
        torch.testing.assert_close(after, [one * 0.1 / norm for one in before], rtol=1e-4, atol=1e-7)
    for before, after in gradients_before_and_after(GradientClipping("norm", 100)):
        assert same_bits(before, after)


def test_each_number_is_limited() -> None:
    for before, after in gradients_before_and_after(GradientClipping("value", 0.01)):
        assert same_bits(after, [one.clamp(-0.01, 0.01) for one in before])


def test_gradients_of_units_are_limited_by_their_weights() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight[0] = 0
    state = State(model=model, device=None, seed=1, run_name="r")  # type: ignore[arg-type]
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter) * 0.05
    model[2].weight.grad[1] = 0
    expected = []
    for parameter in model.parameters():
        rows = parameter.detach().flatten(1) if parameter.ndim > 1 else parameter.detach()[None]
        gradients = parameter.grad.reshape(rows.shape)
        limits = 0.1 * rows.norm(dim=1).clamp(min=1e-3)
        scale = (limits / gradients.norm(dim=1)).clamp(max=1)
        expected.append((gradients * scale[:, None]).reshape(parameter.shape))
    GradientClipping("adaptive", 0.1).apply(Event.AFTER_TRAIN_BATCH, state, None)  # type: ignore[arg-type]
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)
    assert model[0].weight.grad[0].any()


def sharpness_aware_weights(rho: float, interval: int) -> list[list[Tensor]]:
    """Return the algorithm of the paper, written out; SGD with a rate of 0.1."""
    torch.manual_seed(3)
    weight, bias = nn.Linear(8, 4).parameters()
    steps = []
    for number, (inputs, targets) in enumerate(BATCHES, 1):
        gradients = torch.autograd.grad(cross_entropy(inputs @ weight.T + bias, targets), (weight, bias))
        if number % interval == 0:
            norm = torch.sqrt(sum((one**2).sum() for one in gradients))
            near = [one + rho * gradient / norm for one, gradient in zip((weight, bias), gradients, strict=True)]
            gradients = torch.autograd.grad(cross_entropy(inputs @ near[0].T + near[1], targets), near)
        with torch.no_grad():
            weight -= 0.1 * gradients[0]
            bias -= 0.1 * gradients[1]
        steps.append([weight.detach().clone(), bias.detach().clone()])
    return steps


@pytest.mark.parametrize(("interval", "microbatch_size"), [(1, 4), (2, None)])
def test_steps_are_sharpness_aware(interval: int, microbatch_size: int | None) -> None:
    sam = SAM(rho=0.5, interval=interval)
    seen = weights_at([sam], Event.BATCH_END, device_train_microbatch_size=microbatch_size)
    torch.testing.assert_close(seen, sharpness_aware_weights(0.5, interval))
    plain = weights_at([], Event.BATCH_END)
    assert same_bits(seen[0], plain[0]) == (interval == 2 and microbatch_size is None)
    assert (seen[-1][0] - plain[-1][0]).abs().max() > 1e-3


def test_sharpness_needs_gradients_that_can_be_computed_twice() -> None:
    with pytest.raises(ConfigurationError):
        train(BATCHES, SAM(), precision="amp_fp16")
