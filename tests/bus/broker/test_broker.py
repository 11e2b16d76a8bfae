"""The broker: nothing that a peer sends stops it, and it serves the publishers that it knows."""

import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import msgpack
import psutil
import pytest
import zmq
from brokers import address_of, broker_pid, start_broker
from click.testing import CliRunner
from helpers import strict_json, wait_for

from offloop.bus import Event, Publisher, Recording, Subscriber, find_run
from offloop.bus.broker.broker import LIVE_BATCH
from offloop.bus.cli.main import bus
from offloop.bus.processes import wait_for_free_core
from offloop.bus.protocol.frames import (
    END,
    Topic,
    decode_control,
    decode_frame_batch,
    encode_control,
    encode_frame_batch,
    event_encoder,
    pack_map,
    split_frame,
)
from offloop.bus.protocol.run_state import Reached
from offloop.bus.runs.directory import SOCKET_FILES
from offloop.bus.types.timeouts import Timeouts


@pytest.fixture
def address(runs_dir):
    process = start_broker(runs_dir)
    yield address_of(runs_dir)
    process.terminate()
    process.communicate(timeout=100)
    # It may be about to end by itself, with its run.
    assert process.returncode in (0, -signal.SIGTERM)


@pytest.fixture
def stranger(address):
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    yield socket
    context.destroy(linger=0)


HELLO = {"run": "r", "rank": 0, "world_size": 1, "publisher_id": "x"}
"""The smallest greeting of a publisher."""


def answer(socket):
    assert socket.poll(100_000), "no answer from the broker"
    return decode_control(split_frame(socket.recv())[1])


def test_malformed_messages_are_skipped_and_publishers_continue(address, stranger, runs_dir):
    noise = random.Random(7)
    with Publisher("r", broker=address) as publisher:
        for batch in range(1, 201):
            publisher.publish(Event.BATCH_END, batch=batch)
            stranger.send(noise.randbytes(noise.randrange(200)))
            stranger.send(b"\0" + noise.randbytes(20))
            stranger.send(b"r/batch_end/0\0" + noise.randbytes(20))
            stranger.send(encode_control("from the future", {}))
            stranger.send_multipart([b"a", b"b", b"c"])
            stranger.send(encode_control("events", {"frames": [b"x", encode_control("hello", {}), 3]}))
            stranger.send(encode_control("events", {"frames": "no list"}))
    assert len(list(Recording(runs_dir / "r"))) == 200


BAD_REQUESTS = [
    ("hello", {}),
    ("hello", {**HELLO, "run": "a/b", "new": True}),
    ("hello", {**HELLO, "run": "other", "new": True}),
    ("hello", {**HELLO, "attempt": 1}),
    ("hello", {**HELLO, "rank": 5}),
    ("hello", {**HELLO, "rank": False}),
    ("hello", {**HELLO, "publisher_id": ""}),
    ("hello", {**HELLO, "info": []}),
    ("hello", {**HELLO, "info": {b"key": 1}}),
    ("lease", {"run": "nobody", "demand": {}}),
    ("resume", {"from": "here"}),
    ("report", {"last_sent": "5"}),
    ("from the future", {}),
]


def test_bad_requests_are_refused_and_leave_nothing_behind(address, stranger, runs_dir):
    for number, (kind, content) in enumerate(BAD_REQUESTS):
        stranger.send(encode_control(kind, {**content, "id": str(number)}))
        reply = answer(stranger)
        assert (reply.kind, reply.content["id"]) == ("refused", str(number)), (kind, content)
        assert reply.content["reason"]
    deep: dict = {}
    for _ in range(500):
        deep = {"deeper": deep}
    stranger.send(encode_control("hello", {**HELLO, "info": deep}))
    stranger.send(b"\0" + msgpack.packb([2, "hello", HELLO]))
    reply = answer(stranger)
    assert reply.kind == "refused"
    assert "version 2, and this broker speaks version 1" in reply.content["reason"]
    for kind, content in (("resume", {"from": 1}), ("report", {"published": 3})):
        stranger.send(encode_control(kind, content))
        assert answer(stranger)[:2] == ("unknown", {})
    assert not (runs_dir / "r" / "run.json").exists()
    with Publisher("r", broker=address) as publisher:
        publisher.publish(Event.EPOCH_END)
    assert (publisher.attempt, len(list(Recording(runs_dir / "r")))) == (1, 1)


def test_every_answer_carries_the_id_of_its_request(address, stranger):
    with Publisher("r", broker=address) as publisher:
        publish_until_recorded(publisher, 1)
        requests = [
            ("hello", HELLO, "refused"),
            ("lease", {"run": "r", "demand": {}}, "leased"),
            ("command", {"run": "r", "command": "stop"}, "accepted"),
            ("statistics", {"run": "r"}, "statistics"),
        ]
        for number, (kind, content, _) in enumerate(requests):
            stranger.send(encode_control(kind, {**content, "id": f"q{number}"}))
        answers = {}
        while len(answers) < len(requests):
            reply = answer(stranger)
            answers.setdefault(reply.content.get("id"), reply.kind)
            answers.pop(None, None)
        assert answers == {f"q{number}": kind for number, (_, _, kind) in enumerate(requests)}

        def reply_to(kind, content):
            stranger.send(encode_control(kind, content))
            while (reply := answer(stranger)).kind not in ("statistics", "refused"):
                pass
            return reply

        assert "id" not in reply_to("statistics", {"run": "r"}).content
        assert "the id '5' is not a text" in reply_to("statistics", {"run": "r", "id": 5}).content["reason"]
        for handled in ({0: 5}, [["0", 5]], [[0]], [[0, -1]], None):
            reply = reply_to("handled", {"run": "r", "handled": handled})
            assert "$.handled" in reply.content["reason"], handled


def test_an_unauthenticated_peer_cannot_publish(address, stranger, runs_dir):
    with Publisher("r", broker=address) as publisher:
        publisher.publish(Event.BATCH_END, batch=1)
        forge = event_encoder(Topic("r", "batch_end", 0), 1)
        stranger.send(forge(2, 2, 0, [0] * 14, None, {"loss": -1.0}, pack_map({})))
        assert answer(stranger)[:2] == ("unknown", {})
        stranger.send(encode_control("lease", {"run": "r", "demand": {}}))
        assert answer(stranger).kind == "leased"
        publisher.publish(Event.BATCH_END, batch=2)
    assert [snapshot.loss for snapshot in Recording(runs_dir / "r")] == [None, None]


def test_readers_of_base_events_receive_no_others_and_no_message_is_large(address, stranger):
    stranger.send(encode_control("hello", HELLO))
    assert answer(stranger).kind == "welcome"
    received = {"$all": [], "$base": []}
    with zmq.Context() as context, context.socket(zmq.SUB) as feed:
        feed.connect(address.replace(*SOCKET_FILES))
        feed.subscribe("r/")

        def receive():
            while feed.poll(0):
                message = feed.recv()
                topic, body = split_frame(message)
                if topic.name in received:
                    assert len(message) <= LIVE_BATCH
                    received[topic.name] += decode_frame_batch(body)
            return received["$all"]

        def event(name, seq, base_seq):
            noise = {"noise": b"x" * 10_000}
            return event_encoder(Topic("r", name, 0), 1)(seq, base_seq, seq, [0] * 14, None, noise, pack_map({}))

        numbers = iter(range(1, 10_000))

        def send_one():
            number = next(numbers)
            stranger.send(event("epoch_end", number, number))

        wait_for(lambda: send_one() or receive(), "the first events on the feed")
        first = next(numbers)
        frames, base_seq = [], first - 1
        for seq, name in zip(
            range(first, first + 99), ("batch_start", "batch_end", "from_the_future") * 33, strict=True
        ):
            base_seq += name == "batch_end"
            frames.append(event(name, seq, base_seq))
        stranger.send(encode_frame_batch(frames))
        wait_for(lambda: receive()[-1] == frames[-1], "the last event on the feed")
    assert received["$all"][-99:] == frames
    assert [one for one in received["$base"] if one in frames and b"future" not in one] == frames[1::3]
    assert not any(b"batch_start" in one for one in received["$base"])


def test_sent_events_of_a_killed_trainer_are_recorded_by_a_broker_that_lags(runs_dir):
    script = """
import os
from offloop.bus import Event, Publisher
publisher = Publisher("r")
print("ready", flush=True)
input()
for batch in range(50):
    publisher.publish(Event.EPOCH_END, batch=batch)
publisher._session._context.destroy(linger=60_000)  # returns when everything is in the system's hands
os.kill(os.getpid(), 9)
"""
    trainer = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    trainer.stdout.readline()
    broker = broker_pid(runs_dir / "r")
    os.kill(broker, signal.SIGSTOP)
    trainer.communicate("go\n", timeout=100)
    os.kill(broker, signal.SIGCONT)
    wait_for(lambda: not find_run("r").live, "the broker to end")
    assert len(list(Recording(runs_dir / "r"))) == 50


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has this policy")
def test_a_broker_waits_for_a_free_core_and_its_training_does_not(runs_dir):
    script = """
import json, os
from offloop.bus import Publisher
os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
with Publisher("r") as publisher:
    broker = json.loads((publisher.run_dir / "broker.json").read_text())["pid"]
    print(os.sched_getscheduler(broker) == os.SCHED_BATCH, os.sched_getscheduler(0) == os.SCHED_OTHER)
"""
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "True True\n"
    # A policy that someone chose stays. It is that of a thread.
    with ThreadPoolExecutor(1) as chosen:
        chosen.submit(os.sched_setscheduler, 0, os.SCHED_IDLE, os.sched_param(0)).result()
        chosen.submit(wait_for_free_core).result()
        assert chosen.submit(os.sched_getscheduler, 0).result() == os.SCHED_IDLE


def publish_until_recorded(publisher, number):
    publisher.publish(Event.EPOCH_END)
    wait_for(lambda: publisher.poll() or publisher.statistics().acknowledged >= number, f"event {number} on disk")


def test_a_killed_broker_is_restarted_and_all_ranks_reconnect(runs_dir, caplog):
    first = Publisher("r", rank=0, world_size=2)
    second = Publisher("r", broker=first.address, rank=1, world_size=2)
    for number in (10, 20):
        os.kill(broker_pid(runs_dir / "r"), signal.SIGKILL)
        for publisher in (first, second):
            for _ in range(10):
                publisher.publish(Event.EPOCH_END)

        def recovered(number=number):
            first.poll()
            second.poll()
            return all(one.statistics().acknowledged >= number for one in (first, second))

        wait_for(recovered, "both ranks to be recorded")
    assert first.statistics().broker_restarts == 2
    # At least the first event after each death is sent to nobody: the death is looked for after it.
    assert first.statistics().resent >= 2
    second.close()
    first.close()
    recording = Recording(runs_dir / "r")
    snapshots = list(recording)
    for rank in (0, 1):
        assert [snapshot.seq for snapshot in snapshots if snapshot.rank == rank] == list(range(1, 21))
    assert (recording.ending.status, recording.gaps, recording.damage) == ("finished", (), None)
    assert "was killed by signal 9; another one is started" in caplog.text


def test_a_publisher_of_an_earlier_attempt_is_refused(runs_dir, caplog):
    first = start_broker(runs_dir)
    old = Publisher("r", broker=address_of(runs_dir))
    publish_until_recorded(old, 1)
    first.terminate()
    first.communicate(timeout=100)
    recording = Recording(runs_dir / "r")
    assert (len(list(recording)), recording.damage) == (1, None)
    assert find_run("r").last.error == "the broker was stopped"
    new = Publisher("r", resume=True)
    publish_until_recorded(new, 1)
    old.publish(Event.EPOCH_END)
    wait_for(lambda: old.poll() or old.closed, "the refusal")
    assert "attempt 1 of run 'r' cannot continue: attempt 2 has begun" in caplog.text
    new.close()
    assert [attempt.status for attempt in find_run("r").attempts] == ["lost", "finished"]
    assert len(list(Recording(runs_dir / "r", attempt=2))) == 1


def test_a_removed_run_directory_ends_the_recording_but_not_the_event_feed(runs_dir, caplog):
    # Its end waits for no answer: that would take longer than a test may.
    publisher = Publisher("r", timeouts=Timeouts(flush=1000.0))
    follower = Subscriber("r")
    connected = follower._following._heard
    # What is sent before the stream has taken the subscription can be had from the recording alone.
    wait_for(lambda: follower._listen() and follower._following._heard > connected, "the broker's first sign of life")
    following = iter(follower)
    publisher.publish(Event.EPOCH_START)
    assert next(following).seq == 1
    wait_for(lambda: publisher.poll() or publisher.statistics().acknowledged == 1, "the record")
    shutil.rmtree(runs_dir / "r")
    publisher.publish(Event.EPOCH_END)
    assert next(following).seq == 2
    wait_for(lambda: publisher.poll() or "not recorded at the moment" in caplog.text, "the warning")
    follower.close()
    publisher.close()
    assert "continues, but events after 1 are not recorded at the moment: the recording" in caplog.text


def test_the_next_broker_records_the_end_that_a_killed_one_missed(runs_dir):
    publisher = Publisher("r")
    publish_until_recorded(publisher, 1)
    broker = psutil.Process(broker_pid(runs_dir / "r"))
    publisher._flush(wait=True)
    publisher._publish_mark("$end", (0,) * 14, {"status": "failed", "error": "a reason"})
    publisher._outbox.send()
    broker.kill()
    # Whatever the broker came to before it was killed.
    publisher._session.flush(publisher._seq)
    publisher._shut()
    wait_for(lambda: not find_run("r").live, "the end of the run")
    assert (find_run("r").status, find_run("r").last.error) == ("failed", "a reason")


def test_an_unlisted_recording_does_not_block_the_run(runs_dir):
    (runs_dir / "r").mkdir()
    (runs_dir / "r" / "recording-1.mcap").write_bytes(b"of a broker that was killed in its first moment")
    with Publisher("r", resume=True) as publisher:
        publisher.publish(Event.EPOCH_END)
    assert (publisher.attempt, find_run("r").status) == (2, "finished")


class Peer:
    """A publisher of run ``r`` that sends what a test gives it."""

    def __init__(self, socket):
        self.socket = socket
        self.last_sent = 0
        self.heard = []
        self.say("hello", HELLO)
        self.hears("welcome")

    def say(self, kind, content):
        self.socket.send(encode_control(kind, content))

    def send(self, name, seq, base_seq, fields=None):
        encode = event_encoder(Topic("r", name, 0), 1)
        self.last_sent = seq
        self.socket.send(encode(seq, base_seq, 0, [0] * 14, None, fields or {}, pack_map({"world_size": 1})))

    def end(self, seq, base_seq):
        self.send("$end", seq, base_seq, {"status": "finished", "error": None})
        wait_for(lambda: not find_run("r").live, "the end of the run")

    def hears(self, kind, part=""):
        """Wait for a message of that kind with ``part`` in it, and keep all that come before it."""
        begin = time.monotonic()
        while time.monotonic() - begin < 100:
            if not self.socket.poll(500):
                self.say("report", {"last_sent": self.last_sent})
                continue
            message = answer(self.socket)
            self.heard.append(message)
            if message.kind == kind and part in str(message.content):
                return message.content
        raise AssertionError(f"no {kind!r} with {part!r} has come, but {self.heard}")


def recorded(runs_dir):
    recording = Recording(runs_dir / "r")
    return [snapshot.seq for snapshot in recording], [tuple(gap) for gap in recording.gaps], recording.ending.status


def test_an_invalid_event_is_refused_and_becomes_a_gap(stranger, runs_dir):
    peer = Peer(stranger)
    peer.send("epoch_start", 1, 1)
    peer.send("batch_start", 2, 1)
    peer.send("batch_end", 3, 3)
    refused = peer.hears("refused")
    assert refused["error"] == "ProtocolError"
    assert "rank 0 of run 'r': event 3 (batch_end) has the base_seq 3, where 2 belongs" in refused["reason"]
    peer.send("batch_end", 4, 3)
    peer.send("batch_start", 5, 4)
    assert "event 5 (batch_start) has the base_seq 4, where 3 belongs" in peer.hears("refused")["reason"]
    peer.send("batch_end", 6, 4)
    deep: list = []
    for _ in range(40):
        deep = [deep]
    peer.send("epoch_end", 7, 5, {"deep": deep})
    peer.hears("refused", "event 7")
    peer.send("epoch_end", 8, 6)
    for seq, fields in enumerate(({"status": "excellent"}, {}, {"status": "failed", "error": 5}), 9):
        peer.send("$end", seq, seq - 2, fields)
        peer.hears("refused", "its end has")
    peer.end(12, 10)
    assert recorded(runs_dir) == ([1, 2, 4, 6, 8], [(0, 3, 3), (0, 5, 5), (0, 7, 7), (0, 9, 11)], "finished")
    # A reader of base events is given the same.
    assert [snapshot.seq for snapshot in Recording(runs_dir / "r").snapshots([Event.BATCH_END])] == [4, 6]


def test_dropped_frames_are_named_in_the_log_with_a_reason(stranger, runs_dir):
    dropped = {
        b"": "a frame of 0 bytes has no topic",
        b"no topic": "a frame of 8 bytes has no topic",
        b"r/batch_end\0\x90": "is not a topic of the form RUN/EVENT/RANK",
        b"\0\xc1": "is not MessagePack: ",
        b"\0" + b"\x91" * 1_000_000: "is not MessagePack: nested too deep",
    }
    log = runs_dir / "r" / "broker.log"
    for frame, reason in dropped.items():
        stranger.send(frame)
        wait_for(lambda reason=reason: log.exists() and reason in log.read_text(), reason)
    assert all(not line.rstrip().endswith(":") for line in log.read_text().splitlines())


def test_odd_values_do_no_harm_and_never_make_invalid_json(stranger, runs_dir):
    odd = {"pid": 2**40, "host": socket.gethostname(), "info": {"config": {"lr": math.nan, "most": [math.inf]}}}
    stranger.send(encode_control("hello", {**HELLO, **odd}))
    assert answer(stranger).kind == "welcome"
    times = [0, -1, 2**64 - 1, 1, *[0] * 10]
    for seq, time_ns in ((1, -1), (2, 5)):
        stranger.send(event_encoder(Topic("r", "batch_end", 0), 1)(seq, seq, time_ns, times, None, {}, pack_map({})))
    wait_for(lambda: answer(stranger).kind == "ack", "the good event on disk")
    attempt = strict_json((runs_dir / "r" / "run.json").read_text())["attempts"][0]
    assert attempt["info"]["config"] == {"lr": "NaN", "most": ["Infinity"]}
    stranger.send(encode_control("report", {"lag": math.nan, "published": 2}))
    for command in (["show", "r"], ["runs"]):
        done = CliRunner().invoke(bus, [*command, "--json"], catch_exceptions=False)
        assert done.exit_code == 0
        strict_json(done.stdout)
    ending = {"status": "finished"}
    stranger.send(event_encoder(Topic("r", END, 0), 1)(3, 3, 5, times, None, ending, pack_map({})))
    wait_for(lambda: find_run("r").last.reached == Reached(0, 2**63 - 1, 1), "a readable end")
