"""Who gets to a dashboard, who may command there, and what is said to those who may not."""

import asyncio
import ssl
import stat
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from browser import chromium, running, ui_of, visit
from commands import command
from helpers import wait_for
from playwright.sync_api import Browser

from offloop.bus.errors import ConfigurationError, OffloopError
from offloop.bus.terminal import run_command
from offloop.bus.types.commands import Command, Outcome
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.web.access import Listening, Role, Tokens
from offloop.consumers.dashboard.web.callback import Dashboard
from offloop.consumers.dashboard.web.command import ui
from offloop.consumers.dashboard.web.gate import ROLE, Gate
from offloop.consumers.dashboard.web.page import send_for

pytestmark = pytest.mark.timeout(120)

LOSS = "loss/train/total"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    files = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=127.0.0.1"
    subprocess.run([*command.split(), "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    return files


def fetch(url: str, context: ssl.SSLContext | None = None, **headers: str) -> tuple[int, str]:
    """Status and text of what a program gets that is no browser and follows redirections without cookies."""
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, context=context, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_tokens_are_made_for_their_owner_alone_and_tell_roles_apart(tmp_path):
    file = tmp_path / "tokens.txt"
    made = Tokens.load(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert Tokens.load(file) == made
    assert made.role_of(made.command) is Role.COMMAND
    assert made.role_of(made.view) is Role.VIEW
    assert [made.role_of(wrong) for wrong in ("", made.view[:-1], "ä" * 43)] == [None] * 3


@pytest.mark.parametrize(
    ("content", "mode"),
    [
        ("command {0}\nview {1}\n", 0o644),
        ("command {0}\n", 0o600),
        ("command short\nview {1}\n", 0o600),
        ("command {0}\nview {0}\n", 0o600),
    ],
)
def test_a_token_file_that_protects_nothing_is_refused(tmp_path, content, mode):
    file = tmp_path / "tokens.txt"
    file.write_text(content.format("a" * 32, "b" * 32))
    file.chmod(mode)
    with pytest.raises(ConfigurationError):
        Tokens.load(file)


@pytest.mark.needs("openssl")
def test_other_machines_are_let_in_with_tokens_and_tls_only(tmp_path, certificate):
    for refused in (
        Listening("0.0.0.0"),
        Listening("::", as_flags=True),
        Listening("0.0.0.0", tokens=tmp_path / "tokens.txt"),
        Listening(certificate=certificate[0]),
        Listening(certificate=certificate[1], certificate_key=certificate[0]),
    ):
        with pytest.raises(ConfigurationError):
            refused.check()
    Listening("0.0.0.0", None, tmp_path / "tokens.txt", *certificate).check()


def test_the_address_that_is_told_can_be_opened():
    assert Listening("0.0.0.0").url(8420) == "http://localhost:8420/"
    assert Listening("::1").url(8420) == "http://[::1]:8420/"


async def test_a_viewer_cannot_send_commands_whatever_is_called():
    run = RunView("run")
    sent = []

    def command(name: str) -> Outcome:
        sent.append(name)
        return Outcome(Command(name), "batch_end", 3)

    run.command = command
    run.note("text", "begins")
    assert "viewing only" in await send_for(Role.VIEW, run, "stop")
    assert sent == []


async def test_a_run_that_is_over_takes_no_commands():
    run = RunView("run")
    with pytest.raises(OffloopError, match="it is waiting"):
        run.send("stop")
    assert "it is waiting" in await send_for(Role.COMMAND, run, "stop")


class Answer:
    """What the gate says to one request."""

    def __init__(self, tokens: Tokens | None, path: str, query: str = "", cookie: str = "") -> None:
        self.admitted: Role | None = None
        self.messages: list[MutableMapping[str, Any]] = []

        async def application(scope: Any, receive: Any, send: Any) -> None:
            self.admitted = scope[ROLE]

        async def receive() -> MutableMapping[str, Any]:
            return {}

        async def send(message: MutableMapping[str, Any]) -> None:
            self.messages.append(message)

        headers = [(b"host", b"127.0.0.1"), (b"cookie", cookie.encode())]
        scope = {"type": "http", "path": path, "query_string": query.encode(), "headers": headers}
        asyncio.run(Gate(application, tokens, "127.0.0.1", "name", False)(scope, receive, send))

    def header(self, name: bytes) -> bytes:
        """One that is sent back."""
        return dict(self.messages[0]["headers"])[name]


def test_a_token_leads_to_this_host_alone_and_cookies_of_others_do_no_harm():
    tokens = Tokens("c" * 32, "v" * 32)
    location = Answer(tokens, "/runs", f"run=a%26b&token={tokens.view}&run=c").header(b"location")
    assert location == b"/runs?run=a%26b&run=c"
    for path in ("//evil.example/", "/\\evil.example/", "/view\r\nset-cookie: a=b"):
        location = Answer(tokens, path, f"token={tokens.view}").header(b"location")
        assert location.startswith(b"/")
        assert location[1:2] not in (b"/", b"\\")
        assert b"\r" not in location
        assert b"\n" not in location
    assert Answer(tokens, "/", cookie=f'other={{"a": [1, 2]}}; name={tokens.view}').admitted is Role.VIEW
    assert Answer(tokens, "/", cookie="name=").admitted is None


@pytest.mark.slow
@pytest.mark.needs("chromium", "openssl")
def test_links_with_tokens_over_tls(runs_dir, browser, tmp_path, certificate):
    file = tmp_path / "tokens.txt"
    tls = ("--certificate", str(certificate[0]), "--certificate-key", str(certificate[1]))
    trusting = ssl.create_default_context(cafile=str(certificate[0]))
    trusting.check_hostname = False
    with running("guarded") as run:
        wait_for(lambda: (runs_dir / "guarded" / "run.json").exists(), "the run")
        with ui_of("guarded", "--host", "0.0.0.0", "--tokens", str(file), *tls) as served:
            url = served.url.replace("localhost", "127.0.0.1")
            assert url.startswith("https://")
            assert str(file) in served.has_said("dashboard: ")
            tokens = Tokens.load(file)
            for wrong in ("", "?token=wrong", f"?token={tokens.view}x"):
                status, text = fetch(url + wrong, trusting)
                assert (status, "Open the whole link" in text) == (401, True)
            status, _ = fetch(f"{url}_nicegui_ws/socket.io/?EIO=4&transport=polling", trusting)
            assert status == 401
            status, _ = fetch(url, trusting, Cookie=f"offloop_dashboard_{served.port}={tokens.view}x")
            assert status == 401
            assert fetch(f"{url}run-content/none/image?name=a&step=1", trusting)[0] == 401

            with visit(browser, f"{url}?token={tokens.view}", ignore_https_errors=True) as viewer:
                viewer.waits_for(lambda: len(viewer.points(LOSS)) > 5, "points")
                assert "token" not in viewer.page.url
                viewer.sees("view only")
                assert viewer.page.get_by_role("button", name="stop", exact=True).count() == 0
                with visit(browser, f"{url}?token={tokens.command}", ignore_https_errors=True) as commander:
                    commander.waits_for(lambda: len(commander.points(LOSS)) > 5, "points")
                    commander.page.get_by_role("button", name="Link for viewers").click()
                    commander.sees("shows everything, and cannot command")
                    commander.page.keyboard.press("Escape")
                    stop = commander.page.get_by_role("button", name="stop", exact=True)
                    stop.wait_for()
                    # The events of the other's buttons, sent from the viewer's page.
                    listeners = commander.page.evaluate(_LISTENERS)
                    assert listeners
                    viewer.page.evaluate(_SEND_EVENTS, [viewer.page.evaluate("window.clientId"), listeners])
                    # The same in the name of the other's page.
                    viewer.page.evaluate(_SEND_EVENTS, [commander.page.evaluate("window.clientId"), listeners])
                    viewer.page.evaluate(_SEND_MALFORMED)
                    before = viewer.points(LOSS)[-1][0]
                    viewer.waits_for(lambda: viewer.points(LOSS)[-1][0] > before + 100, "a training that goes on")
                    assert run.poll() is None
                    assert not any("took effect" in line for line in viewer.page.locator(".log").all_inner_texts())
                    assert commander.page.locator(".run-answer").is_hidden()
                    dialog = commander.page.get_by_role("alertdialog")
                    assert dialog.count() == 0
                    stop.click()
                    dialog.get_by_role("button", name="Stop").click()
                    assert "trained" in run.communicate(timeout=60)[0]
            assert not any("exception" in line for line in served.said)


_LISTENERS = """() => Object.entries(mounted_app.elements).flatMap(
    ([id, element]) => element.events.map((event) => [Number(id), event.listener_id]))"""
_SEND_EVENTS = """([client_id, listeners]) => {
    for (const [id, listener_id] of listeners) window.socket.emit("event", {id, client_id, listener_id, args: []});
}"""

_SEND_MALFORMED = """() => {
    for (const name of ["connect", "handshake"]) window.socket.packet({type: 2, data: [name, "a"]});
}"""


@pytest.mark.slow
def test_it_can_be_given_to_a_trainer_which_sends_it_to_another_process(tmp_path):
    given = Dashboard("127.0.0.2", 0, tmp_path / "tokens.txt", every=7)
    made = cloudpickle.loads(cloudpickle.dumps(given))
    try:
        assert made.every == 7
        made.begin()
        assert made.url.startswith("http://127.0.0.2:")
        assert fetch(made.url)[0] == 401
    finally:
        made.run_ended(None)
        made.post_close()


@pytest.mark.slow
def test_on_this_machine_pages_of_others_and_a_port_in_use_are_refused(runs_dir, monkeypatch, capsys):
    here = command("ui", lambda: run_command(ui), monkeypatch, capsys)
    with ui_of("none", "--wait") as served:
        assert fetch(served.url)[0] == 200
        assert fetch(served.url, Host="rebound.example:80")[0] == 403
        assert fetch(served.url, Host=f"localhost:{served.port}")[0] == 200
        assert fetch(served.url, Origin="http://evil.example")[0] == 403
        assert fetch(served.url, Origin="http://[")[0] == 403
        embedded = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
        assert fetch(served.url, **embedded)[0] == 403
        assert fetch(served.url, **embedded | {"Sec-Fetch-Dest": "document"})[0] == 200
        assert fetch(f"{served.url}_nicegui_ws/socket.io/?EIO=4&transport=polling", Origin="null")[0] == 403
        with pytest.raises(ConfigurationError):
            Dashboard(port=served.port).begin()
        refused = here("none", "--wait", "--port", served.port)
        assert (refused.code, "--port" in refused.err.splitlines()[-1]) == (1, True)
    refused = here("nobody", "--port", "0")
    assert refused.code == 1
    assert [line.startswith("error: no run 'nobody'") for line in refused.err.splitlines()] == [True]
