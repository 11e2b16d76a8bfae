"""Going on: from checkpoints with iterations, dataloaders that know their place, several fits, and what they change."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gold import GoldMLP, gold_data
from helpers import wait_for
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import Act, fitted, gold_trainer

from offloop.bus.errors import CheckpointError, ConfigurationError
from offloop.bus.runs.directory import find_run
from offloop.bus.types.event import Event
from offloop.trainer import Classifier, DataSpec, Evaluator, RankBatchSampler, State, Trainer
from offloop.trainer.schedulers import CosineAnnealingScheduler


def events_of(*events: Event) -> tuple[list[tuple[str, int, int]], Act]:
    """Rows of event, iteration and batch, and the algorithm that writes them down."""
    rows: list[tuple[str, int, int]] = []

    def note(event: Event, state: State, logger: object) -> None:
        rows.append((event.value, int(state.timestamp.iteration), int(state.timestamp.batch)))

    return rows, Act(note, *events)


ITERATIONS = (Event.ITERATION_START, Event.ITERATION_END, Event.EPOCH_START, Event.EPOCH_END)
TOKENS = DataSpec([gold_data("train", 6)] * 4, get_num_tokens_in_batch=lambda batch: 6)


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_duration": "3iter", "iteration_length": "1ep"},
        {"max_duration": "3iter", "iteration_length": "12tok", "train_dataloader": TOKENS},
    ],
)
def test_iterations_resume_where_they_were(arguments: dict[str, Any], tmp_path: Path) -> None:
    expected, note = events_of(*ITERATIONS)
    trainer = fitted(save_folder=tmp_path, save_interval="1ba", algorithms=note, **arguments)
    batches = int(trainer.state.timestamp.batch)
    assert [row[0] for row in expected].count("iteration_start") == 3
    assert [row[0] for row in expected].count("iteration_end") == 3
    for batch in range(1, batches):
        (checkpoint,) = tmp_path.glob(f"ep*-ba{batch}-*")
        rows, note = events_of(*ITERATIONS)
        trainer = fitted(load_path=checkpoint, algorithms=note, **arguments)
        assert trainer.state.timestamp.values[:3] == (3, batches // 4, batches), batch
        rest = [row for row in expected if row[2] > batch or (row[2] == batch and row in rows)]
        assert rows == rest, batch


@pytest.mark.parametrize("event", [Event.ITERATION_START, Event.BATCH_CHECKPOINT])
def test_a_training_that_is_stopped_late_is_saved(event: Event, tmp_path: Path) -> None:
    def stop(event: Event, state: State, logger: object) -> None:
        if int(state.timestamp.batch) == 2:
            state.stop_training()

    fitted(train_dataloader=TOKENS, iteration_length="12tok", save_folder=tmp_path, algorithms=Act(stop, event))
    assert sorted(path.name for path in tmp_path.glob("ep*")) == ["ep0-ba2-rank0.safetensors"]


def test_a_duration_in_tokens_without_tokens_is_refused() -> None:
    for arguments in ({"max_duration": "100tok"}, {"max_duration": "2iter", "iteration_length": "100tok"}):
        with pytest.raises(ConfigurationError, match="100tok"):
            fitted(**arguments)


class Placed:
    """A dataloader that knows its place, and shuffles by an epoch of its own."""

    def __init__(self) -> None:
        self.epoch = self.place = 0
        self.orders: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(4, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.place < 4:
            index = order[self.place]
            self.place += 1
            self.orders.append(index)
            yield gold_data("train", 24)[0][index * 6 :][:6], gold_data("train", 24)[1][index * 6 :][:6]
        self.epoch, self.place = self.epoch + 1, 0

    def __len__(self) -> int:
        return 4

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


def test_a_dataloader_with_a_state_resumes_from_it(tmp_path: Path) -> None:
    data = Placed()
    for interval in ("1ba", "1ep"):
        trainer = fitted(train_dataloader=data, save_folder=tmp_path, save_interval=interval, save_overwrite=True)
        data = Placed() if interval == "1ba" else data
    expected = {name: value.clone() for name, value in trainer.state.model.state_dict().items()}
    for batch in (2, 4, 5, 7):
        (checkpoint, *_) = tmp_path.glob(f"ep*-ba{batch}-*")
        again = Placed()
        with gold_trainer(train_dataloader=again, load_path=checkpoint) as trainer:
            # Before it goes on, a checkpoint says what the one that it came from said.
            trainer.save_checkpoint(tmp_path / "again.safetensors")
            trainer.fit()
        assert again.orders == data.orders[batch:], checkpoint
        assert all(torch.equal(value, expected[name]) for name, value in trainer.state.model.state_dict().items())
        again = Placed()
        trainer = fitted(train_dataloader=again, load_path=tmp_path / "again.safetensors")
        assert again.orders == data.orders[batch:]


def test_resuming_with_a_dataloader_of_too_few_batches_is_refused(tmp_path: Path) -> None:
    fitted(save_folder=tmp_path, save_interval="1ba", max_duration="3ba")
    with pytest.raises(CheckpointError):
        fitted(12, load_path=tmp_path)


def test_the_size_of_microbatches_that_was_found_is_kept(tmp_path: Path) -> None:
    class Greedy(GoldMLP):
        sizes: list[int]

        def forward(self, batch: Any) -> Any:
            self.sizes.append(len(batch[0]))
            if len(batch[0]) > 4:
                raise torch.OutOfMemoryError
            return super().forward(batch)

    def train(**arguments: Any) -> list[int]:
        model = Greedy()
        model.sizes = []
        fitted(model=model, device_train_microbatch_size="auto", **arguments)
        return model.sizes

    # The checkpoint is found under names of one's own, too.
    names = {"save_filename": "at-{batch}.bin", "save_latest_filename": "newest"}
    assert train(max_duration="2ba", save_folder=tmp_path, **names) == [6, 3, 3, 3, 3]
    assert train(max_duration="3ba", load_path=tmp_path, **names) == [3, 3]


def test_a_schedule_without_a_duration_resumes(tmp_path: Path) -> None:
    rates: list[float] = []
    note = Act(
        lambda event, state, logger: rates.append(state.optimizers[0].param_groups[0]["lr"]), Event.BEFORE_TRAIN_BATCH
    )

    def trainer(**arguments: Any) -> Trainer:
        return gold_trainer(schedulers=CosineAnnealingScheduler("8ba"), max_duration=None, algorithms=note, **arguments)

    with trainer(save_folder=tmp_path, save_interval="1ba") as one:
        one.fit(duration="8ba")
    expected, rates[:] = rates[:], []
    with trainer(load_path=tmp_path / "ep0-ba3-rank0.safetensors") as one:
        one.fit(duration="5ba")
    assert rates == expected[3:]


def test_the_order_of_a_dataloader_given_to_fit_resumes(tmp_path: Path) -> None:
    data = TensorDataset(*gold_data("train", 24))
    seen: list[Any] = []
    note = Act(lambda event, state, logger: seen.append(state.batch[0]), Event.BATCH_START)

    def train(duration: str, **arguments: Any) -> None:
        loader = DataLoader(data, batch_sampler=RankBatchSampler(data, 6, shuffle=True))
        with gold_trainer(
            train_dataloader=None, seed=None, max_duration=duration, algorithms=note, **arguments
        ) as trainer:
            trainer.fit(train_dataloader=loader)

    train("6ba", save_folder=tmp_path, save_interval="1ba")
    expected, seen[:] = seen[5:], []
    train("6ba", load_path=tmp_path / "ep1-ba5-rank0.safetensors")
    assert len(seen) == 1
    assert torch.equal(seen[0], expected[0])


def test_the_random_numbers_of_an_evaluators_dataloader_resume(tmp_path: Path) -> None:
    values: list[Any] = []
    note = Act(lambda event, state, logger: values.append(state.eval_metric_values["eval"]), Event.EVAL_END)

    def train(**arguments: Any) -> None:
        data = TensorDataset(*gold_data("eval_a", 30))
        loader = DataLoader(data, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(5))
        evaluators = Evaluator("eval", loader, eval_interval="1ba", subset_num_batches=1)
        fitted(eval_dataloader=evaluators, algorithms=note, **arguments)

    train(save_folder=tmp_path, save_interval="1ba")
    expected, values[:] = values[:], []
    train(load_path=tmp_path / "ep0-ba3-rank0.safetensors")
    assert values == expected[3:]


def test_a_standalone_evaluation_does_not_affect_the_training() -> None:
    rows, note = events_of(Event.EVAL_BEFORE_ALL)
    own = Evaluator("eval", [gold_data("eval_a", 6)], metric_names=["CrossEntropy"])
    with gold_trainer(eval_dataloader=own, max_duration="3ba", eval_interval="10ba", algorithms=note) as trainer:
        trainer.fit()
        values = trainer.state.eval_metric_values
        other = trainer.eval([gold_data("eval_b", 6)])
        assert other["eval"].keys() == {"MulticlassAccuracy", "CrossEntropy"}
        assert trainer.state.eval_metric_values == values
        assert values["eval"].keys() == {"CrossEntropy"}
        trainer.eval()
        trainer.fit(duration="1ba")
        assert trainer.state.eval_metric_values["eval"].keys() == {"CrossEntropy"}
    assert [row[2] for row in rows] == [3, 4]


def test_parts_of_the_model_stay_in_the_mode_that_they_were_in() -> None:
    model = Classifier(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)))
    modes: list[bool] = []

    def note(event: Event, state: State, logger: object) -> None:
        if event is Event.FIT_START:
            model.module[1].eval()
        modes.append(model.module[1].training or not model.module[0].training)

    with gold_trainer(
        model=model,
        eval_dataloader=[gold_data("eval_a", 6)],
        eval_interval="1ba",
        algorithms=Act(note, Event.FIT_START, Event.BEFORE_FORWARD),
    ) as trainer:
        trainer.fit()
        trainer.predict([gold_data("eval_a", 6)])
        assert not model.module[1].training
    assert not any(modes)


def test_a_call_of_fit_that_is_refused_changes_nothing() -> None:
    def stop(event: Event, state: State, logger: object) -> None:
        state.stop_training()

    stopper = Act(stop, Event.BATCH_START)
    with gold_trainer(max_duration="2ep", algorithms=stopper) as trainer:
        trainer.fit()
        for arguments in ({"duration": "bogus"}, {"train_dataloader": 3}, {"eval_interval": -1}):
            with pytest.raises(ValueError, match=r".+"):
                trainer.fit(**arguments)
        assert trainer.state.stopped
        trainer.state.algorithms.remove(stopper)
        trainer.fit()
        assert int(trainer.state.timestamp.batch) == 8


def test_restarting_in_a_folder_with_checkpoints_is_refused_and_the_trainer_stays_open(tmp_path: Path) -> None:
    with gold_trainer(save_folder=tmp_path) as trainer:
        trainer.fit()
        with pytest.raises(ConfigurationError):
            trainer.fit(reset_time=True)
        trainer.fit(duration="1ba")


@pytest.mark.slow
@pytest.mark.parametrize("publish", [False, True])
def test_a_trainer_that_is_dropped_is_gone_at_once_and_ends_its_run(
    publish: bool, tmp_path: Path, runs_dir: Path
) -> None:
    gc.collect()
    gc.disable()
    try:
        trainer = gold_trainer(
            save_folder=tmp_path,
            schedulers=CosineAnnealingScheduler(),
            eval_dataloader=[gold_data("eval_a", 6)],
            publish=publish,
            run_name="dropped",
        )
        trainer.fit()
        model = weakref.ref(trainer.state.model)
        del trainer
        assert model() is None
    finally:
        gc.enable()
    if publish:
        wait_for(lambda: find_run("dropped").status == "finished", "the end of the run")
