"""The command ``consumer`` on runs that are over, on files, and on wrong input."""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Run, command
from consumers_stream import record_run, snapshots_of_training

from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.runs import lock as run_lock
from offloop.bus.types.event import Event
from offloop.consumers.callbacks import alert, channels
from offloop.consumers.cli import main as cli
from offloop.consumers.runner import places as attach
from offloop.consumers.runner.places import FolderRuns


@pytest.fixture
def consumer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], runs_dir: Path, tmp_path: Path
) -> Run:
    monkeypatch.chdir(tmp_path)
    return command("consumer", cli.main, monkeypatch, capsys)


def last_line(text: str) -> str:
    return text.splitlines()[-1]


def test_name_directory_file_and_replay_of_a_run_write_equal_bytes(
    consumer: Run, runs_dir: Path, tmp_path: Path
) -> None:
    directory = record_run(runs_dir, "digits-1", snapshots_of_training())
    recording = directory / "recording-1.mcap"
    ways = [["--run", "digits-1"], ["--run", recording], ["--replay", directory], ["--replay", recording]]
    for number, way in enumerate(ways):
        arguments = ["--callbacks", "speed,lr", "--log", "jsonl", "-o", f"jsonl.path={tmp_path / str(number)}"]
        assert consumer(*way, *arguments).code == 0
    written = [(tmp_path / str(number)).read_bytes() for number in range(4)]
    assert len(written[0].splitlines()) == 8
    assert set(written) == {written[0]}


@pytest.mark.parametrize(
    ("status", "error", "code", "line"),
    [
        ("stopped", None, 0, "run r stopped: 8 events handled"),
        ("failed", "ValueError: boom", 0, "run r failed: ValueError: boom: 8 events handled"),
        (None, None, 3, "run r was lost, its end is unknown: 8 events handled"),
    ],
)
def test_the_last_line_has_the_run_status(
    consumer: Run, runs_dir: Path, status: str | None, error: str | None, code: int, line: str
) -> None:
    record_run(runs_dir, "r", snapshots_of_training(), status, error)
    result = consumer("--run", "r", "--callbacks", "lr")
    assert (result.code, last_line(result.err)) == (code, line)


@contextlib.contextmanager
def served(directory: Path) -> Iterator[None]:
    """What a broker leaves in the directory of the run that it serves."""
    (directory / "broker.json").write_text(
        '{"attempt": 1, "control_endpoint": "ipc://nowhere", "event_feed": "ipc://nowhere"}'
    )
    with (directory / "broker.lock").open("w") as lock:
        assert run_lock.take(lock.fileno())
        yield


def test_a_replay_of_a_live_run_has_the_events_recorded_so_far(consumer: Run, runs_dir: Path) -> None:
    directory = record_run(runs_dir, "r", snapshots_of_training(), status=None)
    with served(directory):
        result = consumer("--replay", directory, "--callbacks", "lr")
    expected = "run r is still live: 8 events handled, all that is recorded so far"
    assert (result.code, last_line(result.err)) == (0, expected)


def test_a_truncated_recording_is_read_to_its_damage_which_is_reported(consumer: Run, runs_dir: Path) -> None:
    recording = record_run(runs_dir, "r", snapshots_of_training(batches=40)) / "recording-1.mcap"
    os.truncate(recording, recording.stat().st_size // 2)
    result = consumer("--replay", recording, "--callbacks", "lr")
    assert result.code == 3
    [handled] = re.findall(r"was lost, its end is unknown: (\d+) events handled", last_line(result.err))
    assert 4 <= int(handled) <= 36
    assert "offset" in last_line(result.err)
    assert "Traceback" not in result.err


def test_lost_events_are_reported(consumer: Run, runs_dir: Path) -> None:
    record_run(runs_dir, "r", snapshots_of_training(), without=(4, 5))
    result = consumer("--run", "r", "--callbacks", "lr")
    assert result.code == 1
    assert "missing: events 4 to 5 of rank 0" in result.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--callbacks", "sped"], 1, "error: there is no callback 'sped': did you mean speed?"),
        (["--callbacks", ""], 2, "error: --callbacks is empty"),
        (["--run", ""], 2, "error: --run is empty"),
        (["--callbacks", "top", "--wait"], 1, "error: 'top' draws on a terminal"),
        (["--run", "digits"], 1, "error: no run 'digits' in "),
        (["--run", "./folder"], 1, "error: folder is not a run: it has no run.json"),
        (["--replay", "text"], 1, "error: text is not a recording"),
        (["--replay", "empty"], 1, "error: empty is empty: nothing was recorded in it"),
        (["--replay", "."], 1, "error: . is not a run: it has no run.json"),
        (["--replay", "text", "--wait"], 2, "error: --replay reads a file"),
        (["--run", "other", "--start", "1ep"], 2, "error: "),
        (["--max-delay", "nan"], 1, "error: --max-delay is nan"),
    ],
)
def test_wrong_input_is_refused_in_one_line(
    consumer: Run, tmp_path: Path, runs_dir: Path, arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "text").write_text("some text that is no recording\n")
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    record_run(runs_dir, "other", [])
    result = consumer(*arguments)
    assert (result.code, result.out) == (code, "")
    [line] = result.err.splitlines()
    assert line.startswith(message)


def test_a_message_that_is_not_sent_makes_the_exit_code_1(
    consumer: Run, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "_PAUSES", (0.0,))
    monkeypatch.setattr(alert, "_DAY", math.inf)
    record_run(runs_dir, "r", snapshots_of_training())
    options = ["-o", "alert.rules=finished", "-o", "alert.to=json://127.0.0.1:1"]
    result = consumer("--run", "r", "--callbacks", "alert", *options)
    assert "'finished: r' was not sent to json://127.0.0.1:1: " in result.err
    assert "callback Alert has ended: 1 message was not sent\n" in result.err
    assert result.code == 1


def test_a_callback_that_raises_makes_the_exit_code_1_and_is_counted(
    consumer: Run, runs_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "from offloop.consumers import Callback\n"
        "class Fragile(Callback):\n"
        "    def batch_end(self, state, logger):\n"
        "        logger.log_metrics({'fine': 1})\n"
        "        raise ValueError('not today')\n"
    )
    record_run(runs_dir, "r", snapshots_of_training())
    result = consumer("--last", "--callbacks", "mine.py:Fragile")
    assert result.code == 1
    assert result.err.count("Traceback") == 1
    assert "consumers/runner/runner.py" not in result.err, "only the part of it that is the callback's"
    assert "callback Fragile raised 8 times" in result.err
    assert "fine" in result.out
    stopped = consumer("--last", "--callbacks", "mine.py:Fragile", "--on-error", "stop")
    assert stopped.code == 1
    assert last_line(stopped.err).startswith("error: callback Fragile raised ValueError at batch_end")


@pytest.mark.parametrize("arguments", [[], ["--wait", "--run", "next"]])
def test_a_waiting_consumer_does_not_attach_to_old_runs(
    consumer: Run, runs_dir: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    def the_next_run(_seconds: float) -> None:
        record_run(runs_dir, "next", snapshots_of_training())

    record_run(runs_dir, "old", [])
    monkeypatch.setattr(attach.time, "sleep", the_next_run)
    result = consumer(*arguments)
    assert "waiting for" in result.err
    assert last_line(result.err) == "run next finished: 16 events handled"


def test_a_consumer_waits_for_a_run_whose_broker_is_starting(
    consumer: Run, runs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = record_run(runs_dir, "r", snapshots_of_training(), status=None)
    with (directory / "broker.lock").open("w") as lock:
        assert run_lock.take(lock.fileno())

        def it_ends(_seconds: float) -> None:
            lock.close()

        monkeypatch.setattr(attach.time, "sleep", it_ends)
        result = consumer("--run", "r")
    assert result.err.splitlines()[0].startswith("waiting for ")


def test_a_callback_without_event_methods_is_refused(consumer: Run, runs_dir: Path, tmp_path: Path) -> None:
    record_run(runs_dir, "r", snapshots_of_training())
    (tmp_path / "slip.py").write_text(
        "from offloop.consumers import Callback\nclass Slip(Callback):\n    def batch_ended(self, state, logger): ...\n"
    )
    result = consumer("--callbacks", "slip.py:Slip")
    assert result.code == 1
    assert "Slip handles no event" in result.err
    assert "did you mean batch_end" in result.err


def test_the_newest_live_run_is_chosen_and_the_others_are_named(runs_dir: Path) -> None:
    said: list[str] = []
    with contextlib.ExitStack() as locks:
        for started, name in enumerate(["older", "newest", "over"]):
            description = record_run(runs_dir, name, []) / "run.json"
            record = json.loads(description.read_text())
            record["attempts"][0]["started"] = started
            description.write_text(json.dumps(record))
            if name != "over":
                locks.enter_context(served(runs_dir / name))
        assert attach.live_or_wait(FolderRuns(runs_dir), said.append).name == "newest"
    assert said == ["attaching to newest, the newest live run; also live: older ('--run NAME' chooses)"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_waiting_consumer_ends_on_a_signal(runs_dir: Path, number: int, code: int) -> None:
    command = [sys.executable, "-m", "offloop.consumers", "--wait", "--run", "next"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        assert waiting.stderr.readline() == f"waiting for run next in the folder {runs_dir} ... (Ctrl-C ends)\n"
        waiting.send_signal(number)
        _, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, err) == (code, "detached before a run began\n")


def test_a_closed_pipe_ends_the_module_without_a_message(runs_dir: Path) -> None:
    record_run(runs_dir, "r", snapshots_of_training(batches=2000))
    command = f"{sys.executable} -m offloop.consumers --run r -o console.every=0 | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.startswith("step")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_consumer_ends_if_its_stopper_can_never_work(consumer: Run, runs_dir: Path) -> None:
    snapshots = [
        Snapshot.build(Event.EVAL_END, dataloader_label="eval", eval_metrics={"eval": {"accuracy": 0.75}}),
        Snapshot.build(Event.FIT_END),
    ]
    record_run(runs_dir, "evaluated", snapshots)
    options = ["-o", "early-stop.monitor=nope", "-o", "early-stop.dataloader_label=eval"]
    alone = consumer("--replay", "evaluated", "--callbacks", "early-stop", *options)
    assert alone.code == 1
    assert "'eval' has no metric 'nope'; there are: eval/accuracy; give" in alone.err
    assert last_line(alone.err) == "error: no callback is left: this consumer ends"
    beside = consumer("--replay", "evaluated", "--callbacks", "early-stop,metrics", *options)
    assert beside.code == 1
    assert "  accuracy  " in beside.out


def test_a_replay_names_fields_that_were_not_recorded(consumer: Run, runs_dir: Path) -> None:
    directory = record_run(runs_dir, "r", snapshots_of_training())
    assert (
        "the field 'activations' is not in this recording"
        in consumer("--replay", directory, "--callbacks", "activations").err
    )
