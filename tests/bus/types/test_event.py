import copy
import json
import pickle
import re

import pytest
from helpers import REFERENCE

from offloop.bus.errors import ConfigurationError, OffloopError
from offloop.bus.types.event import Event

GOLDEN = json.loads((REFERENCE / "events.json").read_text())


def test_the_40_events_come_in_the_order_of_the_reference():
    assert [event.name for event in Event] == [row["name"] for row in GOLDEN["events"]]


@pytest.mark.parametrize("row", GOLDEN["events"], ids=lambda row: row["name"])
def test_an_event_has_the_properties_of_the_reference(row):
    event = Event[row["name"]]
    assert event.value == row["value"]
    assert event.is_before_event is row["is_before"]
    assert event.is_after_event is row["is_after"]
    assert event.is_eval is row["is_eval"]
    assert event.is_predict is row["is_predict"]
    assert event.canonical_name == row["canonical_name"]


# What we decide otherwise: a hash that finds the plain value too, and an error that helps.
OURS = {
    "hash == hash of value": True,
    "Event('nope')": "ConfigurationError: 'nope' is not an event: names look like batch_end or epoch_start",
    "Event('')": "ConfigurationError: '' is not an event: names look like batch_end or epoch_start",
}


@pytest.mark.parametrize("expression", GOLDEN["str_enum"])
def test_an_event_is_a_string_as_in_the_reference(expression):
    code = expression.replace("hash == hash of value", "hash(Event.BATCH_END) == hash('batch_end')")
    try:
        result = eval(code)
    except OffloopError as error:
        result = f"{type(error).__name__}: {error}"
    expected = OURS.get(expression, GOLDEN["str_enum"][expression])
    assert (repr(result) if isinstance(result, Event) else result) == expected


@pytest.mark.parametrize("event", Event)
def test_an_event_is_found_by_value_and_name_in_any_case(event):
    for name in (event.name, event.value, event.value.title()):
        assert Event(name) is event
        assert event == name
        assert name == event
        assert (event != name) is False


def test_the_older_names_are_the_same_members():
    assert Event.TRAINING_START is Event.FIT_START
    assert Event.TRAINING_END is Event.FIT_END
    assert Event("training_start") is Event("TRAINING_START") is Event.FIT_START
    assert Event.FIT_END == "training_end"


@pytest.mark.parametrize("other", ["batch", "batch_end ", 3, None, Event.BATCH_START])
def test_an_event_differs_from_everything_else(other):
    event = Event.BATCH_END
    assert (event == other) is False
    assert (event != other) is True


def test_plain_values_are_found_among_events():
    assert "batch_end" in {Event.BATCH_END}
    assert {"batch_end": 1}[Event.BATCH_END] == 1
    assert "batch_start" not in {Event.BATCH_END}


def test_the_hash_costs_no_python_call():
    assert Event.__hash__ is str.__hash__


@pytest.mark.parametrize("event", Event)
def test_copies_are_the_same_member(event):
    assert pickle.loads(pickle.dumps(event)) is event
    assert copy.deepcopy(event) is copy.copy(event) is event


@pytest.mark.parametrize(("wrong", "meant"), [("bach_end", "batch_end"), ("EPOCHEND", "epoch_end"), ("fit", "fit_end")])
def test_a_wrong_name_is_refused_with_what_comes_close(wrong, meant):
    with pytest.raises(ConfigurationError, match=rf"'{wrong}' is not an event: did you mean .*\b{meant}\b"):
        Event(wrong)


@pytest.mark.parametrize("nonsense", [5, None, b"batch_end"])
def test_what_is_no_string_is_no_event(nonsense):
    with pytest.raises(ConfigurationError, match=re.escape(repr(nonsense))):
        Event(nonsense)


def test_the_documentation_places_every_event():
    described = re.findall(r"^ +([A-Z_]+)(?: +#.*)?$", Event.__doc__, re.MULTILINE)
    assert sorted(described) == sorted(event.name for event in Event)
