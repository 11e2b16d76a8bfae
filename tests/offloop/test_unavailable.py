"""What a run's source never gives: consumers that wait for it say so at once, live, late and in a replay."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from offloop.bus import ConfigurationError, Event, Publisher, Snapshot
from offloop.bus.cli.main import bus
from offloop.bus.types.source import Source
from offloop.consumers import Callback, ImageVisualizer, Logger, LRMonitor, StallMonitor, TrainerMetrics
from offloop.consumers.cli.attached import run_attached
from offloop.consumers.cli.main import consumer
from offloop.consumers.testing import replay

INFO = {
    "framework": {"name": "Foo", "version": "1.2"},
    "unavailable": {
        "events": [
            "eval_end",
            "before_forward",
            "after_loss",
            "before_loss",
            "after_train_batch",
            "eval_before_forward",
        ],
        "fields": {"gradient_norm": "Foo frees the gradients"},
    },
}


class Printer(Callback):
    """Handles every event there is."""

    def run_event(self, event: Event, state: Snapshot, logger: Logger) -> None:
        pass


class Evaluations(Callback):
    """Handles one event that never comes, and one that does."""

    fields = ("gradient_norm",)

    def eval_end(self, state: Snapshot, logger: Logger) -> None:
        pass

    def fit_start(self, state: Snapshot, logger: Logger) -> None:
        pass


def train(name: str = "r", info: dict[str, Any] = INFO) -> Path:
    with Publisher(name, info=info) as publisher:
        for batch in range(1, 4):
            publisher.publish(Event.BATCH_END, batch=batch, loss=1 / batch)
        return publisher.recording


def lines_about(err: str) -> list[str]:
    return [line for line in err.splitlines() if "never gives" in line]


def test_a_callback_that_waits_in_vain_is_named_once_in_one_line(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logged = replay([LRMonitor(), TrainerMetrics(), Printer(), Evaluations(), ImageVisualizer()], train())
    printer, evaluations, images = lines_about(capsys.readouterr().err)
    assert "Printer waits for before_forward, before_loss, after_loss and 2 more, which Foo 1.2" in printer
    assert "Evaluations waits for gradient_norm and eval_end, which Foo 1.2" in evaluations
    assert "(gradient_norm: Foo" in evaluations
    assert "ImageVisualizer waits for before_forward and eval_before_forward, which Foo 1.2" in images
    assert logged.statistics.source.fields == {"gradient_norm": "Foo frees the gradients"}


def test_a_callback_that_waits_for_any_sign_of_life_is_not_named(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = ["eval_batch_end", "predict_batch_end"]
    replay(StallMonitor(), train(info={**INFO, "unavailable": {"events": events, "fields": {}}}))
    assert lines_about(capsys.readouterr().err) == []


def test_a_consumer_that_can_get_nothing_says_so(runs_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay([ImageVisualizer(), ImageVisualizer()], train())
    assert [line.split(" waits")[0] for line in lines_about(capsys.readouterr().err)[:2]] == [
        "callback ImageVisualizer",
        "callback ImageVisualizer#2",
    ]
    replay(ImageVisualizer(), train("s"))
    assert (
        "no callback of this consumer gets anything from run s: 'offloop show s --details' lists"
        in capsys.readouterr().err
    )
    replay([ImageVisualizer(), LRMonitor()], train("t"))
    assert "no callback" not in capsys.readouterr().err


def test_it_is_said_while_the_training_is_at_work_and_to_who_comes_late(
    runs_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Leaves(Evaluations):
        """Has read what was said by the time of its first event."""

        def fit_start(self, state: Snapshot, logger: Logger) -> None:
            said.append(capsys.readouterr().err)
            publisher.close()

    said: list[str] = []
    with Publisher("r", info=INFO) as publisher:
        publisher.publish(Event.FIT_START)
        assert run_attached(str(publisher.run_dir), [Leaves()], []) == 0
    assert "callback Leaves waits for gradient_norm and eval_end, which Foo 1.2 never gives" in said[0]


def test_the_command_says_it_and_not_at_the_end_that_a_field_might_have_come(runs_dir: Path) -> None:
    train()
    done = CliRunner().invoke(consumer, ["--last", "--callbacks", "nan,images"])
    assert done.exit_code == 0, done.output
    assert "callback NaNMonitor waits for gradient_norm, which Foo 1.2 never gives (gradient_norm: Foo" in done.output
    assert "the field 'gradient_norm'" not in done.output
    assert "the field 'inputs'" in done.output


def test_show_has_the_framework_and_what_it_never_gives(runs_dir: Path) -> None:
    recording = train()
    for name in ("r", str(recording)):
        shown = CliRunner().invoke(bus, ["show", name, "--details"]).output
        assert "framework" in shown
        assert "Foo 1.2\n" in shown
        assert "after_train_batch, eval_before_forward, eval_end, gradient_norm (Foo frees the gradients)" in shown
        described = json.loads(CliRunner().invoke(bus, ["show", "--json", name]).output)["details"]
        assert described["unavailable"]["fields"] == INFO["unavailable"]["fields"]
    train("s", {})
    assert "framework" not in CliRunner().invoke(bus, ["show", "s", "--details"]).output


def test_a_loop_that_states_it_wrongly_is_told(runs_dir: Path) -> None:
    with pytest.raises(ConfigurationError):
        Publisher("r", info={"unavailable": {"events": ["eval_ends"]}})
    assert not (runs_dir / "r").exists()


VALUES = st.recursive(
    st.none() | st.integers() | st.floats() | st.text() | st.binary() | st.sampled_from(["eval_end", "Foo"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(), inner, max_size=4),
    max_leaves=8,
)
STATED = st.fixed_dictionaries(
    {},
    optional={
        "framework": VALUES | st.fixed_dictionaries({}, optional={"name": VALUES, "version": VALUES}),
        "unavailable": VALUES | st.fixed_dictionaries({}, optional={"events": VALUES, "fields": VALUES}),
    },
)


@given(STATED)
def test_what_is_malformed_in_a_description_is_left_out(stated: dict[str, Any]) -> None:
    source = Source.of(stated)
    assert isinstance(source.name, str)
    assert all(isinstance(event, Event) for event in source.events)
    assert all(isinstance(one, str) for pair in source.fields.items() for one in pair)
    json.dumps(source.describe())
