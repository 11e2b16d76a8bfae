"""How callbacks are run: order, errors, closing, signals."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from consumers_stream import Collector, batch_end, record_run

from offloop.bus.errors import ClosedError, OffloopError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.recording.recording import Recording
from offloop.consumers import Callback, Logger, LoggerDestination, Runner
from offloop.consumers.runner.dispatcher import CallbackError
from offloop.consumers.runner.runner import run_session


class Witness(Callback):
    """Writes down who is called, in a list shared by all of them."""

    def __init__(self, name: str, calls: list[str], raises_at: str = "") -> None:
        self.name = name
        self.calls = calls
        self.raises_at = raises_at

    def _note(self, method: str) -> None:
        self.calls.append(f"{method} {self.name}")
        if method == self.raises_at:
            raise RuntimeError(f"{self.name} gives up")

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        self._note("batch_end")

    def close(self, state: Snapshot, logger: Logger) -> None:
        self._note("close")

    def post_close(self) -> None:
        self._note("post_close")


class AsyncWitness(Witness):
    async def batch_end(self, state: Snapshot, logger: Logger) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self._note("batch_end")

    async def close(self, state: Snapshot, logger: Logger) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self._note("close")

    async def post_close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        self._note("post_close")


class ClosingDestination(LoggerDestination):
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def close(self) -> None:
        self.calls.append("close destination")


async def as_async(snapshots: list[Snapshot]) -> AsyncIterator[Snapshot]:
    for snapshot in snapshots:
        await asyncio.sleep(0)
        yield snapshot


@pytest.mark.parametrize("wrap", [list, iter, as_async])
def test_callbacks_are_called_in_the_given_order(wrap: Any) -> None:
    calls: list[str] = []
    callbacks = [Witness("a", calls), AsyncWitness("b", calls), Witness("c", calls)]
    statistics = Runner(wrap([batch_end(1), batch_end(2)]), callbacks).run()
    assert calls[:6] == ["batch_end a", "batch_end b", "batch_end c"] * 2
    assert (statistics.handled, statistics.last_seq, statistics.interrupted) == (2, 2, False)


class Ranks(Callback):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        self.seen.append(state.rank)
        logger.log_metrics({f"{type(self).__name__}/rank": state.rank})


class EveryRank(Ranks):
    all_ranks = True


def test_a_callback_receives_rank_0_unless_it_requests_all() -> None:
    first, every, collector = Ranks(), EveryRank(), Collector()
    stream = [batch_end(1), batch_end(1, rank=1), batch_end(2, rank=1), batch_end(2)]
    Runner(stream, [first, every], [collector]).run()
    assert first.seen == [0, 0]
    assert every.seen == [0, 1, 1, 0]
    assert [row.metrics.get("Ranks/rank") for row in collector.rows] == [0, None, None, 0]


def test_a_callback_that_raises_at_close_misses_only_its_own_post_close(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[str] = []
    callbacks = [
        Witness("C1", calls),
        Witness("Bad", calls, raises_at="close"),
        AsyncWitness("BadPost", calls, raises_at="post_close"),
        Witness("C2", calls),
    ]
    Runner([], callbacks, [ClosingDestination(calls)]).run()
    assert calls == [
        *("close C1", "close Bad", "close BadPost", "close C2"),
        *("post_close C1", "post_close BadPost", "post_close C2"),
        "close destination",
    ]
    assert "Bad gives up" in capsys.readouterr().err


def test_an_error_of_a_callback_is_shown_once_counted_and_contained(
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[str] = []
    callbacks = [AsyncWitness("a", calls), Witness("b", calls, raises_at="batch_end"), Witness("c", calls)]
    statistics = Runner([batch_end(n) for n in (1, 2, 3)], callbacks).run()
    assert calls.count("batch_end c") == calls.count("batch_end b") == 3
    assert statistics.errors == {"AsyncWitness": 0, "Witness": 3, "Witness#2": 0}
    shown = capsys.readouterr().err
    assert shown.count("Traceback") == 1
    assert "RuntimeError: b gives up" in shown
    assert "consumers/runner/runner.py" not in shown


async def test_a_cancelled_consumer_ends_while_a_callback_waits() -> None:
    class Waiting(Callback):
        async def batch_end(self, state: Snapshot, logger: Logger) -> None:
            waits.set()
            await asyncio.Event().wait()

    waits, calls = asyncio.Event(), []
    running = asyncio.create_task(Runner([batch_end(1)], [Waiting(), Witness("b", calls)]).run_async())
    await waits.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert calls == ["close b", "post_close b"]


def test_a_disabled_callback_receives_only_close() -> None:
    calls: list[str] = []
    callbacks = [Witness("a", calls, raises_at="batch_end"), Witness("b", calls)]
    Runner([batch_end(1), batch_end(2)], callbacks, on_error="disable").run()
    assert calls[:3] == ["batch_end a", "batch_end b", "batch_end b"]
    assert "close a" in calls


def test_on_error_stop_finishes_the_event_closes_and_raises() -> None:
    calls: list[str] = []
    callbacks = [Witness("a", calls, raises_at="batch_end"), Witness("b", calls)]
    with pytest.raises(CallbackError) as raised:
        Runner([batch_end(1), batch_end(2)], callbacks, on_error="stop").run()
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert calls == ["batch_end a", "batch_end b", "close a", "close b", "post_close a", "post_close b"]


def test_an_error_of_the_stream_is_raised_after_closing() -> None:
    def broken() -> Any:
        yield batch_end(1)
        raise OffloopError("the stream broke")

    calls: list[str] = []
    with pytest.raises(OffloopError, match="the stream broke"):
        Runner(broken(), [Witness("a", calls)], [ClosingDestination(calls)]).run()
    assert calls == ["batch_end a", "close a", "post_close a", "close destination"]


def test_a_runner_runs_once() -> None:
    runner = Runner([], [])
    runner.run()
    with pytest.raises(ClosedError):
        runner.run()


def test_tasks_of_a_callback_run_while_a_recording_is_read() -> None:
    class Background(Callback):
        def __init__(self) -> None:
            self.finished_at: int | None = None
            self.handled = 0

        async def _work(self) -> None:
            await asyncio.sleep(0)
            self.finished_at = self.handled

        async def batch_end(self, state: Snapshot, logger: Logger) -> None:
            self.handled += 1
            if self.handled == 1:
                self.task = asyncio.create_task(self._work())

    background = Background()
    Runner([batch_end(n) for n in range(1, 2001)], [background]).run()
    assert background.finished_at is not None
    assert background.finished_at < 2000


# -- signals ----------------------------------------------------------------------------------------------------------


class Kills(Witness):
    def __init__(self, calls: list[str], number: int, at: int = 1) -> None:
        super().__init__("killer", calls)
        self.number, self.at = number, at

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        super().batch_end(state, logger)
        if state.timestamp.batch == self.at:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(("number", "wrap"), [(signal.SIGINT, list), (signal.SIGTERM, as_async)])
def test_a_signal_finishes_the_event_and_closes(number: int, wrap: Any) -> None:
    calls: list[str] = []
    before = signal.getsignal(number)
    stream = wrap([batch_end(1), batch_end(2)])
    statistics = Runner(stream, [Kills(calls, number), AsyncWitness("b", calls)]).run()
    assert calls[:3] == ["batch_end killer", "batch_end b", "close killer"]
    assert calls[-1] == "post_close b"
    assert (statistics.interrupted, statistics.handled) == (True, 1)
    assert signal.getsignal(number) is before


def test_a_signal_ends_a_session_as_soon_as_its_start_is_reported(tmp_path: Path) -> None:
    directory = record_run(tmp_path, "r", [batch_end(1)])
    calls: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    _, statistics = run_session(
        lambda _callbacks, _after: Recording(directory),
        [Kills(calls, signal.SIGINT)],
        [],
        on_start=lambda *_: signal.raise_signal(signal.SIGINT),
    )
    assert (statistics.interrupted, statistics.handled) == (True, 0)
    assert "close killer" in calls
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_signal_interrupts_a_hung_callback() -> None:
    class Hangs(Callback):
        async def batch_end(self, state: Snapshot, logger: Logger) -> None:
            loop = asyncio.get_running_loop()
            loop.call_soon(os.kill, os.getpid(), signal.SIGINT)
            loop.call_soon(os.kill, os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        Runner([batch_end(1)], [Hangs()]).run()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        calls: list[str] = []
        statistics = Runner([batch_end(1), batch_end(2)], [Kills(calls, signal.SIGINT)]).run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert statistics.handled == 2
