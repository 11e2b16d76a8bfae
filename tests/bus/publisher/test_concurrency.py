"""A publisher that several threads, signal handlers and finalizers use at once loses nothing of what they give it."""

import itertools
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from offloop.bus import ClosedError, ConfigurationError, Event, Publisher, Recording
from offloop.bus.recording.tables import read_rows


def read(publisher: Publisher) -> tuple[list[tuple[str, int]], list[float]]:
    """Return who published which batch, and what was logged, of a complete recording."""
    recording = Recording(publisher.recording)
    snapshots = list(recording)
    assert (recording.gaps, str(recording.ending)) == ((), "finished")
    who = [(one.fields["who"], int(one.timestamp.batch)) for one in snapshots if "who" in one.fields]
    return who, [
        value for one in snapshots for _, values in one.fields.get("logged") or () for value in values.values()
    ]


def test_threads_that_publish_at_once_lose_nothing_and_keep_the_order_of_each(runs_dir: Path) -> None:
    errors: list[BaseException] = []

    def work(who: str) -> None:
        try:
            for batch in range(1, 501):
                publisher.publish(Event.BATCH_END, batch=batch, who=who)
                publisher.log({who: batch}, step=batch)
                if batch % 100 == 0:
                    publisher.poll()
                    publisher.statistics()
                    publisher.log_table(who, [[batch]], ["batch"])
        except BaseException as error:  # noqa: BLE001  it would be lost with the thread
            errors.append(error)

    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with Publisher("r") as publisher:
            threads = [threading.Thread(target=work, args=(who,)) for who in "abc"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(switching)
    published, logged = read(publisher)
    assert errors == []
    for who in "abc":
        assert [batch for one, batch in published if one == who] == list(range(1, 501))
        rows = [row for part in read_rows([Recording(publisher.recording)], who) for row in part.rows]
        assert rows == [[batch] for batch in range(100, 501, 100)]
    assert sorted(logged) == sorted([*range(1, 501)] * 3)


def test_an_event_published_during_close_is_recorded_or_refused(runs_dir: Path) -> None:
    given, refused = [], []

    class Busy:
        """A value on its way that logs when it is asked for."""

        def __init__(self, numbers: list[int]) -> None:
            self.numbers = numbers

        def ready(self) -> bool:
            return False

        def value(self) -> float:
            for number in self.numbers:
                try:
                    publisher.publish(Event.EPOCH_END, batch=number, who="other", loss=Busy([9]))
                    publisher.log({"x": number}, step=number)
                    given.append(number)
                except ClosedError:
                    refused.append(number)
            return 0.5

    publisher = Publisher("r")
    publisher.publish(Event.EPOCH_END, batch=1, who="main", loss=Busy([1, 2]))
    publisher.close()
    published, logged = read(publisher)
    assert (given, set(refused)) == ([1, 2], {9})
    assert [batch for who, batch in published if who == "other"] == logged == given


def test_endless_publishing_does_not_keep_a_publisher_from_closing(runs_dir: Path) -> None:
    class Busy:
        """A value on its way; from the moment when it is asked for, each one has another one published."""

        is_due = False

        def ready(self) -> bool:
            return self.is_due

        def value(self) -> float:
            self.is_due = True
            publisher.publish(Event.EPOCH_END, batch=2, who="other", loss=self)
            return 0.5

    publisher = Publisher("r")
    publisher.publish(Event.EPOCH_END, batch=1, who="main", loss=Busy())
    publisher.close()
    published, _ = read(publisher)
    assert published == [("main", 1), ("other", 2)]


class Reentrant:
    """A value on its way that calls something when it is asked for: in the middle of a call of the publisher."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def ready(self) -> bool:
        call, self.call = self.call, lambda: None
        call()
        return True

    def value(self) -> float:
        return 0.5


def test_values_of_a_nested_call_are_recorded_as_they_were_at_the_call(runs_dir: Path) -> None:
    mutable = [1]

    def publish() -> None:
        publisher.publish(Event.EPOCH_END, batch=1, who="inner", values=mutable)
        publisher.log({"x": 0.25}, step=1)
        mutable.append(2)

    with Publisher("r") as publisher:
        publisher.publish(Event.BATCH_END, batch=1, who="outer", loss=Reentrant(publish))
        publisher.poll()
    assert read(publisher) == ([("outer", 1), ("inner", 1)], [0.25])
    assert [one.fields["values"] for one in Recording(publisher.recording) if one.event is Event.EPOCH_END] == [[1]]


INTERRUPTED = """
import itertools, os, signal, sys
from offloop import bus
from offloop.bus import Event, Publisher
from offloop.bus.types.timeouts import Timeouts

publisher = Publisher("r", timeouts=Timeouts(flush=60.0, silence=60.0))
number = lines = 0

def handle(*_):
    publisher.publish(Event.EPOCH_END, batch=number, who="handler")
    publisher.log({"handler": number}, step=number)

def trace(frame, event, argument):
    global lines
    if not frame.f_code.co_filename.startswith(os.path.dirname(bus.__file__)):
        return None
    if event == "line":
        lines += 1
        if lines == number:
            signal.raise_signal(signal.SIGUSR1)
    return trace

signal.signal(signal.SIGUSR1, handle)
for number in itertools.count(1):
    lines = 0
    sys.settrace(trace)
    publisher.log({"before": number}, step=number)
    publisher.publish(Event.EPOCH_END, batch=number, who="main")
    publisher.log({"after": number}, step=number)
    publisher.poll()
    sys.settrace(None)
    if lines < number:
        break
publisher.close()
print(number)
"""


def test_a_signal_handler_may_publish_at_any_line_of_a_call(runs_dir: Path) -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    calls = int(done.stdout)
    assert calls > 60
    recording = Recording(runs_dir / "r")
    events = list(recording)
    published = Counter((one.fields["who"], int(one.timestamp.batch)) for one in events if "who" in one.fields)
    logged = Counter(
        value for one in events for _, values in one.fields.get("logged") or () for value in values.items()
    )
    interrupted, every = range(1, calls), range(1, calls + 1)
    assert published == Counter([*(("handler", n) for n in interrupted), *(("main", n) for n in every)])
    expected = [("handler", n) for n in interrupted], [(name, n) for name in ("before", "after") for n in every]
    assert logged == Counter(itertools.chain(*expected))
    assert (str(recording.ending), recording.gaps) == ("finished", ())


class Raised(BaseException):
    """What a signal handler raises: where a function begins, and where one of C has returned."""


def raise_at(number: int) -> Callable[[Any, str, Any], None]:
    left = number

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal left
        left -= event in ("call", "c_return") and "publisher" in frame.f_code.co_filename
        if not left:
            raise Raised

    return profile


def test_a_signal_handler_that_raises_loses_no_earlier_or_later_event(runs_dir: Path) -> None:
    raised, numbers = 0, list(range(1, 301))
    with Publisher("r", max_delay=0) as publisher:
        for number in numbers:
            sys.setprofile(raise_at(number))
            try:
                for batch in range(3):
                    publisher.publish(Event.BATCH_END, batch=number, who="raising", values=bytes(30_000 * batch))
                publisher.log({"raising": number}, step=number)
                publisher.poll()
            except Raised:
                raised += 1
            finally:
                sys.setprofile(None)
            publisher.publish(Event.BATCH_END, batch=number, who="loop")
            publisher.log({"loop": number}, step=number)
    published, logged = read(publisher)
    assert raised > 100
    assert [batch for who, batch in published if who == "loop"] == numbers
    assert set(numbers) <= set(logged)


def test_a_signal_handler_that_raises_loses_no_event_of_a_nested_call(runs_dir: Path) -> None:
    def publish(number: int) -> None:
        publisher.publish(Event.EPOCH_END, batch=number, who="other")
        publisher.log({"other": number}, step=number)
        sys.setprofile(raise_at(number))

    raised, numbers = 0, list(range(1, 150))
    with Publisher("r", max_delay=0) as publisher:
        for number in numbers:
            try:
                publisher.publish(Event.BATCH_END, batch=number, loss=Reentrant(partial(publish, number)))
            except Raised:
                raised += 1
            finally:
                sys.setprofile(None)
    published, logged = read(publisher)
    assert raised > 50
    assert set(published) == {("other", number) for number in numbers}
    assert set(logged) == set(numbers)


def test_free_threaded_python_is_refused(runs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(ConfigurationError, match="PYTHON_GIL=1"):
        Publisher("r")
