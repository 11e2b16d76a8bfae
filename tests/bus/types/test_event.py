import json
import re

import pytest
from helpers import REFERENCE

from offloop.bus.errors import ConfigurationError, OffloopError
from offloop.bus.types.event import Event

GOLDEN = json.loads((REFERENCE / "events.json").read_text())


def test_the_40_events_come_in_the_order_of_the_reference():
    assert [event.name for event in Event] == [row["name"] for row in GOLDEN["events"]]


def test_an_event_has_the_properties_of_the_reference():
    for row in GOLDEN["events"]:
        event = Event[row["name"]]
        found = event.value, event.is_eval, event.is_predict
        assert found == (row["value"], row["is_eval"], row["is_predict"])


# What we decide otherwise: a hash that finds the plain value too, and an error that helps.
OURS = {
    "hash == hash of value": True,
    "Event('nope')": "ConfigurationError: 'nope' is not an event: names look like batch_end or epoch_start; "
    "your own events begin with '@', tables with '#'",
    "Event('')": "ConfigurationError: '' is not an event: names look like batch_end or epoch_start; "
    "your own events begin with '@', tables with '#'",
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


def test_an_event_is_found_by_value_and_name_in_any_case():
    for event in Event:
        for name in (event.name, event.value, event.value.title()):
            assert Event(name) is event
            assert event == name
            assert name == event
            assert (event != name) is False


@pytest.mark.parametrize(
    ("wrong", "meant"), [("EPOCHEND", "epoch_end"), ("fit", "fit_end"), (5, "5"), (b"batch_end", "b'")]
)
def test_a_wrong_name_is_refused_with_what_comes_close(wrong, meant):
    with pytest.raises(ConfigurationError, match=meant):
        Event(wrong)


def test_the_documentation_places_every_event():
    described = re.findall(r"^ +([A-Z_]+)(?: +#.*)?$", Event.__doc__, re.MULTILINE)
    assert sorted(described) == sorted(event.name for event in Event)
