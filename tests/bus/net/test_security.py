"""Keys, allow-lists and what a peer may do; and that nothing which comes from a peer is executed."""

import ast
import json
import os
import pickle
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgpack
import msgspec
import pytest
import zmq
from brokers import free_address
from click.testing import CliRunner, Result
from helpers import wait_for
from paths import ROOT

from offloop.bus import BrokerError, ConfigurationError, Event, Publisher, Recording, find_run
from offloop.bus.cli.main import bus
from offloop.bus.net.allow_list import AllowList, allow
from offloop.bus.net.curve import (
    CONTROL,
    STREAM,
    ClientSecurity,
    Gatekeeper,
    ServerSecurity,
    check_listen_address,
    client_security,
    server_security,
)
from offloop.bus.net.keys import load_public_key, load_secret_key, make_keys
from offloop.bus.net.requests import ask_broker
from offloop.bus.protocol.frames import Topic, decode_control, encode_control, split_frame
from offloop.bus.publisher.connection import BrokerConnection
from offloop.bus.subscriber.commands import send_command_through
from offloop.bus.types.timeouts import Timeouts
from offloop.bus.types.timestamp import Timestamp


@pytest.fixture(autouse=True)
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for keys, which every command uses unless told otherwise."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("OFFLOOP_KEYS_DIR", str(tmp_path / "keys"))
    for name in ("OFFLOOP_KEY", "OFFLOOP_BROKER_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "keys"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(bus, [str(argument) for argument in arguments])


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# -- keys -------------------------------------------------------------------------------------------------------------


def test_keygen_writes_a_pair_whose_secret_half_is_its_owners_alone(keys: Path) -> None:
    old = os.umask(0)
    try:
        result = invoke("server", "keygen", "anna")
    finally:
        os.umask(old)
    assert result.exit_code == 0, result.output
    assert "offloop server allow anna.key" in result.output
    assert (mode(keys), mode(keys / "anna.key_secret")) == (0o700, 0o600)
    assert sorted(path.name for path in keys.iterdir()) == ["anna.key", "anna.key_secret"]
    pair = load_secret_key(keys / "anna.key_secret")
    assert pair.public == load_public_key(keys / "anna.key") == zmq.curve_public(pair.secret)
    assert pair.secret.decode() not in repr(pair)


def test_keygen_for_a_user_without_a_home_says_what_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("OFFLOOP_KEYS_DIR", raising=False)
    monkeypatch.setattr(Path, "home", has_none)
    result = invoke("server", "keygen", "anna")
    assert "has no home directory to keep keys in: name a directory with OFFLOOP_KEYS_DIR" in str(result.exception)


@pytest.mark.parametrize("there", ["anna.key", "anna.key_secret"])
def test_keygen_never_replaces_a_key(keys: Path, there: str) -> None:
    make_keys("other")
    (keys / there).write_text("precious")
    result = invoke("server", "keygen", "anna")
    assert "there is a key 'anna'" in str(result.exception)
    assert (keys / there).read_text() == "precious"
    assert sum(path.name.startswith("anna") for path in keys.iterdir()) == 1


@pytest.mark.parametrize("name", ["", "../anna", "a b", "-x"])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot be a key's name"):
        make_keys(name)


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620, 0o602])
def test_a_secret_key_that_is_open_to_others_is_refused_with_the_command_that_closes_it(bits: int) -> None:
    _, secret = make_keys("anna")
    secret.chmod(bits)
    with pytest.raises(ConfigurationError, match=f"chmod 600 {secret}"):
        load_secret_key(secret)


def test_a_secret_key_in_a_directory_that_others_can_write_to_is_refused(keys: Path) -> None:
    _, secret = make_keys("anna")
    keys.chmod(0o770)
    with pytest.raises(ConfigurationError, match=f"chmod go-w {keys}"):
        load_secret_key(secret)


def test_the_wrong_half_of_a_pair_is_named_as_such() -> None:
    public, secret = make_keys("anna")
    with pytest.raises(ConfigurationError, match="holds a public key where a secret one is needed"):
        load_secret_key(public)
    with pytest.raises(ConfigurationError, match="holds a secret key where a public one is needed"):
        load_public_key(secret)


def test_damaged_key_files_are_named() -> None:
    _, secret = make_keys("anna")
    good = secret.read_text()
    key = load_secret_key(secret)
    for damaged in ("", "public-key", 'public-key = "short"', good[:-10], good.replace(key.public.decode(), "~" * 40)):
        secret.write_text(damaged)
        with pytest.raises(ConfigurationError, match=r"damaged|holds a public key"):
            load_secret_key(secret)
    secret.write_text(good.replace(key.public.decode(), zmq.curve_keypair()[0].decode()))
    with pytest.raises(ConfigurationError, match="do not belong together"):
        load_secret_key(secret)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_public_key("missing.key")


def test_the_keys_of_a_client_come_from_arguments_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert client_security() is None
    _, own = make_keys("anna")
    broker, _ = make_keys("broker")
    expected = ClientSecurity(load_secret_key(own), load_public_key(broker))
    assert client_security(own, broker) == expected
    monkeypatch.setenv("OFFLOOP_KEY", str(own))
    with pytest.raises(ConfigurationError, match="--broker-key"):
        client_security()
    monkeypatch.setenv("OFFLOOP_BROKER_KEY", str(broker))
    assert client_security() == expected
    monkeypatch.delenv("OFFLOOP_KEY")
    with pytest.raises(ConfigurationError, match="none of your own"):
        client_security()


# -- the allow-list ---------------------------------------------------------------------------------------------------


def test_allow_adds_a_line_for_each_role_once(keys: Path) -> None:
    public, _ = make_keys("anna")
    assert "anna may view, command" in invoke("server", "allow", public, "--role", "view", "--role", "command").output
    (keys / "allowed").write_text("# ours\n" + (keys / "allowed").read_text())
    assert "allowed that already" in invoke("server", "allow", public, "--role", "view").output
    assert mode(keys / "allowed") == 0o600
    key = load_public_key(public).decode()
    assert (keys / "allowed").read_text() == f"# ours\nview {key} anna\ncommand {key} anna\n"
    assert invoke("server", "allow", "--show").output == f"view     {key} anna\ncommand  {key} anna\n"
    assert sorted(path.name for path in keys.iterdir()) == ["allowed", "anna.key", "anna.key_secret"]


def test_allow_takes_no_secret_keys_and_no_unknown_roles() -> None:
    public, secret = make_keys("anna")
    assert "holds a secret key" in str(invoke("server", "allow", secret, "--role", "view").exception)
    assert "'root' is not one of" in invoke("server", "allow", public, "--role", "root").output
    assert "give a public key file and a role" in invoke("server", "allow", public).output


def test_a_name_stays_within_its_line(keys: Path) -> None:
    key = zmq.curve_keypair()[0]
    allow(keys / "allowed", key, f"x\ncommand {key.decode()} y", ["view"])
    assert not AllowList.read(keys / "allowed").may(key.decode(), "command")


@pytest.mark.parametrize("line", ["view", "view short anna", "root {key} anna", "view {key}x anna", "viewer\x00"])
def test_a_damaged_line_is_named_by_its_number(keys: Path, line: str) -> None:
    key = zmq.curve_keypair()[0].decode()
    keys.mkdir(mode=0o700)
    (keys / "allowed").write_text(f"# comment\nview {key} anna\n\n{line.format(key=key)}\n")
    with pytest.raises(ConfigurationError, match="line 4 of the allow-list"):
        AllowList.read(keys / "allowed")


def test_a_list_that_others_can_write_to_is_refused(keys: Path) -> None:
    _, secret = make_keys("broker")
    allow(keys / "allowed", zmq.curve_keypair()[0], "anna", ["view"])
    assert server_security(secret, None) is not None
    (keys / "allowed").chmod(0o620)
    with pytest.raises(ConfigurationError, match=f"chmod go-w {keys}/allowed"):
        server_security(secret, None)


# -- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:1", "tcp://*:1", "tcp://10.0.0.1:1", "tcp://[::]:1", "tcp://eth0:1"]
)
def test_only_loopback_is_listened_at_without_keys(keys: Path, address: str) -> None:
    with pytest.raises(ConfigurationError, match="offloop server keygen"):
        check_listen_address(address, None)
    _, secret = make_keys("broker")
    allow(keys / "allowed", zmq.curve_keypair()[0], "anna", ["view"])
    check_listen_address(address, server_security(secret, None))


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://localhost:5570", "tcp://[::1]:5570", "ipc:///x"])
def test_loopback_is_listened_at_without_keys(address: str) -> None:
    check_listen_address(address, None)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1", "tcp://127.0.0.1:70000", "udp://127.0.0.1:1", "tcp://a b:1"])
def test_what_is_no_address_is_refused_with_and_without_keys(keys: Path, address: str) -> None:
    _, secret = make_keys("broker")
    allow(keys / "allowed", zmq.curve_keypair()[0], "anna", ["view"])
    for security in (None, server_security(secret, None)):
        with pytest.raises(ConfigurationError, match="cannot listen at"):
            check_listen_address(address, security)


@pytest.mark.parametrize(
    "options", [["--listen", "tcp://0.0.0.0:0"], ["--key", "x.key_secret"], ["--allow-list", "allowed"]]
)
def test_a_broker_with_half_a_security_does_not_start(runs_dir: Path, options: list[str]) -> None:
    result = invoke("server", "broker", *options)
    assert isinstance(result.exception, ConfigurationError)
    assert "offloop server keygen" in str(result.exception)


# -- the gate ---------------------------------------------------------------------------------------------------------

PEER = """
import contextlib, json, sys, zmq
from zmq.utils.monitor import recv_monitor_message
from offloop.bus.net.curve import client_security
FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
context = zmq.Context()
sockets = context.socket(zmq.DEALER), context.socket(zmq.SUB)
monitors = [socket.get_monitor_socket(FAILED) for socket in sockets]
sockets[1].subscribe("")
for socket, address in zip(sockets, sys.argv[1:]):
    security = client_security()
    if security:
        security.apply(socket)
    socket.connect(address)
with contextlib.suppress(zmq.Again):
    # One that is refused already has nobody to send to.
    sockets[0].send(b"roles?", zmq.NOBLOCK)
heard = []
for socket, monitor in zip(sockets, monitors):
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    heard.append(socket.recv().decode() if socket in dict(poller.poll(30_000)) else None)
    assert heard[-1] or recv_monitor_message(monitor, zmq.NOBLOCK)["event"] & FAILED
print(json.dumps(heard))
context.destroy(linger=0)
"""


def heard(addresses: Sequence[str], key: Path | None, broker_key: Path | None) -> list[str | None]:
    """What a process with these keys receives at a control endpoint and on a stream; ``None`` where it is refused."""
    named = {"OFFLOOP_KEY": key, "OFFLOOP_BROKER_KEY": broker_key}
    done = subprocess.run(
        [sys.executable, "-c", PEER, *addresses],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env={**os.environ, **{name: str(path) for name, path in named.items() if path}},
    )
    found: list[str | None] = json.loads(done.stdout)
    return found


class Gate:
    """A control endpoint and a stream behind a gatekeeper. The endpoint answers with the roles of whoever asks."""

    def __init__(self, security: ServerSecurity) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.gatekeeper = Gatekeeper(self._context, security)
        self._control = self._context.socket(zmq.ROUTER)
        self._stream = self._context.socket(zmq.PUB)
        self.addresses = []
        for guarded, domain in ((self._control, CONTROL), (self._stream, STREAM)):
            security.apply(guarded, domain)
            guarded.bind("tcp://127.0.0.1:*")
            self.addresses.append(guarded.getsockopt_string(zmq.LAST_ENDPOINT))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._control, zmq.POLLIN)
        poller.register(self.gatekeeper.socket, zmq.POLLIN)
        while not self._stopping.is_set():
            ready = dict(poller.poll(20))
            if self.gatekeeper.socket in ready:
                self.gatekeeper.handle()
            self._stream.send(b"event")
            if self._control in ready:
                identity, frame = self._control.recv_multipart(copy=False)
                user_id = str(frame.get("User-Id"))
                roles = [role for role in ("publish", "view", "command") if self.gatekeeper.may(user_id, role)]
                self._control.send_multipart([identity.bytes, " ".join(roles).encode()])

    def ask(self, key: Path | None, broker_key: Path | None) -> list[str | None]:
        """What somebody with these keys receives at the control endpoint and on the stream."""
        return heard(self.addresses, key, broker_key)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._context.destroy(linger=0)


@pytest.fixture
def gate(keys: Path) -> Iterator[Gate]:
    _, secret = make_keys("broker")
    for name, roles in (("trainer", ["publish"]), ("viewer", ["view"]), ("boss", ["view", "command"])):
        allow(keys / "allowed", load_public_key(make_keys(name)[0]), name, roles)
    make_keys("stranger")
    security = server_security(secret, None)
    assert security is not None
    gate = Gate(security)
    yield gate
    gate.close()


def test_each_key_may_do_what_its_lines_say_and_no_more(gate: Gate, keys: Path) -> None:
    broker = keys / "broker.key"
    assert gate.ask(keys / "boss.key_secret", broker) == ["view command", "event"]
    assert gate.ask(keys / "viewer.key_secret", broker) == ["view", "event"]
    # It may publish, and so it gets nothing from the stream.
    assert gate.ask(keys / "trainer.key_secret", broker) == ["publish", None]


def test_strangers_get_nothing_and_are_named(gate: Gate, keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert gate.ask(keys / "stranger.key_secret", keys / "broker.key") == [None, None]
    key = load_public_key(keys / "stranger.key").decode()
    assert f"refused key {key} from 127.0.0.1 at the control endpoint" in caplog.text
    # Without keys, and with another broker's key in mind.
    assert gate.ask(None, None) == [None, None]
    assert gate.ask(keys / "viewer.key_secret", keys / "stranger.key") == [None, None]
    assert gate.ask(keys / "viewer.key_secret", keys / "broker.key") == ["view", "event"]


def test_the_list_takes_effect_at_once_for_new_connections(gate: Gate, keys: Path) -> None:
    broker, stranger = keys / "broker.key", keys / "stranger.key_secret"
    assert gate.ask(stranger, broker) == [None, None]
    before = (keys / "allowed").read_text()
    assert invoke("server", "allow", keys / "stranger.key", "--role", "view").exit_code == 0
    assert gate.ask(stranger, broker) == ["view", "event"]
    (keys / "allowed").write_text(before)
    assert gate.ask(stranger, broker) == [None, None]


def test_a_damaged_list_admits_nobody_new_and_takes_nothing_from_the_others(
    gate: Gate, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    viewer = load_public_key(keys / "viewer.key").decode()
    good = (keys / "allowed").read_text()
    for spoil in (lambda: (keys / "allowed").write_text("view nonsense\n"), (keys / "allowed").unlink):
        spoil()
        assert gate.ask(keys / "viewer.key_secret", keys / "broker.key") == [None, None]
        assert "no other client is admitted: " in caplog.text
        assert gate.gatekeeper.may(viewer, "view")
    (keys / "allowed").write_text(good)
    (keys / "allowed").chmod(0o600)
    assert gate.ask(keys / "viewer.key_secret", keys / "broker.key") == ["view", "event"]


@pytest.fixture
def lone_gatekeeper(keys: Path) -> Iterator[tuple[Gatekeeper, "zmq.Socket[bytes]"]]:
    """A gatekeeper, and a socket that asks it as ZeroMQ does."""
    _, secret = make_keys("broker")
    allow(keys / "allowed", zmq.curve_keypair()[0], "anna", ["view"])
    security = server_security(secret, None)
    assert security is not None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    gatekeeper = Gatekeeper(context, security)
    asker = context.socket(zmq.DEALER)
    asker.connect("inproc://zeromq.zap.01")
    yield gatekeeper, asker
    context.destroy(linger=0)


def test_malformed_questions_are_answered_with_no_or_not_at_all(
    lone_gatekeeper: tuple[Gatekeeper, "zmq.Socket[bytes]"],
) -> None:
    gatekeeper, asker = lone_gatekeeper
    good = [b"", b"1.0", b"7", b"control endpoint", b"10.0.0.1", b"", b"CURVE", b"\xff" * 32]
    malformed = [good[:length] for length in range(1, len(good))]
    malformed += [[*good, b"more"], [*good[:6], b"PLAIN", b"x"], [*good[:-1], b"short"], [b"", b"9.9", *good[2:]]]
    malformed += [[*good[:3], b"\xff\xfe", b"\xff", *good[5:]], good]
    for question in malformed:
        asker.send_multipart(question)
        gatekeeper.handle()
        while asker.poll(0):
            assert asker.recv_multipart()[3:] == [b"400", b"", b"", b""]


def test_the_log_grows_by_a_few_lines_however_many_strangers_come(
    lone_gatekeeper: tuple[Gatekeeper, "zmq.Socket[bytes]"], caplog: pytest.LogCaptureFixture
) -> None:
    gatekeeper, asker = lone_gatekeeper
    for number in range(500):
        asker.send_multipart(
            [b"", b"1.0", b"1", b"control endpoint", b"10.0.0.1", b"", b"CURVE", number.to_bytes(32, "big")]
        )
        gatekeeper.handle()
        asker.recv_multipart()
    gatekeeper.sum_up()
    assert len(caplog.records) == 11
    assert caplog.messages[-1] == "refused 490 more connections with unknown keys"


def test_without_a_gatekeeper_nobody_is_admitted(keys: Path) -> None:
    broker, secret = make_keys("broker")
    _, viewer = make_keys("viewer")
    allow(keys / "allowed", load_secret_key(viewer).public, "viewer", ["view"])
    security, client = server_security(secret, None), client_security(viewer, broker)
    assert security is not None
    assert client is not None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    control, peer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    security.apply(control, CONTROL)
    control.bind("tcp://127.0.0.1:*")
    client.apply(peer)
    peer.connect(control.getsockopt_string(zmq.LAST_ENDPOINT))
    peer.send(b"hello")
    assert not control.poll(500)
    context.destroy(linger=0)


# -- a real broker with keys ------------------------------------------------------------------------------------------


OWNER = ("owner", ["view", "command"])


@pytest.fixture
def guarded(runs_dir: Path, keys: Path) -> Iterator[str]:
    """``offloop server broker`` that admits a trainer, a viewer and a boss: its address."""
    make_keys("broker")
    make_keys("stranger")
    for name, roles in (("trainer", ["publish"]), ("viewer", ["view"]), ("boss", ["command"]), OWNER):
        allow(keys / "allowed", load_public_key(make_keys(name)[0]), name, roles)
    port = free_address().rpartition(":")[2]
    command = [sys.executable, "-m", "offloop.bus", "server", "broker", "--listen", f"tcp://0.0.0.0:{port}"]
    process = subprocess.Popen(
        [*command, "--key", str(keys / "broker.key_secret")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    assert "serving at" in first, process.communicate()
    yield f"tcp://127.0.0.1:{port}"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=100)
    assert process.returncode == 0, error
    assert load_public_key(keys / "stranger.key").decode() in error
    assert (
        "a connection to the control endpoint came without a key, or with another broker's, and was refused; the last"
        in error
    )
    assert "to connect: 127.0.0.1" in error
    assert "Traceback" not in error


def test_a_real_broker_grants_each_key_its_role_and_a_stranger_nothing(guarded: str, keys: Path) -> None:
    def security(name: str) -> ClientSecurity | None:
        return client_security(keys / f"{name}.key_secret", keys / "broker.key")

    with Publisher("secret-run", broker=guarded, security=security("trainer")) as publisher:
        publisher.publish(Event.BATCH_END, batch=1)
        told = ask_broker(guarded, "runs", {}, security("viewer"))
        assert [run["run"] for run in told["runs"]] == ["secret-run"]
        for name, kind in (("viewer", "command"), ("trainer", "command"), ("trainer", "runs"), ("boss", "fetch")):
            with pytest.raises(BrokerError, match=r"may not (view|publish|command) here"):
                ask_broker(guarded, kind, {"run": "secret-run", "command": "stop"}, security(name))
        with pytest.raises(BrokerError, match=r"may not (view|publish|command) here"):
            Publisher("another", broker=guarded, security=security("viewer"))
        assert not publisher.stop_requested
        # A boss may command.
        outcome = send_command_through(guarded, "secret-run", "stop", wait=0, security=security("boss"))
        assert outcome.event is None
        wait_for(lambda: publisher.poll() or publisher.stop_requested, "the publisher to be told")
        # A stranger is not even told that there is a broker, nor is one without any key.
        stream = f"tcp://127.0.0.1:{int(guarded.rpartition(':')[2]) + 1}"
        assert heard([guarded, stream], keys / "stranger.key_secret", keys / "broker.key") == [None, None]
        assert heard([guarded, stream], None, None) == [None, None]


def test_a_publisher_that_is_refused_before_it_speaks_does_not_wait_for_ever(
    guarded: str, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = BrokerConnection._connect

    def connect_and_be_refused(self: BrokerConnection) -> "zmq.Socket[bytes]":
        dealer = connect(self)
        wait_for(lambda: not dealer.poll(0, zmq.POLLOUT), "the connection to be taken away")
        return dealer

    monkeypatch.setattr(BrokerConnection, "_connect", connect_and_be_refused)
    stranger = client_security(keys / "stranger.key_secret", keys / "broker.key")
    with pytest.raises(BrokerError, match="no broker answers"):
        Publisher("r", broker=guarded, security=stranger, timeouts=Timeouts(welcome=0.2))
    # The broker's log is looked at for them.
    assert heard([guarded, f"tcp://127.0.0.1:{int(guarded.rpartition(':')[2]) + 1}"], None, None) == [None, None]


# -- what a run leaves on the disk ------------------------------------------------------------------------------------


def test_what_a_run_leaves_is_its_owners_alone(runs_dir: Path) -> None:
    old = os.umask(0)
    try:
        (runs_dir / "mine").mkdir(mode=0o777)
        with Publisher("mine") as publisher:
            publisher.publish(Event.BATCH_END, batch=1)
            directory = runs_dir / "mine"
            wait_for(lambda: find_run("mine").live, "the run to be live")
            assert mode(directory) == 0o700
            open_to_others = {path.name: oct(mode(path)) for path in directory.iterdir() if mode(path) & 0o077}
            assert not open_to_others
            names = {path.name for path in directory.iterdir()}
            assert {"broker.sock", "feed.sock", "run.json", "broker.json", "recording-1.mcap"} <= names
            assert not _abstract_sockets(json.loads((directory / "broker.json").read_text())["pid"])
    finally:
        os.umask(old)


def _abstract_sockets(pid: int) -> list[str]:
    """The sockets of a process that have names outside of the file system, which anybody may connect to."""
    inodes = {
        link[len("socket:[") : -1]
        for descriptor in Path(f"/proc/{pid}/fd").iterdir()
        if (link := os.readlink(descriptor)).startswith("socket:[")
    }
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [row[7] for row in rows if len(row) > 7 and row[6] in inodes and row[7].startswith("@")]


# -- nothing that is received is executed ---------------------------------------------------------------------------

DANGEROUS_MODULES = {
    "pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "importlib",
    "runpy",
    "code",
    "yaml",
}
DANGEROUS_CALLS = {"eval", "exec", "compile", "__import__"}
WIRE_PATH = (
    "offloop.bus",
    "offloop.consumers.runner.runner",
    "offloop.consumers.runner.streams",
    "offloop.consumers.callbacks",
    "offloop.consumers.loggers",
    "offloop.trainer.stream.publishing",
)
EXCEPTIONS = {
    # It imports the classes that the command line names, before anything is received.
    "offloop.bus.plugins.registry": {"importlib", "importlib.util", "importlib.metadata"},
    # They look for the classes and modules that the user's command line or script names, before anything is received.
    "offloop.consumers.composer.names": {"importlib", "importlib.abc", "importlib.machinery", "importlib.util"},
    # It asks for the versions of installed packages.
    "offloop.bus.publisher.connection": {"importlib.metadata"},
    # It loads the commands that installed packages add, by the name that somebody has typed.
    "offloop.bus.cli.main": {"importlib.metadata"},
    # It imports modules of ours, whose names stand in the code, when something of theirs is used.
    "offloop.bus.lazy": {"importlib.import_module"},
    # It reads a log's hyperparameters from the file beside it, by `safe_load`, which makes plain values only.
    "offloop.bus.tools.logs": {"yaml"},
    # It reads one pickle, from its parent's pipe.
    "offloop.consumers.cli.attached": {"pickle"},
    # They ask whether an optional package is installed, by a name that stands in the code.
    "offloop.bus.errors": {"importlib.util"},
    "offloop.consumers.callbacks.export.formats": {"importlib.util"},
    "offloop.consumers.callbacks.image_visualizer": {"importlib.util"},
    # They import an optional package, by a name that stands in the code, where it is used.
    "offloop.consumers.callbacks.mlperf": {"importlib"},
    "offloop.consumers.callbacks.system_monitor": {"importlib"},
}


def _modules() -> dict[str, Path]:
    found = {}
    for package in ("bus", "consumers", "trainer"):
        for path in (ROOT / package).rglob("*.py"):
            parts = ("offloop", *path.relative_to(ROOT).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imports(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= submodules & set(MODULES) or {
                f"{node.module}.{alias.name}" if node.module == "importlib" else node.module for alias in node.names
            }
    return names


MODULES = _modules()


def test_no_module_that_handles_what_is_received_can_execute_it() -> None:
    todo = [name for name in MODULES if name.startswith(WIRE_PATH)] + ["offloop.consumers.cli.attached"]
    done: set[str] = set()
    found: dict[str, set[str]] = {}
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        tree = ast.parse(MODULES[name].read_text())
        imports = _imports(tree)
        # What the trainer does on its own, such as loading tasks and checkpoints, is no part of the wire path.
        todo += [other for other in imports & set(MODULES) if not other.startswith("offloop.trainer")]
        calls = {
            node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        dangerous = {one for one in imports if one.partition(".")[0] in DANGEROUS_MODULES} | (calls & DANGEROUS_CALLS)
        if dangerous - EXCEPTIONS.get(name, set()):
            found[name] = dangerous
    assert {
        "offloop.bus.protocol.frames",
        "offloop.bus.broker.broker",
        "offloop.bus.subscriber.subscriber",
        "offloop.bus.publisher.publisher",
        "offloop.consumers.runner.runner",
    } <= done
    assert not found


HOSTILE_READER = """
import json, sys
from offloop.bus import Subscriber
from offloop.bus.types.demand import BASE_EVENTS
with Subscriber("hostile") as subscriber:
    before = set(sys.modules)
    seen = 0
    for snapshot in subscriber:
        repr(snapshot), repr(snapshot.fields), [repr(value) for value in vars(type(snapshot))]
        seen += 1
    print(json.dumps([seen, sorted(set(sys.modules) - before)]))
"""


class _Canary:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self._path}",)


def test_hostile_payloads_are_only_data(runs_dir: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    bait = pickle.dumps(_Canary(canary))
    (tmp_path / "trap.py").write_text(f"open({str(canary)!r}, 'w')")
    hostile = [
        bait,
        "trap",
        "trap:Trap",
        f"{tmp_path}/trap.py:Trap",
        {"__class__": "trap.Trap", "__reduce__": ["os.system", f"touch {canary}"], "__module__": "trap"},
        f"__import__('os').system('touch {canary}')",
        f"{{{{ open({str(canary)!r}, 'w') }}}}",
        "!!python/object/apply:os.system ['touch x']",
    ]
    # A time, and a kind that nobody knows.
    extensions = [msgspec.msgpack.Ext(-1, bytes(4)), msgspec.msgpack.Ext(42, bait)]
    with Publisher("hostile") as publisher:
        reader = subprocess.Popen(
            [sys.executable, "-c", HOSTILE_READER],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        )
        for batch, value in enumerate([*hostile, *extensions], 1):
            at, fields = Timestamp(batch=batch).values, {"loss": value, "__class__": value, "bait": value}
            publisher.send(Event.BATCH_END, at, None, fields, Publisher.pack_context({}))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        control = context.socket(zmq.DEALER)
        control.connect(json.loads((runs_dir / "hostile" / "broker.json").read_text())["control_endpoint"])
        for value in [*hostile, msgpack.Timestamp(1, 1), msgpack.ExtType(42, bait)]:
            for kind in ("hello", "lease", "command", "fetch", "runs", "statistics", "__class__", "trap:Trap"):
                content = {"run": value, "command": value, "info": value, "demand": value, "rank": 0, "world_size": 1}
                control.send(encode_control(kind, content))
            control.send(Topic("hostile", "trap", 0).encode() + msgpack.packb(value))
        control.send(encode_control("command", {"run": "hostile", "command": "nothing"}))
        answers: list[str] = []
        while not any("'nothing' is unknown" in reason for reason in answers):
            assert control.poll(30_000), "the broker does not answer any more"
            answers.append(str(decode_control(split_frame(control.recv())[1]).content.get("reason")))
        context.destroy(linger=0)
    seen, imported = json.loads(reader.communicate(timeout=100)[0])
    assert seen == len(hostile) + len(extensions)
    assert not [name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names]
    assert "trap" not in imported
    assert not canary.exists()
    assert len(list(Recording(runs_dir / "hostile"))) == len(hostile) + len(extensions)
