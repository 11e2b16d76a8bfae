"""Consumers and trainers on other machines: everything through a broker's address, over a network that can be cut."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from faults import Training
from helpers import wait_for
from proxy import Network, StandingBroker

from offloop.bus import BrokerError, Event, Publisher, Recording, RunNotFoundError, Subscriber, find_run
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.timeouts import Timeouts
from offloop.consumers.cli.metrics import list_metrics
from offloop.consumers.runner.streams import find_remote, live_remote_or_wait

PATIENCE = 50.0


@pytest.fixture
def standing(runs_dir: Path) -> Iterator[StandingBroker]:
    with StandingBroker(runs_dir) as broker:
        yield broker


@pytest.fixture
def elsewhere(
    standing: StandingBroker, runs_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> StandingBroker:
    """The broker, for a test that sees no run's directory otherwise: as on another machine."""
    monkeypatch.setenv("OFFLOOP_RUNS_DIR", str(tmp_path / "nothing-here"))
    return standing


@pytest.fixture
def network(standing: StandingBroker) -> Iterator[Network]:
    with Network(standing.port) as made:
        yield made


class Follower(threading.Thread):
    """A subscriber on a thread that keeps what comes."""

    def __init__(self, broker: str, timeouts: Timeouts | None = None) -> None:
        super().__init__(daemon=True)
        self.subscriber = Subscriber("r", broker=broker, timeouts=timeouts)
        self.got: list[Snapshot] = []
        self.start()

    def run(self) -> None:
        with self.subscriber:
            self.got.extend(self.subscriber)

    def has(self, number: int) -> bool:
        """Whether it has got that far."""
        return bool(self.got) and self.got[-1].seq == number


def publish(publisher: Publisher, count: int) -> int:
    """Publishes so many events of a few hundred bytes, and returns the number of the last one."""
    for _ in range(count):
        publisher.publish(Event.BATCH_END, loss=1 / 3, noise=os.urandom(200))
    publisher.poll()
    return publisher.statistics().published


def on_disk(publisher: Publisher, timeout: float = PATIENCE) -> None:
    last = publisher.statistics().published
    wait_for(lambda: publisher.poll() or publisher.statistics().acknowledged >= last, f"event {last} on disk", timeout)


def numbers(snapshots: list[Snapshot]) -> list[int]:
    return [snapshot.seq for snapshot in snapshots]


def test_before_in_the_middle_and_after_give_what_the_recording_has(elsewhere: StandingBroker, runs_dir: Path) -> None:
    with Publisher("r", broker=elsewhere.address) as publisher:
        before = Follower(elsewhere.address)
        last = publish(publisher, 5000)
        on_disk(publisher)
        wait_for(lambda: before.has(last), "the first half")
        middle = Follower(elsewhere.address)
        last = publish(publisher, 5000)
    for one in (before, middle):
        one.join(60)
    with Subscriber("r", broker=elsewhere.address) as late:
        assert not late.live
        after = list(late)
    recording = Recording(runs_dir / "r")
    assert before.got == middle.got == after == list(recording)
    assert numbers(after) == list(range(1, last + 1))
    # It takes more than one range.
    assert recording.path.stat().st_size > 1_000_000
    assert {str(one.ending) for one in (before.subscriber, middle.subscriber, late)} == {"finished"}
    assert (late.run_dir, late.recording) == (None, None)


def test_events_are_asked_for_as_on_the_same_machine(elsewhere: StandingBroker) -> None:
    with Publisher("r", broker=elsewhere.address) as publisher:
        with Subscriber(broker=elsewhere.address, events=[Event.EPOCH_END, Event.AFTER_FORWARD]) as subscriber:
            assert subscriber.run_name == "r"
            following = iter(subscriber)
            wait_for(lambda: publisher.poll() or Event.AFTER_FORWARD in publisher.requested_events, "the demand")
            publish(publisher, 3)
            publisher.publish(Event.AFTER_FORWARD)
            publisher.publish(Event.EPOCH_END)
            got = [next(following) for _ in range(2)]
            assert [snapshot.event for snapshot in got] == [Event.AFTER_FORWARD, Event.EPOCH_END]
        place = {got[-1].rank: (got[-1].seq, 4)}
        publisher.publish(Event.EPOCH_END)
        publisher.poll()
        with Subscriber("r", broker=elsewhere.address, events=[Event.EPOCH_END], after=place) as subscriber:
            assert next(iter(subscriber)).seq == 6


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_broker_that_comes_back_is_found_again(
    elsewhere: StandingBroker, runs_dir: Path, how: signal.Signals
) -> None:
    with Publisher("r", broker=elsewhere.address) as publisher:
        follower = Follower(elsewhere.address)
        for _ in range(3):
            last = publish(publisher, 500)
            on_disk(publisher)
            wait_for(lambda: follower.has(last), "the events before")  # noqa: B023  called before the next turn
            elsewhere.end(how)
            publish(publisher, 500)
            elsewhere.start()
            last = publish(publisher, 500)
            wait_for(lambda: publisher.poll() or follower.has(last), "the events after", PATIENCE)  # noqa: B023
    follower.join(60)
    assert numbers(follower.got) == list(range(1, last + 1))
    assert follower.got == list(Recording(runs_dir / "r"))
    assert (follower.subscriber.gaps, str(follower.subscriber.ending)) == ((), "finished")


def test_a_footer_that_is_fetched_before_the_trainer_comes_back_is_forgotten(
    elsewhere: StandingBroker,
) -> None:
    with Publisher("r", broker=elsewhere.address) as publisher:
        # However long the trainer computes: the broker sees its process.
        follower = Follower(elsewhere.address, timeouts=Timeouts(trainer_return=0.0))
        for _ in range(3):
            last = publish(publisher, 100)
            on_disk(publisher)
            wait_for(lambda: follower.has(last), "the events before")  # noqa: B023  called before the next turn
            elsewhere.end(signal.SIGTERM)
            elsewhere.start()
            # The trainer computes, so nothing has told the new broker to cut the footer off.
            wait_for(lambda: follower.subscriber._reader.finished, "the footer to be read")
            last = publish(publisher, 100)
            wait_for(lambda: publisher.poll() or follower.has(last), "the events after")  # noqa: B023
    follower.join(60)
    assert numbers(follower.got) == list(range(1, last + 1))
    assert str(follower.subscriber.ending) == "finished"


def test_a_recording_that_was_closed_without_its_runs_end_is_read_to_its_end(
    elsewhere: StandingBroker, runs_dir: Path
) -> None:
    with Training(runs_dir, broker=elsewhere.address, events=100, ending="stay") as training:
        training.await_loop_end()
        elsewhere.end(signal.SIGTERM)
        training.kill()
        elsewhere.start()
        follower = Follower(elsewhere.address, timeouts=Timeouts(trainer_return=0.5))
        follower.join(60)
    assert numbers(follower.got) == list(range(1, 101))
    assert str(follower.subscriber.ending) == "lost: the broker ended before the run did"


def test_a_run_that_has_ended_is_read_through_a_new_broker(elsewhere: StandingBroker, runs_dir: Path) -> None:
    with Publisher("r", broker=elsewhere.address) as publisher:
        publish(publisher, 500)
    elsewhere.end(signal.SIGTERM)
    elsewhere.start()
    with Subscriber("r", broker=elsewhere.address) as subscriber:
        assert list(subscriber) == list(Recording(runs_dir / "r"))
        assert str(subscriber.ending) == "finished"


def test_a_new_attempt_ends_the_old_one_and_is_the_one_that_is_found(
    elsewhere: StandingBroker, runs_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = Publisher("r", broker=elsewhere.address)
    publish(old, 500)
    on_disk(old)
    follower = Follower(elsewhere.address)
    wait_for(lambda: follower.has(500), "the events before")
    elsewhere.end(signal.SIGKILL)
    elsewhere.start()
    with Publisher("r", broker=elsewhere.address, resume=True) as new:
        assert new.attempt == 2
        publish(new, 100)
        with Subscriber("r", broker=elsewhere.address) as subscriber:
            assert subscriber.attempt == 2
            assert next(iter(subscriber)).seq == 1
        follower.join(60)
        old.close()
    assert numbers(follower.got) == list(range(1, 501))
    assert follower.subscriber.ending is not None
    assert follower.subscriber.ending.status == "lost"
    assert [attempt.status for attempt in find_run("r", runs_dir).attempts] == ["lost", "finished"]


def test_what_a_run_elsewhere_has_logged_so_far_is_listed(
    elsewhere: StandingBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    with Publisher("r", broker=elsewhere.address) as publisher:
        publisher.publish(Event.BATCH_END, batch=1, loss=0.5)
        wait_for(lambda: publisher.poll() or publisher.recorded_all, "the event on disk")
        notes = list_metrics(find_remote(elsewhere.address, "r", None, False, print))
    assert ["loss", "train", "batch_end", "0.5", "loss/train/total"] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]
    assert notes[0] == "run r is live: what it logs later is not in this list"


def test_runs_that_are_not_there_and_brokers_that_are_not_are_named(
    elsewhere: StandingBroker,
) -> None:
    with pytest.raises(RunNotFoundError, match=r"the broker at tcp://\S+ has no runs yet"):
        Subscriber(broker=elsewhere.address)
    with pytest.raises(RunNotFoundError, match=rf"has no run 'x': 'offloop runs --broker {elsewhere.address}' lists"):
        Subscriber("x", broker=elsewhere.address)
    elsewhere.end(signal.SIGTERM)
    with pytest.raises(BrokerError, match=f"no broker answers at {elsewhere.address}"):
        Subscriber("x", broker=elsewhere.address, timeouts=Timeouts(answer=0.5))


# -- the network ------------------------------------------------------------------------------------------------------

Cut = Callable[[Network], None]


@pytest.fixture
def alert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence on a connection is noticed soon."""
    monkeypatch.setattr(Timeouts, "default", replace(Timeouts.default, silence=1.5, handshake=1.0))


@pytest.mark.usefixtures("alert")
@pytest.mark.parametrize("cut", [Network.refuse, Network.swallow])
def test_a_consumer_is_complete_after_the_network_was_cut(
    elsewhere: StandingBroker, network: Network, runs_dir: Path, cut: Cut
) -> None:
    with Publisher("r", broker=elsewhere.address) as publisher:
        follower = Follower(network.address)
        last = publish(publisher, 500)
        wait_for(lambda: follower.has(last), "the events before")
        cut(network)
        # Longer than it takes to notice, and than one attempt to connect.
        for _ in range(5):
            last = publish(publisher, 500)
            on_disk(publisher)
        assert len(follower.got) < last
        network.restore()
        last = publish(publisher, 500)
        wait_for(lambda: follower.has(last), "what came in the meantime", PATIENCE)
        cut(network)
        last = publish(publisher, 500)
    # The run has ended behind its back.
    network.restore()
    follower.join(PATIENCE)
    assert numbers(follower.got) == list(range(1, last + 1))
    assert follower.got == list(Recording(runs_dir / "r"))
    assert (follower.subscriber.gaps, str(follower.subscriber.ending)) == ((), "finished")


@pytest.mark.usefixtures("alert")
@pytest.mark.parametrize("cut", [Network.refuse, Network.swallow])
def test_history_is_complete_when_the_network_is_cut_while_it_is_fetched(
    elsewhere: StandingBroker, network: Network, cut: Cut
) -> None:
    with Publisher("r", broker=elsewhere.address) as publisher:
        last = publish(publisher, 20_000)
        on_disk(publisher)
        with Subscriber("r", broker=network.address) as subscriber:
            following = iter(subscriber)
            got = [next(following)]
            cut(network)
            silence = threading.Timer(1, network.restore)
            silence.start()
            got += [next(following) for _ in range(last - 1)]
            silence.join()
    assert numbers(got) == list(range(1, last + 1))


@pytest.mark.usefixtures("alert")
@pytest.mark.parametrize("cut", [Network.refuse, Network.swallow])
def test_nothing_of_a_trainer_is_missing_after_the_network_was_cut(
    elsewhere: StandingBroker, network: Network, runs_dir: Path, cut: Cut
) -> None:
    with Publisher("r", broker=network.address) as publisher:
        for _ in range(2):
            publish(publisher, 500)
            on_disk(publisher)
            cut(network)
            publish(publisher, 500)
            lagging = publisher.statistics().lag
            network.restore()
            assert lagging >= 500
            publish(publisher, 500)
            on_disk(publisher)
        last = publisher.statistics().published
    recording = Recording(runs_dir / "r")
    assert numbers(list(recording)) == list(range(1, last + 1))
    assert (recording.gaps, recording.damage, str(recording.ending)) == ((), None, "finished")


@pytest.mark.usefixtures("alert")
@pytest.mark.parametrize("cut", [Network.refuse, Network.swallow])
def test_a_trainer_that_ends_while_the_network_is_cut_is_complete_if_it_comes_back_soon(
    elsewhere: StandingBroker, network: Network, runs_dir: Path, cut: Cut
) -> None:
    publisher = Publisher("r", broker=network.address)
    publish(publisher, 500)
    on_disk(publisher)
    cut(network)
    last = publish(publisher, 500)
    silence = threading.Timer(1, network.restore)
    silence.start()
    publisher.close()
    silence.join()
    recording = Recording(runs_dir / "r")
    assert numbers(list(recording)) == list(range(1, last + 1))
    assert str(recording.ending) == find_run("r", runs_dir).status == "finished"


@pytest.mark.usefixtures("alert")
@pytest.mark.parametrize("cut", [Network.refuse, Network.swallow])
def test_a_consumer_whose_broker_never_comes_back_gives_up(
    elsewhere: StandingBroker, network: Network, cut: Cut
) -> None:
    with Publisher("r", broker=elsewhere.address) as publisher:
        follower = Follower(network.address, timeouts=replace(Timeouts.default, broker_return=3.0))
        last = publish(publisher, 500)
        wait_for(lambda: follower.has(last), "the events before")
        cut(network)
        follower.join(PATIENCE)
        assert str(follower.subscriber.ending) == "unreachable: its broker does not answer any more"
        # It was that consumer alone.
        publish(publisher, 500)
        on_disk(publisher)
    assert numbers(follower.got) == list(range(1, last + 1))


def test_waiting_for_a_run_elsewhere_finds_one_that_has_ended_between_two_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told(attempt: int) -> dict[str, object]:
        return {"run": "digits", "attempt": attempt, "status": "finished"}

    looks = iter([[told(1)], [told(1)], [told(2)]])
    monkeypatch.setattr("offloop.consumers.runner.streams.list_remote_runs", lambda *_: next(looks))
    said: list[str] = []
    found = live_remote_or_wait("tcp://127.0.0.1:1", None, said.append)
    assert (found.name, found.attempt, found.status) == ("digits", 2, "finished")
    assert said == [
        "waiting for a run at tcp://127.0.0.1:1 ... (Ctrl-C ends); the newest there is digits (finished): "
        "this command with '--last' or '--run digits' reads it"
    ]
