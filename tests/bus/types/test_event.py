import json
import re

import pytest
from helpers import REFERENCE

from offloop.bus.errors import ConfigurationError, OffloopError
from offloop.bus.types.event import Event

GOLDEN = json.loads((REFERENCE / "events.json").read_text())


def test_the_40_events_are_those_of_the_reference():
    properties = ("name", "value", "is_eval", "is_predict")
    expected = [[row[name] for name in properties] for row in GOLDEN["events"]]
    assert [[getattr(event, name) for name in properties] for event in Event] == expected


# What we decide otherwise: a hash that finds the plain value too, and an error that helps.
OURS = {
    "hash == hash of value": True,
    "Event('nope')": "ConfigurationError: 'nope' is not an event: names look like batch_end or epoch_start; "
    "your own events begin with '@', tables with '#'",
    "Event('')": "ConfigurationError: '' is not an event: names look like batch_end or epoch_start; "
    "your own events begin with '@', tables with '#'",
}


def test_an_event_is_a_string_as_in_the_reference():
    for expression, expected in (GOLDEN["str_enum"] | OURS).items():
        code = expression.replace("hash == hash of value", "hash(Event.BATCH_END) == hash('batch_end')")
        try:
            result = eval(code)
        except OffloopError as error:
            result = f"{type(error).__name__}: {error}"
        assert (repr(result) if isinstance(result, Event) else result) == expected


def test_an_event_is_found_by_value_and_name_in_any_case():
    for event in Event:
        for name in (event.name, event.value, event.value.title()):
            assert Event(name) is event
            assert event == name
            assert name == event
            assert (event != name) is False


def test_a_wrong_name_is_refused_with_what_comes_close():
    for wrong, meant in (("EPOCHEND", "epoch_end"), ("fit", "fit_end"), (5, "5"), (b"batch_end", "b'")):
        with pytest.raises(ConfigurationError, match=meant):
            Event(wrong)


def test_the_documentation_places_every_event():
    described = re.findall(r"^ +([A-Z_]+)(?: +#.*)?$", Event.__doc__, re.MULTILINE)
    assert sorted(described) == sorted(event.name for event in Event)
