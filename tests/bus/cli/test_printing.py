"""Control characters of peers, recordings and files never reach a terminal."""

import contextlib
import io
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
from commands import command
from documents import ROOT
from helpers import wait_for
from recorded_runs import Entry, write_recording

from offloop.bus import Event, OffloopError, Publisher, Subscriber
from offloop.bus.cli.describe import describe_run
from offloop.bus.cli.main import main as bus_main
from offloop.bus.printing import LOGGERS, escape, notice, one_line, say
from offloop.bus.protocol.frames import encode_control
from offloop.bus.runs.directory import find_run
from offloop.consumers.cli.main import main as consumer_main
from offloop.consumers.dashboard.web.access import Listening
from offloop.consumers.dashboard.web.gate import Gate, guarded_server

HOSTILE = "\x1b]0;owned\x07\x1b[2J\0\x9b31m\u202e\u2066\u200b\u2028\ufeff\r\nerror: forged\x7f\b"
"""What sets a terminal's title, rings, erases, reverses, hides, and begins a line of its own."""


@pytest.fixture
def printed(monkeypatch, capsys):
    """Return the output of a command into a pipe, which holds nothing that a terminal obeys or hides."""

    def run(name, *arguments, code=None):
        done = command(name, {"bus": bus_main, "consumer": consumer_main}[name], monkeypatch, capsys)(*arguments)
        text = done.out + done.err
        assert code is None or done.code == code, text
        assert_harmless(text)
        return text

    return run


def assert_harmless(text: str) -> None:
    """Every character is printable, and no line begins where another's text said so."""
    assert {letter for letter in text if not letter.isprintable()} <= {"\n"}, ascii(text)
    assert not [line for line in text.splitlines() if line.startswith("error: forged")]


@pytest.fixture
def failed_run(runs_dir: Path) -> Path:
    """Return a run of which every text that a peer sends is hostile."""
    told = dict.fromkeys(("host", "git_commit", "python"), HOSTILE)
    told |= {"command": [HOSTILE], "versions": {HOSTILE: HOSTILE}}
    publisher = Publisher("odd", info={**told, "config": {HOSTILE: HOSTILE, "nested": {HOSTILE: [HOSTILE]}}})
    publisher.publish(Event.FIT_START, hyperparameters={HOSTILE: HOSTILE, "nested": {HOSTILE: [HOSTILE]}})
    for batch in range(1, 4):
        metrics = {HOSTILE: float(batch), "text": HOSTILE}
        publisher.publish(Event.BATCH_END, batch=batch, loss=0.5, train_metrics=metrics, lr={HOSTILE: [0.1]})
    evaluated = {HOSTILE: {HOSTILE: 0.5}}
    publisher.publish(Event.EPOCH_END, epoch=1, batch=3, eval_metrics=evaluated, dataloader_label=HOSTILE)
    publisher.close("failed", HOSTILE)
    return runs_dir / "odd"


def test_texts_of_a_peer_are_escaped(failed_run, printed):
    text = printed("bus", "show", "odd", "--details", code=0)
    shown = "\\x1b]0;owned\\x07\\x1b[2J\\x00\\x9b31m\\u202e\\u2066\\u200b\\u2028\\ufeff\\r\\nerror: forged\\x7f\\x08"
    assert text.count(shown) > 5
    assert json.loads(printed("bus", "show", "odd", "--json"))["error"] == HOSTILE
    printed("bus", "runs", code=0)
    for loggers in ("console", "jsonl", "csv"):
        text = printed("consumer", "--replay", failed_run, "-c", "metrics,lr,speed", "--log", loggers)
        assert "run odd failed: \\x1b]0;owned" in text


def test_texts_of_a_run_file_are_escaped(failed_run, printed):
    path = failed_run / "run.json"
    record = json.loads(path.read_text())
    record["name"] = HOSTILE
    record["attempts"][0]["status"] = HOSTILE
    record["attempts"][0]["error"] = HOSTILE + "\udcff"
    path.write_text(json.dumps(record))
    for words in (("show", failed_run, "--details"), ("runs",), ("show", "missing")):
        printed("bus", *words)


def test_texts_of_recordings_are_escaped_by_every_command(runs_dir, tmp_path, printed):
    fields = {"loss": 0.5, HOSTILE: HOSTILE, "train_metrics": {HOSTILE: 1.0}}
    ending = Entry("$end", fields={"status": "failed", "error": HOSTILE})
    sent = {"command": "set", "arguments": ["lr", HOSTILE], "id": "1", "event": "batch_end", "error": HOSTILE}
    marks = [Entry("$command", fields=sent), Entry(HOSTILE.replace("\0", ""))]
    a, b = tmp_path / "a.mcap", tmp_path / "b.mcap"
    write_recording(a, [Entry(batch=1, fields=fields), *marks, ending])
    write_recording(b, [Entry(batch=1, fields={**fields, HOSTILE: "other", "train_metrics": {HOSTILE: 2.0}}), ending])
    for arguments in (
        ("bus", "show", a),
        ("bus", "compare", a, b, "--events"),
        ("bus", "convert", a, b, "-o", tmp_path / "n.mcap"),
        *(("bus", "export", a, "--to", to, "-o", tmp_path / f"e.{to}") for to in ("csv", "trace")),
        ("consumer", "--replay", a, "-c", "metrics"),
    ):
        assert "\\x1b" in printed(*arguments) or arguments[1] in ("convert", "export")


def test_names_of_files_are_escaped(tmp_path, printed):
    path = tmp_path / f"a{HOSTILE[:8]}\n.mcap"
    write_recording(path, [Entry(batch=1)])
    assert "\\x1b]0;owne\\n" in printed("bus", "show", path)
    assert "\\x1b]0;owne" in printed("bus", "show", f"{path}.missing", code=1)
    assert "\\x1b]0;owne" in printed("bus", f"{path}.missing", code=2)


def test_names_and_reports_of_a_run_s_consumers_are_escaped(runs_dir, printed):
    with Publisher("live") as publisher:
        publisher.publish(Event.BATCH_END, batch=1)
        with Subscriber("live", name=HOSTILE):
            wait_for(lambda: describe_run(find_run("live"))["statistics"]["consumers"], "the consumer's lease")
            assert "\\x1b]0;owned" in printed("bus", "show", "live", "--details", code=0)


def test_what_is_logged_is_escaped():
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    logging.getLogger().addHandler(handler)
    try:
        for name in LOGGERS:
            logging.getLogger(name).warning("run %s: %s", "r", HOSTILE)
    finally:
        logging.getLogger().removeHandler(handler)
    logged = written.getvalue()
    assert logged.count("run r: \\x1b]0;owned") == len(LOGGERS)
    assert_harmless(logged)


def test_tracebacks_in_a_log_are_escaped():
    # As uvicorn and NiceGUI print them, which name what any client sent.
    guarded_server(Gate, Listening("127.0.0.1"), None, 1)
    handler = logging.StreamHandler(io.StringIO())
    try:
        raise ValueError(HOSTILE.replace("\n", ""))
    except ValueError:
        for name in ("offloop", "nicegui", "uvicorn.error", "asyncio"):
            logging.getLogger(name).addHandler(handler)
            logging.getLogger(name).warning("http://%s not found", HOSTILE, exc_info=True)
            logging.getLogger(name).removeHandler(handler)
    printed = handler.stream.getvalue()
    assert printed.count("ValueError: \\x1b]0;owned") == printed.count("http://\\x1b]0;owned") == 4
    assert_harmless(printed)


def test_a_notice_that_cannot_be_printed_is_left_out_and_output_is_an_error(monkeypatch):
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setattr("sys.stdout", stream)
        say("a notice", err=True)
        notice("a notice")
        with contextlib.nullcontext() if stream is None else pytest.raises(ValueError, match="closed"):
            say("output")


def test_every_logger_of_the_project_escapes():
    used = {
        name
        for package in ("bus", "trainer", "consumers")
        for file in (ROOT / package).rglob("*.py")
        for name in re.findall(r"getLogger\(\"([^\"]+)\"\)", file.read_text())
    }
    assert used - {"apprise"} == set(LOGGERS)  # whose records go nowhere


def test_what_a_broker_logs_is_escaped(runs_dir):
    with Publisher("odd") as publisher:
        publisher.publish(Event.BATCH_END, batch=1)
        log = runs_dir / "odd" / "broker.log"
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.connect(json.loads((runs_dir / "odd" / "broker.json").read_text())["control_endpoint"])
            for frame in (encode_control(HOSTILE, {}), f"{HOSTILE[:40]}/a/b".encode() + b"\0", b"nothing"):
                peer.send(frame)
            wait_for(lambda: log.exists() and log.read_text().endswith("\n"), "a line in the log")
    assert_harmless(log.read_text())


def test_ordinary_text_of_any_language_is_left_as_it_is():
    for text in ("größer als 1\u202f000\u00a0€", "學習率", "ضریب", "😀 C:\\runs", "東京\u3000都", ""):
        assert escape(text) == one_line(text) == text
    assert one_line("two\n  lines") == "two lines"
    assert_harmless(str(OffloopError(f"the broker says: {HOSTILE}")))


def test_what_the_encoding_of_the_output_lacks_is_escaped():
    code = "from offloop.bus.printing import say; say('größer 學'); say('größer 學', err=True)"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True, cwd=ROOT)
    assert done.stdout == done.stderr == b"gr\\xf6\\xdfer \\u5b78\n"
