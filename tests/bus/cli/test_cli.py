"""The command ``offloop``: details of runs, help, and commands of other packages."""

import errno
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from helpers import wait_for
from plugin_files import install
from recorded_runs import write_foreign

from offloop.bus import (
    ConfigurationError,
    Event,
    Publisher,
    RecordingError,
    RunDirectoryError,
    RunNotFoundError,
    Subscriber,
    find_run,
)
from offloop.bus.cli.describe import lines
from offloop.bus.cli.main import bus
from offloop.bus.runs import lock as run_lock
from offloop.bus.terminal import run_command
from offloop.bus.tools.convert import convert
from offloop.bus.types.commands import Command
from offloop.bus.types.timestamp import Timestamp
from offloop.bus.types.units import duration


def invoke(*arguments):
    result = CliRunner().invoke(bus, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def recorded():
    """Two runs that have ended."""
    with tempfile.TemporaryDirectory(prefix="ol-", dir="/tmp") as folder:
        for name, batches in (("first", 3), ("second", 5)):
            with Publisher(name, runs_dir=folder, info={"config": {"lr": 0.1}}) as publisher:
                for batch in range(1, batches + 1):
                    publisher.publish(Event.BATCH_END, epoch=1, batch=batch, sample=batch * 10)
                publisher.publish(Event.FIT_END, epoch=1, batch=batches)
        yield Path(folder)


@pytest.fixture
def two_runs(recorded, runs_dir):
    shutil.copytree(recorded, runs_dir, dirs_exist_ok=True)
    return runs_dir


def test_runs_are_listed_the_newest_first(two_runs):
    lines = invoke("runs").splitlines()
    assert lines[0].split() == ["RUN", "STATUS", "REACHED", "STARTED", "DURATION"]
    assert [line.split()[:2] for line in lines[1:]] == [["second", "finished"], ["first", "finished"]]
    with Publisher("third"):
        assert [line.split()[:2] for line in invoke("runs", "--live").splitlines()[1:]] == [["third", "live"]]
        assert [run["status"] for run in json.loads(invoke("runs", "--json"))] == ["live", "finished", "finished"]
    assert "no live runs" in invoke("runs", "--live")


def test_the_environment_names_the_servers_where_nothing_of_this_machine_is_named(two_runs, nats_server, monkeypatch):
    monkeypatch.setenv("OFFLOOP_STREAM", nats_server.address)
    assert invoke("runs") == f"no runs at {nats_server.address}\n"
    assert CliRunner().invoke(bus, ["show", "first"]).exit_code == 1
    assert "second" in invoke("runs", "--runs-dir", two_runs)
    assert "finished" in invoke("show", two_runs / "first")
    assert "the same hyperparameters" in invoke("compare", "first", "second")


def test_the_help_has_every_command_once_on_one_screen():
    lines = invoke("--help").splitlines()
    assert len(lines) <= 40
    listed = dict(line.split(maxsplit=1) for line in lines[lines.index("Train and watch:") :] if line.startswith("  "))
    context = click.Context(bus)
    commands = {name: bus.get_command(context, name) for name in bus.list_commands(context)}
    assert listed == {name: command.get_short_help_str(80) for name, command in commands.items()}
    assert list(listed)[:4] == ["train", "consume", "run", "ui"]


def test_without_runs_it_says_how_to_make_one(runs_dir):
    assert invoke("runs") == f"no runs in {runs_dir}; 'trainer digits' makes one\n"


def test_show_has_the_details_of_a_run_by_name_by_folder_and_by_recording(two_runs):
    by_name = invoke("show", "second", "--details")
    assert by_name == invoke("show", two_runs / "second", "--details")
    results, _, details = by_name.partition("details\n")
    assert results == invoke("show", "second")
    assert re.search(r"^status +finished$", results, re.MULTILINE)
    described = dict(line.split(maxsplit=1) for line in details.splitlines())
    # What the results say is not said again.
    assert not described.keys() & {"run", "status", "started", "lasted", "config"}
    assert described["events"] == "batch_end 5, fit_end 1"
    assert "offloop" in described["versions"]
    both = json.loads(invoke("show", "second", "--json"))
    assert both["details"]["events"] == {"batch_end": 5, "fit_end": 1}
    assert both["hyperparameters"] == {"config/lr": 0.1}
    recording = two_runs / "second" / "recording-1.mcap"
    assert re.search(r"^events +batch_end 5, fit_end 1$", invoke("show", recording), re.MULTILINE)
    assert invoke("show", recording, "--details") == invoke("show", recording)
    file = json.loads(invoke("show", recording, "--json"))["details"]
    assert file["run"] == "second"
    assert file["reached"] == {"epoch": 1, "batch": 5, "sample": 0, "planned": None}
    assert (file["gaps"], file["damage"]) == ([], [])
    assert file["events"] == {"batch_end": 5, "fit_end": 1}


def test_show_has_the_hyperparameters_of_a_training_in_a_section_of_their_own(runs_dir):
    described = {"seed": 17, "optimizer": {"lr": 0.1, "eps": 1e-8}, "config": {"task": "gold"}}
    with Publisher("r") as publisher:
        more = {"machine": {"device": "cpu"}, "git": {"commit": "1"}, "version": {"torch": "2"}, "command": "c"}
        publisher.publish(Event.FIT_START, hyperparameters=described | more)
    text, _, details = invoke("show", "r", "--details").partition("\ndetails\n")
    section = text.partition("\nhyperparameters\n")[2].splitlines()
    # What a person chose comes before what the optimizer has anyway.
    shown = [line.split() for line in section]
    assert shown == [["config/task", "gold"], ["seed", "17"], ["optimizer/lr", "0.1"], ["optimizer/eps", "1e-08"]]
    more = dict(line.split(maxsplit=1) for line in details.splitlines())
    assert more["machine/device"] == "cpu"
    # The lines "command", "git commit" and "versions" have these.
    assert not [name for name in more if name.startswith(("git/", "version/", "config/"))]
    of_recording = invoke("show", publisher.recording).partition("\nhyperparameters\n")[2]
    assert of_recording.split()[:2] == ["config/task", "gold"]


def test_show_names_damage(two_runs, tmp_path):
    path = two_runs / "first" / "recording-1.mcap"
    path.write_bytes(path.read_bytes()[:300])
    assert "ends within" in invoke("show", "first", "--details")
    path.write_bytes(b"")
    with pytest.raises(RecordingError):
        invoke("show", path)
    described = invoke("show", "first", "--details")
    assert re.search(r"^status +finished$", described, re.MULTILINE)
    assert re.search(r"^ *trouble +.*recording-1.mcap is empty", described, re.MULTILINE)
    write_foreign(tmp_path / "a.mcap")
    with pytest.raises(RecordingError, match=r"a\.mcap is not a recording"):
        invoke("show", tmp_path / "a.mcap")
    # What a part of a recording leaves out is no damage.
    convert([two_runs / "second" / "recording-1.mcap"], tmp_path / "b.mcap", "2ba", "4ba")
    assert re.search(r"^left out +event 1 of rank 0, events 5 to 6 ", invoke("show", tmp_path / "b.mcap"), re.MULTILINE)
    described = json.loads(invoke("show", "--json", tmp_path / "b.mcap"))["details"]
    assert described["left_out"] == [{"rank": 0, "first": 1, "last": 1}, {"rank": 0, "first": 5, "last": 6}]


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize("is_cut", [True, False])
def test_a_damaged_recording_has_an_exit_code_of_its_own_unless_it_grows(two_runs, options, is_cut):
    path = two_runs / "first" / "recording-1.mcap"
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : len(data) if is_cut else middle + 40] = b"" if is_cut else bytes(40)
    path.write_bytes(data)
    show = ["show", str(path), *options]
    result = CliRunner().invoke(bus, show)
    assert result.exit_code == 3
    assert "ends within" in result.output or "is damaged at offset" in result.output
    (path.parent / "broker.json").write_text('{"attempt": 1}')
    with (path.parent / "broker.lock").open("w") as lock:
        assert run_lock.take(lock.fileno())
        invoke(*show)


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "empty.mcap"],
        ["export", "empty.mcap", "--to", "csv"],
        ["convert", "empty.mcap", "-o", "whole.mcap"],
        ["compare", "empty.mcap", "empty.mcap", "--events"],
    ],
)
def test_every_command_says_that_a_recording_is_empty(runs_dir, tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    Path("empty.mcap").touch()
    monkeypatch.setattr(sys, "argv", ["offloop", *arguments])
    with pytest.raises(SystemExit):
        run_command(bus)
    assert capsys.readouterr().err == "error: empty.mcap is empty: nothing was recorded in it\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "./foreign"], "foreign is not a run: it has no run.json; 'offloop runs' lists the runs"),
        (["export", "a.mcap", "--to", "html"], "only a file of that name: this takes the name or the folder of a run"),
        (["runs", "--runs-dir", "nowhere"], "no such folder: nowhere"),
        (["rm", "--where", "lr > 0", "--runs-dir", "nowhere"], "no such folder: nowhere"),
    ],
)
def test_what_is_no_run_and_no_folder_is_named(runs_dir, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("foreign").mkdir()
    Path("a.mcap").touch()
    with pytest.raises((RunNotFoundError, RunDirectoryError), match=re.escape(message)):
        invoke(*arguments)


def test_a_misspelt_command_has_a_suggestion():
    result = CliRunner().invoke(bus, ["shw", "mine"])
    assert result.exit_code == 2
    assert "No such command 'shw': did you mean show" in result.output


def test_runs_that_cannot_be_looked_for_are_not_taken_for_none(runs_dir, monkeypatch):
    def refused(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "listdir", refused)
    with pytest.raises(RunDirectoryError, match="cannot be read: Permission denied"):
        invoke("runs")


def test_an_error_of_the_system_is_one_line(monkeypatch, capsys):
    @click.command()
    def failing():
        raise PermissionError(errno.EACCES, "Permission denied", "a/b")

    monkeypatch.setattr(sys, "argv", ["failing"])
    with pytest.raises(SystemExit) as ended:
        run_command(failing)
    assert (ended.value.code, capsys.readouterr().err) == (1, "error: a/b cannot be used: Permission denied\n")


def contexts(command=bus, name="offloop", parent=None):
    """Return the contexts of all commands that are no groups."""
    context = click.Context(command, parent=parent, info_name=name, terminal_width=80, **command.context_settings)
    if not isinstance(command, click.Group):
        yield context
        return
    for child in command.list_commands(context):
        yield from contexts(command.get_command(context, child), child, context)


def test_the_help_of_a_command_fits_on_a_screen_and_begins_with_its_frequent_options():
    for context in contexts():
        text, options = context.get_help(), [one for one in context.command.params if isinstance(one, click.Option)]
        lines = text.splitlines()
        assert context.command.help
        assert all(option.help for option in options)
        assert len(lines) <= 46, context.command_path
        assert max(map(len, lines)) <= 80
        assert "More options" in text or len([line for line in lines if re.match("  -", line)]) <= 9
        # Every option is in one of the lists.
        assert all(max(option.opts, key=len) in text for option in options if not option.hidden)


def test_every_command_that_ends_by_itself_answers_programs():
    runs_until_ended = {"alert", "train chars", "train digits", "consume", "run", "ui", "mcp", "server bridge"}
    without = {
        context.command_path.removeprefix("offloop ")
        for context in contexts()
        if not any("--json" in one.opts for one in context.command.params)
    }
    # What it writes is a configuration.
    assert without - runs_until_ended == {"server nats-config"}


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_package:command", "No module named 'no_such_package'"),
        ("os:getcwd", "os:getcwd is not a click command"),
        ("leaving_module:command", "SystemExit: 7"),
    ],
)
def test_a_command_of_another_package_that_cannot_be_loaded_hides_no_other(tmp_path, monkeypatch, target, reason):
    (tmp_path / "leaving_module.py").write_text("raise SystemExit(7)\n")
    install(tmp_path, "careless", f"[offloop.commands]\nodd = {target}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "convert" in invoke("--help")
    raised = CliRunner().invoke(bus, ["odd", "--port", "5"]).exception
    assert isinstance(raised, ConfigurationError)
    assert f"command 'odd' of careless cannot be loaded: {reason}" in str(raised).replace("ModuleNotFoundError: ", "")


def test_a_live_run_gets_commands(two_runs):
    with Publisher("third") as publisher:
        assert "has not taken effect yet" in invoke("send", "third", "stop", "--timeout", "0")
        (sent,) = json.loads(invoke("send", "third", "stop", "--reason", "enough", "--timeout", "0", "--json"))
        assert (sent["command"]["command"], sent["event"], sent["error"]) == ("stop", None, None)
        assert sent["command"]["reason"].endswith(": enough")
        wait_for(lambda: publisher.poll() or publisher.stop_requested, "the command")
    with pytest.raises(ConfigurationError):
        invoke("send", "first", "stop")


def test_details_of_a_live_run_have_the_state_of_its_trainer_and_consumers(runs_dir):
    events = [Event.BATCH_END, Event.AFTER_LOSS]
    with Publisher("r") as publisher, Subscriber("r", events=events, name="watcher") as subscriber:
        following = iter(subscriber)
        for batch in range(1, 101):
            publisher.publish(Event.BATCH_END, batch=batch)
        assert next(following).seq == 1

        def told():
            publisher.publish(Event.EPOCH_END)
            statistics = json.loads(invoke("show", "--json", "r"))["details"]["statistics"]
            publishers, consumers = statistics["publishers"], statistics["consumers"]
            return publishers and consumers and publishers[0].get("published", 0) > 100 and statistics

        statistics = wait_for(told, "the first reports")
        assert statistics["publishers"][0]["dropped"] == 0
        assert statistics["publishers"][0]["nanoseconds_per_event"] > 0
        assert statistics["broker"]["collected"] > 100
        (consumer,) = statistics["consumers"]
        assert consumer["name"] == "watcher"
        assert "after_loss" in consumer["events"]
        assert "lag" in consumer
        text = invoke("show", "r", "--details")
        assert "us each of the training thread's own time" in text
        assert "watcher" in text
    counts = {"published": 5000, "lag": 7, "dropped": 3, "resent": 2, "broker_restarts": 1}
    publishers = [{"rank": 1}, {"rank": 0, "nanoseconds_per_event": 1500, **counts}]
    statistics = {"publishers": publishers, "consumers": [{"given": 1000, "lag": 2, "missing": 4}], "trouble": "full"}
    assert [*lines({"run": "r", "statistics": statistics})][1:] == [
        (
            "rank 0",
            "5,000 events, 7 of them not on disk yet, 1.5 us each of the training thread's own time, 3 dropped, "
            "2 sent again, broker restarts: 1",
        ),
        ("consumers", "1"),
        ("  unnamed", "1,000 events, 2 behind, 4 missing"),
        ("trouble", "full"),
    ]


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["runs", "--stream", "nats://127.0.0.1:1", "--runs-dir", "there"], "--runs-dir"),
        (["compare", "a", "b", "--tolerance", "0.1"], "--tolerance"),
    ],
)
def test_a_wrong_option_is_named(runs_dir, arguments, option):
    result = CliRunner().invoke(bus, arguments)
    assert result.exit_code != 0
    assert option in f"{result.output}{result.exception}"


def test_durations_are_written_in_two_units() -> None:
    seconds = (0, 59.94, 59.96, 119.7, 3599.4, 3599.8, 90000)
    assert list(map(duration, seconds)) == ["0.0s", "59.9s", "1m00s", "2m00s", "59m59s", "1h00m", "25h00m"]


def test_a_paused_run_is_listed_as_paused(runs_dir):
    now = Timestamp(batch=7).values
    with Publisher("r") as publisher:
        publisher.publish(Event.BATCH_END, batch=7)
        wait_for(lambda: publisher.poll() or publisher.recorded_all, "the run")
        publisher.answer(Command("pause"), Event.BATCH_END, now)
        # The loop does nothing from here on.
        wait_for(lambda: find_run("r").status == "paused", "the pause")
        (line,) = invoke("runs", "--live").splitlines()[1:]
        assert line.split()[:2] == ["r", "paused"]
        (listed,) = json.loads(invoke("runs", "--json"))
        paused = json.loads(invoke("show", "r", "--json"))["details"]["paused"]
        assert listed["paused"] == paused == {"since": paused["since"], "batch": 7}
        assert ", after batch 7" in invoke("show", "r", "--details")
        # A refused command changes nothing.
        publisher.answer(Command("resume"), Event.BATCH_END, now, "no")
        publisher.answer(Command("resume"), Event.BATCH_END, now)
        wait_for(lambda: find_run("r").status == "live", "the end of the pause")
