"""The registry of fields: what a training can be asked for, and how more is added."""

from typing import Any

import pytest
from field_stream import Stream, asking, train
from training import Act

from offloop.bus.errors import ConfigurationError
from offloop.bus.types.event import Event
from offloop.trainer import State
from offloop.trainer.fields.registry import BUILT_IN, check_fields


def queue_length(state: State) -> int:
    """Requests that wait.

    More of it."""
    return 7


def test_the_registry_has_what_is_built_in_and_what_is_added() -> None:
    registry = check_fields(None)
    assert dict(registry) == BUILT_IN
    registry.register("queue", queue_length, events=["batch_end", Event.EPOCH_END], unit="requests", shape="number")
    assert list(registry) == [*BUILT_IN, "queue"]
    assert len(registry) == len(BUILT_IN) + 1
    field = registry["queue"]
    assert (field.events, field.unit, field.shape) == ({Event.BATCH_END, Event.EPOCH_END}, "requests", "number")
    assert field.description == "Requests that wait."
    assert "queue" not in check_fields(None)


def test_every_field_says_what_it_is_and_where_it_exists() -> None:
    registry = check_fields({"queue": queue_length})
    registry.register("at_end", lambda state: 1, events=["fit_end"], unit="apples", description="what is left")
    lines = {line.split()[0]: line for line in registry.listing()}
    assert list(lines) == list(registry)
    assert lines["at_end"].split() == ["at_end", "what", "is", "left", "(apples)", "[fit_end]"]
    assert lines["queue"].split() == ["queue", "Requests", "that", "wait."]
    assert lines["gradient_norm"].endswith("(number, L2 norm) [after_train_batch, batch_end]")
    assert all(field.description and field.shape for field in BUILT_IN.values())
    assert max(map(len, lines.values())) <= 200


def test_a_field_that_is_registered_while_the_training_runs_is_there_at_the_next_event(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = check_fields(None)
    monkeypatch.setattr("offloop.trainer.stream.run_stream.check_fields", lambda given: registry)

    def register(event: Event, state: State, logger: object) -> None:
        if state.timestamp.batch == 3:
            registry.register("late", lambda state: int(state.timestamp.batch))

    stream = Stream(asking(1, field="late"))
    train(monkeypatch, stream, 6, algorithms=[Act(register, Event.AFTER_TRAIN_BATCH)])
    assert [fields["late"] for _, _, fields in stream.sent if "late" in fields] == [4, 5, 6]
    assert stream.batches_with("late") == [4, 5, 6]


@pytest.mark.parametrize(
    "arguments",
    [{"name": "_own"}, {"name": "weights"}, {"name": "given"}, {"events": "batch_end"}, {"events": []}, {"unit": 3}],
    ids=str,
)
def test_what_cannot_be_registered_is_refused(arguments: dict[str, Any]) -> None:
    registry = check_fields({"given": queue_length})
    given = {"name": "own", "compute": queue_length, **arguments}
    with pytest.raises(ConfigurationError):
        registry.register(given.pop("name"), given.pop("compute"), **given)
    assert list(registry) == [*BUILT_IN, "given"]
