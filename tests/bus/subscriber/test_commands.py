"""Commands on their way, without a broker: what is sent when, and what the answers mean."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offloop.bus.errors import BrokerError
from offloop.bus.protocol.frames import Control
from offloop.bus.subscriber.commands import CommandExchange, PendingCommands
from offloop.bus.types.commands import Command, Outcome


@pytest.fixture
def exchange() -> CommandExchange:
    return CommandExchange("r", Command("set", ("lr", 0.1)), 30.0)


def answer(exchange: CommandExchange, kind: str, **content: object) -> Control:
    return Control(kind, {"id": exchange_id(exchange), **content})


def exchange_id(exchange: CommandExchange) -> object:
    return exchange.begin(100.0)["id"]


def test_a_command_is_answered_by_the_broker_and_then_by_the_training(exchange: CommandExchange) -> None:
    request = exchange.begin(100.0)
    assert (request["run"], request["command"]) == ("r", "set")
    assert exchange.deadline == 105.0
    assert exchange.take(answer(exchange, "accepted", ranks=1), 101.0) is None
    assert exchange.deadline == 131.0
    assert exchange.take(Control("applied", {"id": "another", "batch": 3, "event": "batch_end"}), 102.0) is None
    outcome = exchange.take(answer(exchange, "applied", batch=7, event="batch_end"), 103.0)
    assert outcome is not None
    assert (outcome.batch, outcome.event, outcome.error, outcome.command.arguments) == (
        7,
        "batch_end",
        None,
        ("lr", 0.1),
    )


def test_a_slow_command_has_no_outcome_yet(exchange: CommandExchange) -> None:
    exchange.take(answer(exchange, "accepted", ranks=1), 101.0)
    outcome = exchange.give_up("the broker")
    assert (outcome.command.name, outcome.event, outcome.batch) == ("set", None, None)


def test_a_broker_that_does_not_answer_or_has_no_trainer_is_an_error(exchange: CommandExchange) -> None:
    with pytest.raises(BrokerError, match="the broker at x does not answer"):
        exchange.give_up("the broker at x")
    with pytest.raises(BrokerError, match="no connection to its trainer"):
        exchange.take(answer(exchange, "accepted", ranks=0), 101.0)


@pytest.mark.parametrize("name", [None, "its own"])
def test_a_refusal_is_an_error_with_or_without_an_id(exchange: CommandExchange, name: str | None) -> None:
    refusal = {"id": name if name is None else exchange_id(exchange), "reason": "key may not command"}
    with pytest.raises(BrokerError, match="key may not command"):
        exchange.take(Control("refused", refusal), 101.0)


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
