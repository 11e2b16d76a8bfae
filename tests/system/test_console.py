"""What a training prints is in the run, whatever ends it, and the training never waits for that."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from faults import broker_of
from helpers import wait_for
from terminals import Terminal

from offloop.bus import find_run

LOGS = [sys.executable, "-m", "offloop", "logs"]
BEGIN = """
import logging, os, sys, time
from offloop.bus import Event, Publisher
rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD", 1)))
publisher = Publisher("r", rank=rank, world_size=world, broker=os.environ.get("BROKER"), capture_console=True)
publisher.publish(Event.FIT_START)
print("begins", flush=True)
"""


def start(code: str, **environment: str) -> "subprocess.Popen[str]":
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", BEGIN + code]
    process = subprocess.Popen(command, text=True, env={**os.environ, **environment}, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    return process


def has_ended() -> bool:
    run = find_run("r")
    return not (run.live or run.away)


def train(code: str) -> tuple[str, str]:
    """Run a training to its end; return what it prints."""
    printed = start(code).communicate(timeout=100)
    wait_for(has_ended, "the run to end")
    return printed


def logs(*options: str) -> str:
    done = subprocess.run([*LOGS, "r", *options], capture_output=True, text=True, timeout=100, check=False)
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("end", "last"),
    [
        ("publisher.close()", "\n"),
        ("os.kill(os.getpid(), 9)", "\n"),
        ("os.abort()", 'Fatal Python error: Aborted\n\n.*\n  File "<string>", line 9 in <module>\n.*'),
        ("1 / 0", "Traceback .*\n  File .*\nZeroDivisionError: division by zero\n"),
        ("with publisher: 1 / 0", "Traceback .*\n  File .*\nZeroDivisionError: division by zero\n"),
    ],
)
def test_output_is_complete_whatever_the_end(runs_dir: Path, end: str, last: str) -> None:
    train(f"print('no line break', end='', file=sys.stderr)\n{end}")
    shown = logs()
    assert re.fullmatch(f"begins\nno line break{last}", shown, re.DOTALL), shown
    assert shown.count("Traceback") <= 1
    assert not list((runs_dir / "r").glob("*.pipe"))


def test_of_a_crash_the_stack_is_kept_without_the_output(runs_dir: Path) -> None:
    code = 'import os\nfrom offloop.bus import Publisher\npublisher = Publisher("r")\nprint("begins")\nos.abort()'
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=100, check=False)
    wait_for(has_ended, "the run to end")
    shown = logs()
    assert shown.startswith("Fatal Python error: Aborted\n")
    assert 'File "<string>", line 5 in <module>' in shown
    assert "begins" not in shown


def test_streams_stay_the_same_and_print_the_same(runs_dir: Path) -> None:
    out, err = train(
        """
handler = logging.StreamHandler(sys.stderr)
publisher.close()
publisher = Publisher("another", capture_console=True)
handler.emit(logging.makeLogRecord({"msg": "logged"}))
if not os.fork():
    print("child", flush=True)
    os._exit(0)
os.wait()
sys.stdout.writelines(["\\x1b]0;title\\x07colour\\x1b[31m ", "ü\\n"])
publisher.close()
print("after", "write" in vars(sys.stdout))
"""
    )
    assert (out, err) == ("child\n\x1b]0;title\x07colour\x1b[31m ü\nafter False\n", "logged\n")
    assert (runs_dir / "another" / "console-1-0.log").read_text() == "logged\nchild\ncolour ü\n"


def test_a_stopped_broker_does_not_stop_what_prints(runs_dir: Path) -> None:
    process = start(
        """
sys.stdin.readline()
began = time.perf_counter()
for number in range(40_000):
    print("y" * 99, file=sys.stderr)
print(time.perf_counter() - began, flush=True)
sys.stdin.readline()
print("last line", flush=True)
publisher.close()
"""
    )
    run = runs_dir / "r"
    broker = broker_of(run)
    os.kill(broker, signal.SIGSTOP)
    try:
        assert process.stdin and process.stdout and process.stderr  # noqa: PT018
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stderr.read(4_000_000) == ("y" * 99 + "\n") * 40_000
        assert float(process.stdout.readline()) < 20
    finally:
        os.kill(broker, signal.SIGCONT)
    file = run / "console-1-0.log"
    wait_for(lambda: file.exists() and file.stat().st_size > 60_000, "the broker to read on")
    assert process.communicate("\n", timeout=100) == ("last line\n", "")
    wait_for(has_ended, "the run to end")
    shown = logs()
    dropped = [
        int(one.replace(",", "")) for one in re.findall(r"\n\[(.+) bytes of output were not captured\]\n", shown)
    ]
    assert shown.endswith("not captured]\nlast line\n")
    # Line breaks are in one of them.
    assert 99 * 40_000 <= sum(dropped) + shown.count("y") <= 100 * 40_000


def test_output_continues_after_a_broker_is_killed(runs_dir: Path) -> None:
    process = start(
        """
for number in range(2000):
    print(number, end="\\n" if number % 3 else " ", flush=True)
    publisher.publish(Event.BATCH_END, batch=number + 1)
    time.sleep(0.001)
publisher.close()
"""
    )
    file = runs_dir / "r" / "console-1-0.log"
    for least in (100, 2000):
        wait_for(lambda: file.exists() and file.stat().st_size > least, "output")  # noqa: B023
        os.kill(broker := broker_of(runs_dir / "r"), signal.SIGKILL)
        wait_for(lambda: broker_of(runs_dir / "r") not in (0, broker), "another broker")
    process.communicate(timeout=100)
    wait_for(has_ended, "the run to end")
    shown = re.sub(r"the broker of run r was killed .*\n", "", logs())
    assert [*map(int, shown.split()[1:])] == [*range(2000)]


BARS = """
from tqdm import tqdm, trange
for epoch in trange(3, desc="epochs"):
    for batch in tqdm(range(40), desc="batches", leave=False, mininterval=0):
        time.sleep(0.002)
    tqdm.write(f"epoch {epoch} has ended")
    sys.stdin.readline()
publisher.close()
"""


def test_bars_are_folded_and_followed(runs_dir: Path) -> None:
    process = start(BARS)
    assert process.stdin
    terminal = Terminal(*LOGS, "r", "-f", columns=60)
    piped = subprocess.Popen([*LOGS, "r", "--follow", "--json"], stdout=subprocess.PIPE, text=True)
    for epoch, share in enumerate(("0%|", "33%|", "67%|")):
        terminal.wait_for(f"epoch {epoch} has ended", share)
        process.stdin.write("\n")
        process.stdin.flush()
    process.communicate(timeout=100)
    assert terminal.wait_for_end() == 0
    shown = [line.rstrip() for line in logs().splitlines()]
    assert shown[:4] == ["begins", *(f"epoch {epoch} has ended" for epoch in range(3))]
    assert re.fullmatch(r"epochs: 100%\|█+\| 3/3 \[.*\]", shown[4])
    assert shown[5:] == []
    assert [line.rstrip() for line in terminal.text.rstrip().splitlines()] == shown
    told = [json.loads(line) for line in piped.communicate(timeout=100)[0].splitlines()]
    assert {one["rank"] for one in told} == {0}
    assert told[0]["line"] == "begins"
    assert {f"epoch {epoch} has ended" for epoch in range(3)} <= {one["line"].rstrip() for one in told}


def test_each_rank_has_its_output(runs_dir: Path) -> None:
    first = start("print('first')\nsys.stdin.readline()\npublisher.close()", WORLD="2")
    address = find_run("r").control_endpoint
    second = start("print('second \\x1b[2J\\u202e')\npublisher.close()", WORLD="2", RANK="1", BROKER=str(address))
    for process in (second, first):
        process.communicate("\n", timeout=100)
    wait_for(has_ended, "the run to end")
    assert logs() == "begins\nfirst\n"
    assert logs("--rank", "1") == "begins\nsecond \\u202e\n"
    assert logs("--rank", "all") == "[0] begins\n[0] first\n[1] begins\n[1] second \\u202e\n"
    refused = subprocess.run([*LOGS, "r", "--rank", "2"], capture_output=True, text=True, timeout=100, check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "run 'r' has no captured output of rank 2 in attempt 1 on this host (there: 0, 1); " in refused.stderr


@pytest.mark.timeout(600)
def test_the_command_trainer_captures_unless_it_must_not(runs_dir: Path) -> None:
    code = """
from offloop.trainer.cli.main import trainer
for options in ("r", "quiet --no-console"):
    command = f"digits --max-duration 2ba --run-name {options}"
    trainer.main(command.split(), standalone_mode=False)
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=500, check=True)
    wait_for(has_ended, "the run to end")
    assert "recording to" in logs()
    assert "done: " in logs()
    refused = subprocess.run([*LOGS, "quiet"], capture_output=True, text=True, timeout=100, check=False)
    assert refused.returncode == 1
    assert "run 'quiet' has no captured output in attempt 1 on this host; " in refused.stderr
