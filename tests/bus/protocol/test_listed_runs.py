"""What a peer says of a run comes in the form of the protocol, or not at all."""

import pytest

from offloop.bus.protocol.listed_runs import listed_run

SAID = {"run": "r", "attempt": 1, "status": "live"}


def test_what_is_not_said_is_there_as_nothing_and_what_is_unknown_is_kept_apart():
    reached = {"epoch": 1, "batch": 2, "sample": 3, "unknown": 4}
    known = listed_run({**SAID, "reached": reached, "bridge": {"state": "done"}})
    assert known is not None
    assert known["reached"] == {"epoch": 1, "batch": 2, "sample": 3, "planned": None}
    assert (known["error"], known["ranks"], known["live"], known["bridge"]) == (None, [], False, {"state": "done"})


@pytest.mark.parametrize("wrong", [{"status": None}, {"ranks": 3}, {"ended": -1}, {"reached": {"epoch": 1}}])
def test_another_form_is_no_run(wrong):
    assert listed_run({**SAID, **wrong}) is None
    assert listed_run([SAID]) is None
