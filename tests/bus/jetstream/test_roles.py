"""The roles of hosts, viewers and those who command at NATS servers."""

import asyncio
import contextlib
import json
import random

import nats
import nats_servers
import pytest
from click.testing import CliRunner
from helpers import wait_for
from nats_servers import BESIDE_PYTHON, DEBIANS, NatsServer
from run_folders import WrittenRun

from offloop.bus import BrokerError, Event, Publisher, Recording, RunNotFoundError, Subscriber
from offloop.bus.cli.server import nats_config
from offloop.bus.jetstream import names
from offloop.bus.jetstream.channel import StreamChannel
from offloop.bus.jetstream.connection import NatsServers, connected
from offloop.bus.jetstream.nats_connection import NatsConnection
from offloop.bus.jetstream.server_config import ServerConfig
from offloop.bus.net.nkeys import make_nkey
from offloop.bus.protocol.frames import decode_control, encode_control, split_frame
from offloop.bus.runs.directory import host_name
from offloop.bus.subscriber.commands import perform
from offloop.bus.types.commands import check_command


class Roles:
    """A server whose configuration is that of ``offloop server nats-config``, and the files of its users."""

    def __init__(self, folder, program):
        folder.mkdir(mode=0o700)
        self.nkeys, self.seeds = {}, {}
        for name in ("publish", "view", "command", "remove", "other"):
            _, self.seeds[name], made = make_nkey(name, folder)
            self.nkeys[name] = made.public
        self.limits = "enabled"
        """Of each account."""
        self.server = NatsServer(folder, program, config=self._config)

    def _config(self, server):
        teams = {
            "vision": {self.nkeys[role]: [role] for role in ("publish", "view", "command", "remove")},
            "speech": {self.nkeys["other"]: ["publish", "view", "command"]},
        }
        config = str(ServerConfig(teams, f"127.0.0.1:{server.port}", server.store))
        return config.replace("jetstream: enabled", f"jetstream: {self.limits}")

    def servers(self, name):
        return NatsServers.parse(self.server.address, self.seeds[name])


@pytest.fixture
def roles(tmp_path, request):
    made = Roles(tmp_path / "nats", getattr(request, "param", BESIDE_PYTHON))
    yield made
    made.server.kill()


@pytest.fixture
def attach(roles, monkeypatch):
    def attached(name, run, **options):
        monkeypatch.setenv("OFFLOOP_NKEY", str(roles.seeds[name]))
        return nats_servers.attach(roles.server, run, **options)

    return attached


@pytest.fixture
def publisher(runs_dir):
    """Give a publisher that keeps its commands, after its first event."""
    commands = []
    with Publisher("r", runs_dir=runs_dir, on_command=commands.append) as made:
        made.commands = commands
        made.publish(Event.BATCH_END, loss=1 / 3)
        made.poll()
        yield made


def test_hosts_publish_viewers_view_and_those_who_command_command(roles, copying, attach, publisher):
    with contextlib.ExitStack() as stack:
        bridge = copying(publisher.run_dir, roles.servers("publish"))
        viewer = stack.enter_context(attach("view", "r", events=[Event.BATCH_END, Event.AFTER_FORWARD]))
        assert next(iter(viewer)).loss == 1 / 3
        with pytest.raises(BrokerError, match="the role command"):
            viewer.command("stop")
        commander = stack.enter_context(attach("command", "r", events=[Event.BATCH_END, Event.AFTER_LOSS]))
        iter(commander)
        wait_for(lambda: publisher.poll() or Event.AFTER_LOSS in publisher.requested_events, "the commander's demand")
        assert Event.AFTER_FORWARD not in publisher.requested_events, "a viewer requests nothing"
        assert commander.command("stop", wait=0).error is None
        wait_for(lambda: publisher.poll() or publisher.commands, "the command")
        assert [command.name for command in publisher.commands] == ["stop"]
        publisher.close()
        bridge.wait()
        assert list(viewer) == list(Recording(publisher.run_dir))[1:]


@pytest.mark.parametrize(("max_bytes", "state"), [(None, "paused"), (1_000_000, "waiting")])
def test_a_full_account_pauses_the_copy_with_the_way_out_and_loses_nothing(
    roles, copying, attach, runs_dir, max_bytes, state
):
    roles.limits = "{ max_file: 200000 }"
    roles.server.kill()
    roles.server.start()
    run = WrittenRun(runs_dir, "r")
    noise = random.Random(1)
    bridge = copying(run.path, roles.servers("publish"), max_bytes=max_bytes)
    for _ in range(2):
        run.send(Event.BATCH_END, {"noise": noise.randbytes(250_000)})
        run.writer.flush()
        wait_for(lambda: bridge.has_all_of(run) or bridge.status.state == state, "the bridge")
    wait_for(lambda: bridge.status.state == state, "the full account")
    assert bridge.thread.is_alive()
    roles.limits = "{ max_file: 100000000 }"
    roles.server.reload()
    wait_for(lambda: bridge.has_all_of(run), "the rest")
    run.end()
    bridge.wait()
    with attach("view", "r") as reader:
        assert list(reader) == list(Recording(run.path))
        assert (reader.gaps, reader.damage) == ((), None)
    assert ["'offloop server remove RUN --stream " in line for line in bridge.said] == [True]


SUBJECTS = """
    ol.q.r.lease ol.q.r.command ol.q.r.statistics.host ol.v.r.lease ol.r.r.1.host ol.w.r.1.host
    $KV.ol_runs.r.1.host $JS.API.INFO $JS.API.STREAM.NAMES $JS.API.STREAM.LIST
    $JS.API.STREAM.INFO.ol_r $JS.API.STREAM.CREATE.ol_r $JS.API.STREAM.CREATE.KV_ol_runs $JS.API.STREAM.UPDATE.ol_r
    $JS.API.STREAM.DELETE.ol_r $JS.API.STREAM.PURGE.ol_r $JS.API.STREAM.MSG.GET.ol_r $JS.API.STREAM.MSG.DELETE.ol_r
    $JS.API.CONSUMER.CREATE.ol_r $JS.API.CONSUMER.CREATE.ol_r.name.subject $JS.API.CONSUMER.DURABLE.CREATE.ol_r.name
    $JS.API.CONSUMER.DELETE.ol_r.name $JS.API.CONSUMER.MSG.NEXT.ol_r.name $JS.API.CONSUMER.INFO.ol_r.name
    $JS.API.STREAM.PURGE.KV_ol_runs $JS.API.STREAM.SNAPSHOT.ol_r $JS.API.SERVER.REMOVE _INBOX.other.x
"""
TRIED = SUBJECTS.split()
HEARD = (
    *("ol.q.>", "ol.v.>", "ol.r.>", "ol.w.r.*.*", "$KV.ol_runs.>"),
    *("_INBOX.>", "_INBOX.other.>", ">", "$JS.API.>", "$SYS.>"),
)
VIEWED = {"ol.v.r.lease", "$JS.API.STREAM.INFO.ol_r", "$JS.API.STREAM.MSG.GET.ol_r"}
MAY = {
    "publish": (
        {
            *("ol.r.r.1.host", "ol.w.r.1.host", "$KV.ol_runs.r.1.host", "_INBOX.other.x"),
            *(f"$JS.API.STREAM.{what}.ol_r" for what in ("INFO", "CREATE", "UPDATE", "MSG.GET")),
            "$JS.API.STREAM.CREATE.KV_ol_runs",
        },
        {"ol.q.>", "ol.v.>"},
    ),
    "view": (VIEWED, {"ol.r.>", "ol.w.r.*.*", "$KV.ol_runs.>"}),
    "command": (
        {*VIEWED, "ol.q.r.lease", "ol.q.r.command", "ol.q.r.statistics.host"},
        {"ol.r.>", "ol.w.r.*.*", "$KV.ol_runs.>"},
    ),
    "remove": (
        {*VIEWED, "$KV.ol_runs.r.1.host", "$JS.API.STREAM.DELETE.ol_r"},
        {"ol.r.>", "ol.w.r.*.*", "$KV.ol_runs.>"},
    ),
}


@pytest.mark.parametrize(
    "roles", [BESIDE_PYTHON, pytest.param(DEBIANS, marks=pytest.mark.needs("nats-server"))], indirect=True, ids=str
)
def test_no_role_may_do_more_than_it_needs(roles):
    for role, (published, heard) in MAY.items():
        refused = asyncio.run(_tried(roles.server.address, roles.seeds[role]))
        assert {subject for subject in TRIED if f'publish to "{subject}"'.lower() not in refused} == published
        assert {subject for subject in HEARD if f'subscription to "{subject}"'.lower() not in refused} == heard


async def _tried(address, seed):
    """Return the refusals of the server, in its words."""
    refused = []

    async def note(error):
        refused.append(str(error))

    client = await nats.connect(address, nkeys_seed=str(seed), error_cb=note)
    for subject in TRIED:
        await client.publish(subject, b"")
    for subject in HEARD:
        await client.subscribe(subject)
    # The first one overtakes what was not written yet, as this client does it.
    await client.flush()
    await client.flush()
    await client.close()
    return " ".join(refused)


def test_a_viewer_is_never_taken_for_one_who_commands(roles):
    """As soon as its lease went by another subject, the servers would refuse it and end what it reads."""
    # One that may not even view is told which role that takes.
    refused = pytest.raises(BrokerError, match="it takes the role view or command or remove")
    with NatsConnection.shared(roles.servers("publish")) as connection, refused:
        perform(StreamChannel(connection), "r", check_command("stop", ()))

    async def ask():
        for _ in range(5):
            async with connected(roles.servers("view"), "viewer") as client:
                assert not await client.may_command()

    asyncio.run(ask())


def test_a_viewers_request_is_what_its_subject_says_and_other_teams_see_nothing(roles, copying, attach, publisher):
    copying(publisher.run_dir, roles.servers("publish"))
    with attach("view", "r"):
        for subject, request in (
            ("ol.v.r.lease", encode_control("command", STOP)),
            ("ol.v.r.statistics", encode_control("statistics", {"run": "s"})),
        ):
            assert "is for something else" in asyncio.run(_asked(roles, subject, request))
    publisher.poll()
    assert publisher.commands == []
    with NatsConnection.shared(roles.servers("other")) as there, pytest.raises(RunNotFoundError):
        Subscriber("r", stream=there.servers)


def test_the_configuration_has_limits_and_what_a_server_of_a_cluster_is_called(tmp_path):
    cluster = ["--cluster", "one.example,two.example", "--server-name", "two", "--cluster-ca", "a.pem"]
    certificate = ["--certificate", "c.pem", "--certificate-key", "k", "--max-store", "100GB"]
    public = str(make_nkey("anna", tmp_path)[0])
    made = CliRunner().invoke(nats_config, ["--publisher", public, *cluster, *certificate])
    assert made.exit_code == 0, made.output
    assert 'client_advertise: "two.example"' in made.output
    assert "jetstream: { max_file: 100GB }" in made.output


def test_a_viewer_has_no_command_delivered_and_no_answer_sent_elsewhere(roles, copying, attach, publisher):
    """Servers deliver what is requested of a stream to any subject, and an answer may be wanted anywhere."""
    bridge = copying(publisher.run_dir, roles.servers("publish"))
    with attach("view", "r") as viewer:
        asyncio.run(_misuse(roles, host_name()))
        assert [run.status for run in viewer._source._connection.runs()] == ["live"]
        publisher.publish(Event.BATCH_END, loss=2.0)
        wait_for(lambda: publisher.poll() or publisher.recorded_all, "it on disk")
        following = iter(viewer)
        assert [next(following).loss for _ in range(2)] == [1 / 3, 2.0]
    publisher.poll()
    assert publisher.commands == []
    publisher.close()
    bridge.wait()
    with attach("view", "r") as late:
        assert list(late) == list(Recording(publisher.run_dir))


async def _misuse(roles, host):
    client = await nats.connect(
        roles.server.address, nkeys_seed=str(roles.seeds["view"]), inbox_prefix=f"_INBOX.{roles.nkeys['view']}"
    )
    stream = client.jetstream()
    recording = names.recording_subject("r", 1, host)
    for reply in ("a.b.c", "_INBOX.", "_INBOX.a..b", recording, names.key("r", 1, host)):
        await client.publish("ol.v.r.statistics", encode_control("statistics", {"run": "r"}), reply=reply)
    # Answers of the servers where hosts write and take requests.
    for reply in ("ol.q.r.command", f"$KV.ol_runs.{names.key('r', 1, host)}", recording):
        for source in ("ol_r", "KV_ol_runs"):
            await client.publish(f"$JS.API.STREAM.MSG.GET.{source}", json.dumps({"seq": 1}).encode(), reply=reply)
    for _ in range(3):
        await client.publish("$JS.API.STREAM.INFO.ol_r", b"", reply=recording)
    try:
        # The servers answer in their own time.
        async with asyncio.timeout(100):
            while names.OFFSET in ((await stream.get_last_msg("ol_r", recording)).headers or {}):
                await asyncio.sleep(0.02)
    finally:
        await client.close()


STOP = {"run": "r", "id": "1", "command": "stop", "arguments": []}


async def _asked(roles, subject, request):
    client = await nats.connect(
        roles.server.address, nkeys_seed=str(roles.seeds["view"]), inbox_prefix=f"_INBOX.{roles.nkeys['view']}"
    )
    inbox = client.new_inbox()
    answers = await client.subscribe(f"{inbox}.>")
    await client.publish(subject, request, reply=f"{inbox}.want.1")
    answer = await answers.next_msg(100)
    await client.close()
    return decode_control(split_frame(answer.data)[1]).content["reason"]
