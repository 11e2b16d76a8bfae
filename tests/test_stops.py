"""What is known of a training that was stopped: how long it was to be, how far it got, and why it ended."""

from pathlib import Path

from training import Act, gold_trainer

from bus.event import Event
from bus.recording import Recording
from bus.time import Time
from consumers.dashboard.run_view import RunView
from trainer import Logger, State, Trainer


def stopping(at_batch: int) -> Act:
    """An algorithm that stops the training with that batch."""

    def act(event: Event, state: State, logger: Logger) -> None:
        if int(state.timestamp.batch) == at_batch:
            state.stop_training()

    return Act(act, Event.BATCH_END)


def stopped_run(tmp_path: Path, **arguments: object) -> Trainer:
    """A training of 9 epochs, of 4 batches each, that stops after 3 batches."""
    settings = {"algorithms": stopping(3), "max_duration": "9ep", "publish": True, "runs_dir": tmp_path}
    with gold_trainer(**(settings | arguments)) as trainer:
        trainer.fit()
    return trainer


def test_planned_and_reached_are_two_things_in_the_stream_and_on_dashboards(tmp_path: Path) -> None:
    trainer = stopped_run(tmp_path)
    assert trainer.state.max_duration == Time.from_timestring("3ba"), "as in the reference"
    assert trainer.state.planned_duration == Time.from_timestring("9ep")
    view = RunView("run")
    assert trainer.recording is not None
    for snapshot in Recording(trainer.recording):
        assert str(snapshot.planned_duration) == "9ep" or snapshot.event is Event.INIT
        view.see(snapshot)
    last = snapshot
    assert str(last.max_duration) == "3ba"
    progress = view.progress()
    assert (progress.max_duration, progress.batch) == ("9ep", 3)
    assert progress.fraction == 3 / 36
    assert progress.seconds_left == 0


def test_a_training_that_goes_on_after_a_stop_has_its_own_length(tmp_path: Path) -> None:
    trainer = gold_trainer(algorithms=stopping(3), max_duration="9ep", publish=True, runs_dir=tmp_path)
    trainer.fit()
    trainer.fit("2ba")
    assert trainer.state.planned_duration == trainer.state.max_duration == Time.from_timestring("5ba")
    trainer.close()
    assert trainer.recording is not None
    assert "planned_duration" not in list(Recording(trainer.recording))[-1].fields
