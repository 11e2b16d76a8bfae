"""``consumer --replay`` with a pace, a part, again and again, and standing still at a terminal."""

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from helpers import wait_for
from replay_streams import record

from consumers.cli import main as cli

CALLBACKS = '''
import os, signal

from consumers import Callback


def say(text):
    # In one piece, also from several threads.
    os.write(1, f"{text}\\n".encode())


class Passes(Callback):
    """Tells how many batches each pass had, and leaves after the third."""

    made = 0

    def __init__(self):
        Passes.made += 1
        self.batches = 0

    def batch_end(self, state, logger):
        self.batches += 1
        logger.log_metrics({"batches": self.batches})

    def fit_end(self, state, logger):
        say(f"pass {Passes.made}: {self.batches} batches")
        if Passes.made == 3:
            os.kill(os.getpid(), signal.SIGINT)

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


class Tell(Callback):
    """Tells every event."""

    def run_event(self, event, state, logger):
        say(f"event {state.seq} {event.value}")

    def close(self, state, logger):
        say("closed")


class Beside(Tell):
    """The same, with a stream of its own."""

    background = True

    def run_event(self, event, state, logger):
        say(f"beside {state.seq} {event.value}")


class Evaluations(Callback):
    def eval_batch_end(self, state, logger):
        pass


class Draws(Tell):
    owns_terminal = True
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CALLBACKS)
    record(tmp_path / "r.mcap")
    return tmp_path


def consumer(folder: Path, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "consumers", *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False
    )


def last_line(text: str) -> str:
    return text.splitlines()[-1]


def test_at_any_pace_the_same_is_logged(folder: Path) -> None:
    record(folder / "ranks.mcap", ranks=2, inner=True)
    written, drawn = [], []
    ways = (["--replay", "ranks.mcap"], *(["--replay", "ranks.mcap", "--rate", rate] for rate in ("max", "1e5", "10")))
    for number, way in enumerate([*ways, ["--run", "ranks.mcap", "--rate", "1e5"]]):
        callbacks = ["-c", "metrics,speed,lr,trace", "-o", f"trace.path={number}.json"]
        done = consumer(folder, *way, *callbacks, "-l", "jsonl", "-o", f"jsonl.path={number}")
        assert done.returncode == 0
        assert last_line(done.stderr).startswith("run r finished: ")
        written.append((folder / str(number)).read_text())
        drawn.append((folder / f"{number}.json").read_text())
    assert len(written[0].splitlines()) > 12
    assert set(written) == {written[0]}
    # Commands come beside the events.
    assert "command set lr 0.1" in drawn[0]
    assert set(drawn) == {drawn[0]}


def test_a_part_of_it(folder: Path) -> None:
    done = consumer(folder, "--replay", "r.mcap", "-c", "mine.py:Tell", "--start", "10ba", "--until", "+2.7s")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [*("event 1 init", "event 2 fit_start", "event 21 batch_end", "closed")]
    assert done.stderr == "run r was replayed until +2.7s: 3 events handled\n"


def test_a_named_consumer_goes_on_in_a_replay(folder: Path) -> None:
    arguments = ["--replay", "r.mcap", "-c", "mine.py:Passes", "--rate", "1e6", "-l", "jsonl", "--name", "mine"]
    first = consumer(folder, *arguments, "--until", "5ba")
    assert last_line(first.stderr) == "run r was replayed until 5ba: 5 events handled"
    second = consumer(folder, *arguments)
    assert "consumer mine goes on after 5 events" in second.stderr
    assert second.stdout == "pass 1: 12 batches\n"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 12
    third = consumer(folder, *arguments)
    assert "has handled this run to its end already" in third.stderr
    assert third.returncode == 0


def test_in_a_loop_each_pass_has_new_callbacks(folder: Path) -> None:
    done = consumer(folder, "--replay", "r.mcap", "-c", "mine.py:Passes", "--loop", "--rate", "1e5")
    assert [line for line in done.stdout.splitlines() if line.startswith("pass")] == [
        *("pass 1: 12 batches", "pass 2: 12 batches", "pass 3: 12 batches")
    ]
    assert done.stderr.splitlines() == [
        *("run r finished: 13 events handled", "run r finished: 13 events handled"),
        "detached from run r: 13 events handled",
    ]
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["--rate", "2"],
            2,
            "--rate is for a recording: name it with '--replay FILE'; 'bus replay FILE' replays it for",
        ),
        (["--run", "x", "--start", "1ep"], 2, "--start is for a recording: "),
        (["--until", "1ep"], 2, "--until is for a recording: "),
        (["--loop"], 2, "--loop is for a recording: "),
        (["--paused"], 2, "--paused is for a recording: "),
        (
            ["--replay", "r.mcap", "--rate", "-1"],
            2,
            "'-1' is no rate: 1 replays as fast as it was, 10 ten times as fast",
        ),
        (["--replay", "r.mcap", "--start", "5"], 2, "invalid time '5': write a training time (2ep, 100ba, "),
        (["--replay", "r.mcap", "--loop", "--name", "n"], 2, "--loop begins anew each time, and --name goes on from"),
        (["--replay", "r.mcap", "--paused"], 1, "keys are read from a terminal, and standard input is none: "),
        (
            ["--replay", "r.mcap", "--paused", "-c", "mine.py:Draws"],
            2,
            "--paused waits for keys, which a callback that draws on the whole terminal takes",
        ),
        (
            ["--replay", "r.mcap", "--start", "9ep", "--until", "12ep"],
            1,
            "nothing was replayed: no event that these callbacks want is from 9ep on and until 12ep; 'bus info PATH' "
            "tells how long the run was",
        ),
        (
            ["--replay", "r.mcap", "--loop", "-c", "mine.py:Evaluations"],
            1,
            "nothing was replayed: no event that these callbacks want is in this recording; 'bus info PATH' tells",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(
    folder: Path,
    runs_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: Sequence[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["consumer", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (code, "")
    assert message in last_line(told.err)
    assert "Traceback" not in told.err


# -- at a terminal ----------------------------------------------------------------------------------------------------


SHELL = """
import os, signal, subprocess, sys

job = subprocess.Popen(sys.argv[1:], process_group=0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, lambda *_: os.tcsetpgrp(0, os.getpgrp()) or print("in the background", flush=True))
os.tcsetpgrp(0, job.pid)
print("job", job.pid, flush=True)
_, status = os.waitpid(job.pid, os.WUNTRACED)
print("stopped" if os.WIFSTOPPED(status) else f"ended {os.waitstatus_to_exitcode(status)}", flush=True)
if os.WIFSTOPPED(status):
    os.kill(job.pid, signal.SIGKILL)
"""
"""Runs a command as its job in the foreground, takes the terminal back at SIGUSR1, and tells what became of the job."""


class Terminal:
    """The command at a terminal of its own, in the foreground."""

    def __init__(self, folder: Path, *arguments: object, through: Sequence[str] = ()) -> None:
        self._master, slave = pty.openpty()
        self._slave = slave
        self.modes = termios.tcgetattr(slave)
        self.shown = ""

        def take_terminal() -> None:
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [*through, sys.executable, "-P", "-m", "consumers", "--replay", "r.mcap", *map(str, arguments)],
            cwd=folder,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=take_terminal,
        )

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def shows(self, text: str) -> bool:
        while select.select([self._master], [], [], 0)[0]:
            self.shown += os.read(self._master, 65536).decode().replace("\r\n", "\n")
        return text in self.shown

    def wait_for(self, text: str) -> None:
        wait_for(lambda: self.shows(text), f"{text!r} in the terminal")

    def lines(self, word: str) -> list[str]:
        return [line.removeprefix(f"{word} ") for line in self.shown.splitlines() if line.startswith(word)]

    def ended(self) -> int:
        def has_ended() -> bool:
            # A terminal that nobody reads would hold it up.
            self.shows("")
            return self.process.poll() is not None

        wait_for(has_ended, "its end")
        self.shows("")
        return self.process.returncode

    def modes_now(self) -> list[object]:
        return termios.tcgetattr(self._slave)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def at_terminal(terminals: list[Terminal], folder: Path, *arguments: object) -> Terminal:
    terminals.append(Terminal(folder, *arguments))
    return terminals[-1]


def test_keys_let_single_events_pass_and_the_replay_go_on(folder: Path, terminals: list[Terminal]) -> None:
    terminal = at_terminal(terminals, folder, "-c", "mine.py:Tell,mine.py:Beside", "--paused")
    terminal.wait_for("standing still: space or Enter goes on and pauses, '.' gives one event, q or Ctrl-C leaves")
    for count, name in enumerate(["init", "fit_start"], 1):
        terminal.press(".")
        terminal.wait_for(f"event {count} {name}\n")
        terminal.wait_for(f"beside {count} {name}\n")
    # The mark between them is no event.
    assert terminal.lines("event") == ["1 init", "2 fit_start"]
    terminal.press(" ")
    assert terminal.ended() == 0
    assert len(terminal.lines("event")) == len(terminal.lines("beside")) == 24
    assert terminal.shown.endswith("run r finished: 24 events handled\n")
    assert terminal.modes_now() == terminal.modes


def test_what_a_named_consumer_has_handled_is_not_stepped_through_again(
    folder: Path, terminals: list[Terminal]
) -> None:
    arguments = ["-c", "mine.py:Passes,mine.py:Tell", "--name", "mine"]
    assert consumer(folder, "--replay", "r.mcap", *arguments, "--until", "5ba").returncode == 0
    terminal = at_terminal(terminals, folder, *arguments, "--paused")
    terminal.wait_for("standing still")
    terminal.press(".")
    terminal.wait_for("event 14 batch_end\n")
    terminal.press("q")
    assert terminal.ended() == 0


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_it_is_left_at_once_while_it_stands_still(folder: Path, terminals: list[Terminal], key: str) -> None:
    terminal = at_terminal(terminals, folder, "-c", "mine.py:Tell", "--paused")
    terminal.wait_for("standing still")
    terminal.press(".")
    terminal.wait_for("event 1 init\n")
    terminal.press(key)
    assert terminal.ended() == 0
    assert terminal.shown.endswith("closed\ndetached from run r: 1 events handled\n")
    assert terminal.modes_now() == terminal.modes


def test_a_paced_replay_can_be_held_and_one_in_the_background_does_without_keys(
    folder: Path, terminals: list[Terminal]
) -> None:
    terminal = at_terminal(terminals, folder, "-c", "mine.py:Tell", "--rate", "0.001")
    terminal.wait_for("space or Enter goes on and pauses")
    terminal.wait_for("event 4 epoch_start\n")
    terminal.press("\r..")
    terminal.wait_for("event 6 batch_end\n")
    assert len(terminal.lines("event")) == 5
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.ended() == 0
    unpaced = at_terminal(terminals, folder, "-c", "mine.py:Tell", "--until", "1ba")
    assert unpaced.ended() == 0
    assert "space" not in unpaced.shown


def test_put_in_the_background_it_goes_on_and_leaves_the_terminal_alone(
    folder: Path, terminals: list[Terminal]
) -> None:
    arguments = ["-c", "mine.py:Tell", "--rate", "0.001"]
    terminals.append(terminal := Terminal(folder, *arguments, through=[sys.executable, "-c", SHELL]))
    terminal.wait_for("event 4 epoch_start\n")
    terminal.process.send_signal(signal.SIGUSR1)
    terminal.wait_for("in the background\n")
    terminal.press(" ")
    [job] = terminal.lines("job")
    os.kill(int(job), signal.SIGINT)
    assert terminal.ended() == 0
    assert terminal.shown.endswith("closed\ndetached from run r: 3 events handled\nended 0\n")
