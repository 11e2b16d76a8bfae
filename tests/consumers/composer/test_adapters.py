"""Callbacks that were written for MosaicML Composer run in a consumer, with what a snapshot offers."""

import json
import math
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from commands import Run, command
from consumers_stream import Collector, batch_end, record_run, snapshots_of_training
from paths import ROOT

from offloop.bus.errors import ConfigurationError, FieldNotAvailableError, FrozenSnapshotError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Time, Timestamp
from offloop.consumers import Runner
from offloop.consumers.cli.main import main
from offloop.consumers.cli.registry import CALLBACKS
from offloop.consumers.composer.adapter import AdaptedCallback, stand_in
from offloop.consumers.composer.state import ComposerState

EXAMPLES = ROOT / "examples"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("sys.path", [*sys.path])

    def write_file(code: str, name: str = "theirs.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(code))
        return path

    return write_file


@pytest.fixture
def consumer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setattr("sys.path", [*sys.path])
    return command("consumer", main, monkeypatch, capsys)


# -- with the command -------------------------------------------------------------------------------------------------


def test_the_unchanged_example_runs_in_a_consumer(consumer: Run, runs_dir: Path) -> None:
    run = record_run(runs_dir, "done", snapshots_of_training(max_duration="8ba", world_size=2))
    name = f"{EXAMPLES / 'composer_callback.py'}:Milestones"
    done = consumer("--replay", run, "--callbacks", name, "--log", "jsonl", "-o", "Milestones.interval=4ba")
    assert done.code == 0, done.err
    assert done.out == "accuracy of eval: 0.750 after 2ep\n"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss/exp"], row["progress"], row["samples_per_rank"]) for row in rows] == [
        (4, math.exp(1 / 4), 0.5, 16),
        (8, math.exp(1 / 8), 1.0, 32),
    ]


def test_an_example_that_needs_the_training_is_refused_with_the_alternative(consumer: Run, runs_dir: Path) -> None:
    run = record_run(runs_dir, "done", snapshots_of_training())
    name = f"{EXAMPLES / 'composer_callback_too_much.py'}:DeadUnits"
    done = consumer("--replay", run, "--callbacks", f"{name},lr")
    assert done.code == 1
    assert "examples/composer_callback_too_much.py:17)" in done.err
    assert "callback DeadUnits raised 8 times" in done.err
    assert "  lr  " in done.out


# -- what is offered --------------------------------------------------------------------------------------------------


def test_a_state_has_values_in_composers_forms() -> None:
    commands: list[Any] = []
    snapshot = Snapshot.build(
        Event.EVAL_END,
        on_command=lambda *command: commands.append(command),
        timestamp=Timestamp(epoch=1, batch=4),
        max_duration="2ep",
        loss=0.25,
        dataloader_label="eval",
        dataloader_len=3,
        train_metrics={"Accuracy": 0.5, "PerClass": [0.25, 0.75]},
        eval_metrics={"eval": {"Accuracy": 1}},
        gradient_norm=2.5,
    )
    state = ComposerState(snapshot)
    assert state.loss is not None
    assert (state.loss.item(), float(state.loss), state.loss.detach().cpu().item()) == (0.25, 0.25, 0.25)
    assert type(state.loss.item()) is float
    assert (int(state.timestamp.batch), state.timestamp.batch.value, state.timestamp.epoch == "1ep") == (4, 4, True)
    assert state.train_metrics["Accuracy"].compute().item() == 0.5
    assert state.train_metrics["PerClass"].compute() == [0.25, 0.75]
    assert state.eval_metrics["eval"]["Accuracy"].compute().item() == 1
    assert state.get_elapsed_duration().value == 0.5
    assert state.max_duration == Time(2, "ep")
    assert (state.dataloader_label, state.dataloader_len, state.run_name) == ("eval", Time(3, "ba"), "run")
    assert state.gradient_norm == 2.5
    empty = ComposerState(Snapshot.build(Event.INIT))
    assert (empty.loss, empty.dataloader_len, empty.max_duration, empty.train_metrics) == (None, None, None, {})
    with pytest.raises(FrozenSnapshotError):
        state.loss = 3  # type: ignore[assignment,misc]
    # That of the batch before is not that of a microbatch.
    with pytest.raises(FieldNotAvailableError):
        _ = ComposerState(Snapshot.build(Event.AFTER_LOSS, loss=0.5)).loss
    with pytest.raises(FieldNotAvailableError, match=r"state\.lr"):
        _ = state.optimizers
    assert not hasattr(state, "optimizers")
    state.stop_training()
    assert commands == [("stop", ())]


# -- loading ----------------------------------------------------------------------------------------------------------

THEIRS = """
    import composer
    import composer.utils.dist as same_dist
    from composer import Callback, Event, Logger, State, Time, TimeUnit, Timestamp
    from composer.core import Callback as SameCallback, ensure_time
    from composer.core.time import Time as SameTime
    from composer.loggers import LoggerDestination
    from composer.utils import dist

    assert composer.core.Callback is Callback is SameCallback and composer.Time is SameTime
    assert composer.utils.dist is dist is same_dist

    class Theirs(Callback):
        '''Counts batches.'''

        def __init__(self, interval: str | Time = "1ba", scale: float = 1.0):
            import composer.loggers
            super().__init__()
            self.interval = ensure_time(interval, TimeUnit.BATCH)
            self.scale = scale
            self.batches = 0

        def batch_end(self, state: State, logger: Logger) -> None:
            assert isinstance(state, State) and isinstance(state.timestamp, Timestamp)
            self.batches += 1
            logger.log_metrics({"batches": self.batches * self.scale, "ranks": dist.get_world_size()})
            dist.barrier()

        def close(self, state: State, logger: Logger) -> None:
            logger.log_metrics({"closed at": int(state.timestamp.batch)})

        def state_dict(self):
            return {"batches": self.batches}

        def load_state_dict(self, state):
            self.batches = state["batches"]
"""


def test_an_adapted_callback_keeps_its_options_and_docstring(write: Any) -> None:
    path = write(THEIRS)
    made = CALLBACKS.create(f"{path}:Theirs", {"interval": "5ba", "scale": "0.5"})
    assert isinstance(made, AdaptedCallback)
    assert (type(made).__name__, type(made).__doc__) == ("Theirs", "Counts batches.")
    assert (made.callback.interval, made.callback.scale) == (Time(5, "ba"), 0.5)
    assert made.demand().events == {Event.BATCH_END}
    with pytest.raises(ConfigurationError, match=r"Theirs.scale takes a number, not 'much'"):
        CALLBACKS.create(f"{path}:Theirs", {"scale": "much"})


def test_an_adapted_callback_is_closed_and_resumed_like_any_other(write: Any) -> None:
    made = CALLBACKS.create(f"{write(THEIRS)}:Theirs", {})
    made.load_state_dict({"batches": 10})
    seen = Collector()
    Runner([batch_end(1), batch_end(2, world_size=4)], [made], [seen]).run()
    assert [(row.step, row.metrics) for row in seen.rows] == [
        (1, {"batches": 11.0, "ranks": 1}),
        (2, {"batches": 12.0, "ranks": 4}),
        (2, {"closed at": 2}),
    ]
    assert made.state_dict() == {"batches": 12}


def test_the_stand_in_for_composer_is_removed_after_loading(write: Any) -> None:
    before = [*sys.meta_path]
    CALLBACKS.create(f"{write(THEIRS)}:Theirs", {})
    assert sys.meta_path == before
    assert [name for name in sys.modules if name.partition(".")[0] == "composer"] == []
    with pytest.raises(ModuleNotFoundError):
        import composer  # noqa: F401


@pytest.mark.parametrize("code", ["from composer import Trainer", "from composer.models import Model"])
def test_imports_beyond_callbacks_are_refused(write: Any, code: str) -> None:
    path = write(code)
    with pytest.raises(ConfigurationError, match="Error: "):
        CALLBACKS.find(f"{path}:Anything")


def test_composer_itself_is_used_where_it_is_installed(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "composer"
    package.mkdir()
    (package / "__init__.py").write_text("from composer.core import Callback, Event")
    methods = [*(event.value for event in Event), "run_event", "close", "post_close", "load_state_dict", "state_dict"]
    (package / "core.py").write_text(
        "import enum\n"
        f"Event = enum.Enum('Event', {{event.upper(): event for event in {[event.value for event in Event]}}})\n"
        f"Callback = type('Callback', (), dict.fromkeys({methods}, lambda self, *arguments: None))\n"
    )
    code = """
        from composer import Callback, Event
        class Theirs(Callback):
            def run_event(self, event, state, logger):
                assert isinstance(event, Event)
                if event is Event.BATCH_END:
                    logger.log_metrics({"loss": state.loss.item()})
        class Few(Callback):
            def eval_end(self, state, logger): pass
    """
    monkeypatch.syspath_prepend(tmp_path)
    path = write(code)
    try:
        seen = Collector()
        Runner([batch_end(2)], [CALLBACKS.create(f"{path}:Theirs", {})], [seen]).run()
        assert [row.metrics for row in seen.rows] == [{"loss": 0.5}]
        assert CALLBACKS.create(f"{path}:Few", {}).demand().events == {Event.EVAL_END}
        with stand_in():
            import composer  # type: ignore[import-not-found]

            assert Path(composer.__file__).parent == package
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "composer"]:
            del sys.modules[name]
