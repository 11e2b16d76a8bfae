"""Whatever NATS servers refuse is one line that says what to do, at once, and never a silence."""

import socket

import pytest
from nats_certificates import Authority
from nats_servers import DEBIANS, NatsServer
from run_folders import write_run

from offloop.bus import BrokerError, ConfigurationError
from offloop.bus.jetstream.connection import NatsServers
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.jetstream.server_config import ServerConfig
from offloop.bus.net.nats_addresses import split_addresses
from offloop.bus.net.nkeys import make_nkey


@pytest.fixture
def serve(tmp_path):
    """Start servers."""
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


def refusal(server, address, nkey=None, ca=None):
    """Return the error of a reader."""
    with pytest.raises((BrokerError, ConfigurationError)) as raised:
        NatsConnection(NatsServers.parse(f"{address}:{server.port}", nkey, ca))
    return str(raised.value)


def with_users(users, certificate=(None, None)):
    return lambda server: str(ServerConfig({"team": users}, f"127.0.0.1:{server.port}", server.store, *certificate))


@pytest.mark.needs("openssl")
def test_certificates_and_nkeys(tmp_path, serve, copying):
    ours, theirs = (Authority.make(tmp_path, name) for name in ("ours", "theirs"))
    public, seed, anna = make_nkey("anna", tmp_path)
    _, unknown, _ = make_nkey("unknown", tmp_path)
    users = {anna.public: ["view"]}
    secure = serve("secure", config=with_users(users, ours.sign("server")))
    expired = serve("expired", config=with_users(users, ours.sign("old", days=0)))
    plain = serve("plain", config=with_users(users))
    ca, tls = ours.certificate, "tls://127.0.0.1"
    with NatsConnection(NatsServers.parse(f"{tls}:{secure.port}", seed, ca)):
        pass
    # The nkey is known, the certificate is not what --ca and the address allow.
    for refused in (
        (secure, tls, seed, theirs.certificate),
        (secure, "nats://127.0.0.1", seed),  # nobody has asked for TLS, but the server has it
        (secure, "tls://localhost", seed, ca),
        (expired, tls, seed, ca),
    ):
        assert "has no certificate that --ca (or OFFLOOP_CA) and the address allow: " in refusal(*refused)
    # Who is in between could have said so.
    for address, authority in ((tls, None), ("nats://127.0.0.1", ca)):
        assert "does not offer TLS: " in refusal(plain, address, seed, authority)
    seed_of_all = tmp_path / "open"
    seed_of_all.write_bytes(seed.read_bytes())
    seed_of_all.chmod(0o640)
    for file, told in (
        (None, "--nkey"),
        (unknown, "does not admit the nkey U"),
        (public, "holds a public nkey"),
        (ca, "holds no seed"),
        (tmp_path / "none", "cannot be read"),
        (seed_of_all, "chmod 600"),
    ):
        assert told in refusal(secure, tls, file, ca)
    assert "is not a certificate in PEM" in refusal(secure, tls, seed, public)
    # A bridge fails at once where waiting does not help.
    path = write_run(tmp_path, "r")
    for authority, told in ((theirs.certificate, "--ca"), (ca, "the role publish")):
        with pytest.raises(BrokerError, match=told):
            copying(path, NatsServers.parse(f"{tls}:{secure.port}", seed, authority)).wait()


@pytest.mark.needs("nats-server")
def test_an_old_server_is_for_this_machine_alone(serve):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there:
        there.connect(("192.0.2.1", 9))  # nothing is sent
        host = there.getsockname()[0]
    here = serve("here", program=DEBIANS)
    with NatsConnection(here.servers):
        pass
    elsewhere = serve("elsewhere", program=DEBIANS, host=host)
    assert "use 2.12.7 or newer" in refusal(elsewhere, f"nats://{host}")


@pytest.mark.parametrize("given", ["nats://me:se,cret@host:4222", "http://me:secret@host:4222", "me:s@cret@host:4222"])
def test_an_address_with_a_password_is_refused_without_showing_it(given):
    with pytest.raises(ConfigurationError, match=r"^'\.\.\.@host:4222' is not the address of a NATS server") as refused:
        split_addresses(given)
    assert refused.value.value == "...@host:4222"
