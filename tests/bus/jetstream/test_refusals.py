"""What NATS servers refuse is one line that says what to do, at once, and never a silence."""

import socket
import subprocess
import sys

import pytest
from nats_certificates import Authority
from nats_servers import DEBIANS, NatsServer
from run_folders import write_run

from offloop.bus import BrokerError, ConfigurationError
from offloop.bus.jetstream.connection import NatsServers
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.jetstream.server_config import ServerConfig
from offloop.bus.net.nkeys import make_nkey

PYTHON = (sys.executable, "-m")


@pytest.fixture
def serve(tmp_path):
    """Starts servers."""
    tmp_path.chmod(0o700)
    begun = []

    def start(name, **options):
        folder = tmp_path / name
        folder.mkdir()
        begun.append(NatsServer(folder, **options))
        return begun[-1]

    yield start
    for one in begun:
        one.kill()


@pytest.fixture
def nkey(tmp_path):
    return lambda name: make_nkey(name, tmp_path)


def refusal(server, address, nkey=None, ca=None):
    """What a reader gets to read."""
    with pytest.raises((BrokerError, ConfigurationError)) as raised:
        NatsConnection(NatsServers.parse(f"{address}:{server.port}", nkey, ca))
    return str(raised.value)


def bus(*arguments):
    return subprocess.run(
        [*PYTHON, "offloop.bus", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=60
    )


def with_users(users, certificate=(None, None)):
    return lambda server: str(ServerConfig({"team": users}, f"127.0.0.1:{server.port}", server.store, *certificate))


@pytest.mark.needs("openssl")
def test_certificates_and_nkeys(tmp_path, serve, nkey, runs_dir):
    ours, theirs = (Authority.make(tmp_path, name) for name in ("ours", "theirs"))
    public, seed, anna = nkey("anna")
    _, unknown, _ = nkey("unknown")
    users = {anna.public: ["view"]}
    secure = serve("secure", config=with_users(users, ours.sign("server")))
    expired = serve("expired", config=with_users(users, ours.sign("old", days=0)))
    plain = serve("plain", config=with_users(users))
    ca = ours.certificate

    with NatsConnection(NatsServers.parse(f"tls://127.0.0.1:{secure.port}", seed, ca)):
        pass
    not_allowed = "has no certificate that --ca (or OFFLOOP_CA) and the address allow: "
    tls = "tls://127.0.0.1"
    assert not_allowed in refusal(secure, tls, seed, theirs.certificate)
    assert not_allowed in refusal(secure, tls, seed)
    # Also where nobody has asked for TLS, but the server has it.
    assert not_allowed in refusal(secure, "nats://127.0.0.1", seed)
    assert f"{not_allowed}Hostname mismatch" in refusal(secure, "tls://localhost", seed, ca)
    assert f"{not_allowed}certificate has expired" in refusal(expired, tls, seed, ca)
    # Who is in between could have said so.
    assert "does not offer TLS: " in refusal(plain, tls, seed)
    assert "does not offer TLS: " in refusal(plain, "nats://127.0.0.1", seed, ca)
    assert "takes only clients that it knows: name the file with your nkey by --nkey" in refusal(secure, tls, None, ca)
    assert "does not admit the nkey U" in refusal(secure, tls, unknown, ca)
    assert "is not a certificate in PEM" in refusal(secure, tls, seed, public)
    assert "holds a public nkey where a seed is needed" in refusal(secure, tls, public, ca)
    assert "holds no seed of a user's nkey" in refusal(secure, tls, ca, ca)
    assert "cannot be read: No such file or directory; 'offloop server keygen NAME' makes" in refusal(
        secure, tls, tmp_path / "none", ca
    )
    seed.chmod(0o640)
    assert f"is open to others (mode 0640): chmod 600 {seed}" in refusal(secure, tls, seed, ca)
    seed.chmod(0o600)

    # The bridge of a host fails at once where waiting does not help, and so does a reader; nothing of the run is lost.
    path = write_run(runs_dir, "r")
    where = ("--stream", f"{tls}:{secure.port}", "--nkey", seed, "--ca")
    for arguments, expected in (
        (("server", "bridge", "r", "--runs-dir", runs_dir, *where, theirs.certificate), not_allowed),
        (
            ("server", "bridge", "r", "--runs-dir", runs_dir, *where, ca),
            "to '$js.api.stream.create.ol_r': it takes the role publish, which its operator gives",
        ),
        (("runs", *where, theirs.certificate), not_allowed),
    ):
        done = bus(*arguments)
        *_, line = done.stderr.splitlines()
        assert expected in line
        assert (done.returncode, "Traceback" in done.stderr, done.stdout) == (1, False, "")
    assert (path / "recording-1.mcap").stat().st_size > 0


@pytest.mark.needs("nats-server")
def test_an_old_server_is_for_this_machine_alone(serve):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there:
        there.connect(("192.0.2.1", 9))  # nothing is sent
        host = there.getsockname()[0]
    here = serve("here", program=DEBIANS)
    with NatsConnection(here.servers):
        pass
    elsewhere = serve("elsewhere", program=DEBIANS, host=host)
    said = refusal(elsewhere, f"nats://{host}")
    assert "it must be 2.12.7 or newer, because older ones have known security holes" in said
