"""Channels: where notices are sent, and what is said when that fails, never with a secret."""

import socket
import sys
from pathlib import Path

import pytest
from commands import command
from receivers import Receiver

from offloop.bus.errors import ConfigurationError
from offloop.consumers.callbacks import channels
from offloop.consumers.callbacks.channels import deliver, open_channels
from offloop.consumers.cli.main import main

MESSAGE = {"title": "failed: r", "body": "boom <b>", "notify_type": "failure"}
SECRET = "json://user:hidden-word@127.0.0.1:1/hook-of-mine"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_PAUSES", (0.0, 0.01, 0.01))


def test_a_service_that_refuses_is_tried_again_and_the_others_get_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with Receiver([500, 500]) as slow, Receiver() as good:
        monkeypatch.setenv("MINE", f"{slow.url}\n{good.url}")
        sent: list[str] = []
        assert deliver(open_channels(["env:MINE"]), MESSAGE, None, sent.append) == {}
    assert sent == ["env:MINE#2", "env:MINE#1"]
    assert (slow.refused, len(slow.got), [one["message"] for one in good.got]) == (2, 1, ["boom <b>"])


def test_what_cannot_be_reached_is_named_without_its_secrets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "to"
    file.touch(0o600)
    file.write_text(f"# mine\n{SECRET}\n")
    problems = deliver(open_channels([f"file:{file}"]), MESSAGE, None, print)
    assert list(problems) == [f"file:{file}#1"]
    assert "onnection error" in problems[f"file:{file}#1"]
    assert "hidden" not in str(problems) + caplog.text


def test_a_service_that_never_answers_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        opened = open_channels([f"json://127.0.0.1:{silent.getsockname()[1]}?rto=1&cto=1"])
        assert list(deliver(opened, MESSAGE, None, print).values()) == ["no answer within 0.2 s"]


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("env:MINE", "$MINE has no address: put one into it"),
        ("file:/nowhere/to", "the file of addresses /nowhere/to cannot be read: No such file"),
        ("file:open", "the file of addresses open is open to others (mode 0644): chmod 600 open"),
        (SECRET, "the address json://... has a secret"),
        ("json://127.0.0.1/?+X-Token=hidden-word", "the address json://... has a secret"),
        ("slakc://hidden-word", "the address slakc://... is not one of a service that Apprise knows"),
    ],
)
def test_an_address_that_cannot_be_used_is_an_error_without_it(
    to: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("open").write_text(SECRET)
    Path("open").chmod(0o644)
    consumer = command("consumer", main, monkeypatch, capsys)
    told = consumer("--callbacks", "alert", "-o", "alert.rules=nan", "-o", f"alert.to={to}")
    assert (told.code, told.err.startswith(f"error: {said}"), "hidden" in told.err) == (1, True, False), told.err


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"needs apprise: install it with pip install 'offloop\[alerts\]'"):
        open_channels(["json://127.0.0.1"])
