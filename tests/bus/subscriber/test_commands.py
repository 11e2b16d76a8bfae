"""Commands on their way, without a broker: what is sent when, and what the answers mean."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloop.bus.errors import BrokerError
from offloop.bus.net.channels import Channel
from offloop.bus.protocol.frames import Control
from offloop.bus.subscriber.commands import PendingCommands, perform
from offloop.bus.types.commands import Command, Outcome


class Broker(Channel):
    """Answers a command with these messages, under its id where they have none, and then nothing any more."""

    peer = "the broker at x"

    def __init__(self, *answers: tuple[str, dict[str, Any]]) -> None:
        self.answers = list(answers)
        self.waits: list[float] = []
        self.is_closed = False

    def send(self, kind: str, content: dict[str, Any]) -> bool:
        assert kind == "command"
        self.sent = content
        return True

    def wait(self, seconds: float) -> bool:
        self.waits.append(round(seconds))
        return bool(self.answers)

    def receive(self) -> Control | None:
        kind, content = self.answers.pop(0)
        return Control(kind, {"id": self.sent["id"], **content})

    def close(self, linger: float = 0.0) -> None:
        self.is_closed = True


def outcome_of(broker: Broker) -> Outcome:
    try:
        return perform(broker, "r", Command("set", ("lr", 0.1)), 30.0)
    finally:
        assert broker.is_closed
        assert (broker.sent["run"], broker.sent["command"]) == ("r", "set")


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([], "the broker at x does not answer"),
        ([("accepted", {"ranks": 0})], "no connection to its trainer"),
        ([("refused", {"reason": "key may not command"})], "key may not command"),
        ([("refused", {"id": None, "reason": "key may not command"})], "key may not command"),
    ],
)
def test_no_answer_no_trainer_and_a_refusal_are_errors(answers: list[tuple[str, dict[str, Any]]], error: str) -> None:
    with pytest.raises(BrokerError, match=error):
        outcome_of(Broker(*answers))


def test_a_command_is_repeated_until_the_broker_confirms_it() -> None:
    sent, command = PendingCommands(), Command("stop", (), "mine")
    sent.add(command, 10.0)
    assert sent.due(10.9) == ()
    assert sent.due(11.0) == (command,)
    # The broker has no trainer at the moment: soon again.
    sent.take(Control("accepted", {"id": "mine", "ranks": 0}), 11.1)
    assert sent.due(11.2) == ()
    assert sent.due(11.4) == (command,)
    assert sent.send_again(11.4) == (command,)
    sent.take(Control("accepted", {"id": "mine", "ranks": 1}), 11.5)
    assert sent.due(100.0) == ()
    assert sent.send_again(100.0) == ()
    assert sent.outcomes(()) == (Outcome(command, None, None),)


@given(st.none() | st.integers() | st.lists(st.integers(), max_size=2) | st.binary(max_size=3) | st.just({}))
def test_an_answer_with_an_invalid_id_is_ignored(name: object) -> None:
    sent, command = PendingCommands(), Command("stop", (), "mine")
    sent.add(command, 0.0)
    for kind in ("refused", "accepted"):
        sent.take(Control(kind, {"id": name, "ranks": 1, "reason": "none"}), 1.0)
    assert sent.outcomes(()) == (Outcome(command, None, None),)
    sent.take(Control("refused", {"id": "mine", "reason": "busy"}), 1.0)
    assert sent.outcomes(()) == (Outcome(command, None, None, "busy"),)
