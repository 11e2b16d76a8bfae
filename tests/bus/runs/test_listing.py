"""A run is described to readers elsewhere in the form of the protocol, or not at all."""

import json

import msgspec
import pytest

from offloop.bus.runs.listing import ListedRun

SAID = {"run": "r", "attempt": 1, "status": "live"}


def decode(said):
    return msgspec.json.decode(json.dumps(said), type=ListedRun)


def test_what_is_not_said_is_there_as_nothing():
    known = decode({**SAID, "reached": {"epoch": 1, "batch": 2, "sample": 3, "unknown": 4}, "unknown": 5})
    assert (known.reached.batch, known.reached.planned) == (2, None)
    assert (known.error, known.ranks, known.live, known.bridge, known.is_silent) == (None, (), False, None, True)


@pytest.mark.parametrize(
    "wrong", [{"status": None}, {"ranks": 3}, {"ended": -1}, {"reached": {"epoch": 1}}, {"error": "\udcff"}]
)
def test_another_form_is_no_run(wrong):
    with pytest.raises(ValueError, match=r"."):
        decode({**SAID, **wrong})
