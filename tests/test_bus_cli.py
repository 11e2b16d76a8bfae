"""The command ``bus``: what people see of their runs."""

import json
from importlib.metadata import EntryPoint, EntryPoints

import click
import pytest
from brokers import free_address, start_broker
from click.testing import CliRunner
from helpers import wait_for
from training import Act, gold_trainer

from bus import ConfigurationError, Event, Publisher, RecordingError, RunDirectoryError, Subscriber, cli, find_run
from bus.cli import bus


def invoke(*arguments):
    result = CliRunner().invoke(bus, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def two_runs(runs_dir):
    for name, batches in (("first", 3), ("second", 5)):
        with Publisher(name, info={"config": {"lr": 0.1}}) as publisher:
            for batch in range(1, batches + 1):
                publisher.publish(Event.BATCH_END, epoch=1, batch=batch, sample=batch * 10)
            publisher.publish(Event.FIT_END, epoch=1, batch=batches)
    return runs_dir


def test_runs_are_listed_the_newest_first(two_runs):
    lines = invoke("runs").splitlines()
    assert lines[0].split() == ["RUN", "STATUS", "STARTED", "LASTED", "RECORDING"]
    assert [line.split()[:2] for line in lines[1:]] == [["second", "finished"], ["first", "finished"]]
    assert lines[1].endswith(str(two_runs / "second" / "recording-1.mcap"))


def test_live_runs_are_told_from_ended_ones(two_runs):
    with Publisher("third"):
        assert [line.split()[:2] for line in invoke("runs", "--live").splitlines()[1:]] == [["third", "live"]]
        assert [run["status"] for run in json.loads(invoke("runs", "--json"))] == ["live", "finished", "finished"]
    assert "no live runs" in invoke("runs", "--live")


def test_without_runs_it_says_how_to_make_one(runs_dir):
    assert invoke("runs") == f"no runs in {runs_dir}; 'trainer digits' makes one\n"


def test_info_describes_a_run_by_name_by_folder_and_by_recording(two_runs):
    by_name = invoke("info", "second")
    assert by_name == invoke("info", two_runs / "second")
    described = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in by_name.splitlines()}
    assert described["status"] == "finished"
    assert described["events"] == "batch_end 5, fit_end 1"
    assert described["config"] == "lr 0.1"
    assert "offloop" in described["versions"]
    file = json.loads(invoke("info", "--json", two_runs / "second" / "recording-1.mcap"))
    assert file["run"] == "second"
    assert file["reached"] == {"epoch": 1, "batch": 5, "sample": 0}
    assert (file["gaps"], file["damage"]) == ([], [])
    assert file["events"] == {"batch_end": 5, "fit_end": 1}


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"name": "first", "attempts": [{"started": "x"}]}'])
def test_one_damaged_run_does_not_hide_the_others(two_runs, content, caplog):
    (two_runs / "first" / "run.json").write_text(content)
    assert [line.split()[0] for line in invoke("runs").splitlines()[1:]] == ["second"]
    assert "first" in caplog.text
    with pytest.raises(RunDirectoryError, match=r"run.json"):
        find_run("first")


def test_info_names_damage(two_runs):
    path = two_runs / "first" / "recording-1.mcap"
    path.write_bytes(path.read_bytes()[:300])
    assert "ends within" in invoke("info", "first")
    path.write_bytes(b"")
    with pytest.raises(RecordingError, match="is empty: nothing was recorded in it"):
        invoke("info", path)


def test_every_command_has_help():
    for command in bus.commands.values():
        assert command.help
        assert all(option.help for option in command.params if isinstance(option, click.Option))


def test_a_command_of_another_package_that_cannot_be_loaded_hides_no_other(monkeypatch):
    points = EntryPoints([EntryPoint("broken", "no_such_package:command", "offloop.commands")])
    monkeypatch.setattr(cli, "entry_points", lambda group: points.select(group=group))
    listing = invoke("--help")
    assert "broken" in listing
    assert "replay" in listing
    for arguments in (["broken"], ["broken", "--port", "5"]):
        told = CliRunner().invoke(bus, arguments).exception
        assert isinstance(told, ConfigurationError)
        assert str(told) == (
            "command 'broken' of a package cannot be loaded: ModuleNotFoundError: No module named 'no_such_package'; "
            "update or remove a package"
        )


def test_a_live_run_is_told_to_stop(two_runs):
    with Publisher("third") as publisher:
        assert (
            invoke("stop", "third", "--wait", "0") == "run third: 'stop' was handed on and has not taken effect yet\n"
        )
        wait_for(lambda: publisher.poll() or publisher.stop_requested, "the publisher to be told")
    with pytest.raises(ConfigurationError, match="'first' is finished, so there is nobody to tell"):
        invoke("stop", "first")


def test_a_training_that_is_told_to_stop_ends_as_stopped_with_a_checkpoint(runs_dir, tmp_path):
    seen = []

    def note(event, state, logger):
        seen.append(int(state.timestamp.batch))
        if len(seen) == 3:
            invoke("stop", "told", "--wait", "0")
            wait_for(lambda: trainer._publisher.poll() or trainer._control.waiting, "the trainer to be told")

    with gold_trainer(
        publish=True, run_name="told", save_folder=tmp_path, algorithms=Act(note, Event.BATCH_START)
    ) as trainer:
        trainer.fit()
    assert seen == [0, 1, 2]
    assert find_run("told").status == "stopped"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "ep0-ba3-rank0.safetensors",
        "latest-rank0.safetensors",
    ]


def test_info_of_a_live_run_says_how_everybody_is_doing(runs_dir):
    with Publisher("r") as publisher, Subscriber("r", name="watcher") as subscriber:
        following = iter(subscriber)
        for batch in range(1, 101):
            publisher.publish(Event.BATCH_END, batch=batch)
        assert next(following).seq == 1

        def told():
            publisher.publish(Event.EPOCH_END)
            statistics = json.loads(invoke("info", "--json", "r"))["statistics"]
            publishers, consumers = statistics["publishers"], statistics["consumers"]
            return publishers["0"] and consumers and publishers["0"]["published"] > 100 and statistics

        statistics = wait_for(told, "the first reports")
        assert statistics["publishers"]["0"]["dropped"] == 0
        assert statistics["publishers"]["0"]["nanoseconds_per_event"] > 0
        assert statistics["broker"]["collected"] > 100
        assert [consumer["name"] for consumer in statistics["consumers"]] == ["watcher"]
        text = invoke("info", "r")
        assert "us each for the training" in text
        assert "watcher" in text


def test_runs_and_info_ask_a_broker_elsewhere(runs_dir):
    address = free_address()
    broker = start_broker(address)
    try:
        with Publisher("r", broker=address) as publisher:
            publisher.publish(Event.BATCH_END, batch=1)
            (run,) = json.loads(invoke("runs", "--broker", address, "--json", "--live"))
            assert (run["run"], run["status"], run["attempt"]) == ("r", "live", 1)
            assert "live" in invoke("runs", "--broker", address)
            assert json.loads(invoke("info", "r", "--broker", address, "--json"))["statistics"]["broker"]["runs"] == 1
            told = invoke("stop", "r", "--broker", address, "--wait", "0")
            assert told == "run r: 'stop' was handed on and has not taken effect yet\n"
        assert "finished" in invoke("info", "r", "--broker", address)
    finally:
        broker.terminate()
        broker.communicate(timeout=20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["broker", "--listen", "ipc://x"], "'ipc://x' is not an address to listen at"),
        (["broker", "--listen", "tcp://127.0.0.1:abc"], "is not an address to listen at"),
        (["broker", "--listen", "tcp://10.0.0.1:5570"], "cannot listen at 'tcp://10.0.0.1:5570' without keys"),
        (["runs", "--broker", "tcp://127.0.0.1:1", "--runs-dir", "there"], "does not go with --runs-dir"),
        (["info", "r", "--key", "mine"], "name it with --broker"),
    ],
)
def test_a_wrong_option_is_named(runs_dir, arguments, message):
    result = CliRunner().invoke(bus, arguments)
    assert result.exit_code != 0
    assert message in f"{result.output}{result.exception}"
