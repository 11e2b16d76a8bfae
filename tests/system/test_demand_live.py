"""What consumers ask for, through a real trainer, broker and consumer processes."""

import signal
import subprocess
import sys
import time

import zmq
from faults import HandBroker
from helpers import wait_for
from training import Act, gold_trainer

from offloop.bus import Event, Publisher, Recording, find_run
from offloop.bus.protocol.frames import DEMAND, encode_control
from offloop.bus.recording.source import RecordSource
from offloop.bus.types.demand import Demand, EventDemand

WATCHER = """
import sys
from offloop.bus import Event, Subscriber
from offloop.bus.types.demand import Demand, EventDemand
event, every = Event(sys.argv[1]), int(sys.argv[2])
demand = Demand({event: EventDemand(every, {"counted": every})})
with Subscriber("r", events=[event], demand=demand, name="watcher") as stream:
    for snapshot in stream:
        if "counted" in snapshot.on_demand:
            print(int(snapshot.timestamp.batch), flush=True)
"""


class Counted:
    def __init__(self):
        self.batches = []

    def __call__(self, state):
        self.batches.append(int(state.timestamp.batch))
        return float(len(self.batches))


def train(counted, at_each_batch):
    """Trains until ``at_each_batch`` says that it is enough."""

    def watch(event, state, logger):
        if at_each_batch(int(state.timestamp.batch)):
            state.stop_training()

    trainer = gold_trainer(
        64, 1, max_duration="1000000ba", publish=True, run_name="r", max_delay=0, fields={"counted": counted},
        algorithms=[Act(watch, Event.BATCH_CHECKPOINT)],
    )  # fmt: skip
    trainer.fit()
    trainer.close()


def test_a_field_is_computed_at_the_requested_interval_until_the_consumer_dies(runs_dir, tmp_path):
    counted, watchers, printed = Counted(), [], tmp_path / "printed"

    def step(batch):
        time.sleep(0.002)
        if batch == 10:
            assert counted.batches == []
            with printed.open("w") as file:
                watchers.append(subprocess.Popen([sys.executable, "-c", WATCHER, "batch_end", "10"], stdout=file))
        if len(counted.batches) >= 10 and printed.read_text().count("\n") > 5:
            watchers[0].kill()
        return watchers and watchers[0].poll() is not None and counted.batches[-1] < batch - 100

    train(counted, step)
    seen = [int(line) for line in printed.read_text().split()]
    assert seen == counted.batches[: len(seen)]
    first, last = counted.batches[0], counted.batches[-1]
    assert counted.batches == list(range(first, last + 1, 10))
    assert first % 10 == 0
    # The recording says from which batch on it would be there.
    records = RecordSource(find_run("r").recording)
    since = next(record.event.timestamp.batch for record in records if record.topic.name == DEMAND)
    assert 10 <= since <= first <= since + 10
    recorded = [snapshot for snapshot in Recording(find_run("r").recording) if "counted" in snapshot.on_demand]
    assert [int(snapshot.timestamp.batch) for snapshot in recorded] == counted.batches


def test_requested_events_continue_after_a_restart_of_the_broker(runs_dir):
    def lease(address):
        context = zmq.Context()
        consumer = context.socket(zmq.DEALER)
        consumer.connect(address)
        demand = Demand({Event.BATCH_END: EventDemand(1, {"counted": 1})})
        consumer.send(encode_control("lease", {"run": "r", "demand": demand.to_wire()}))
        wait_for(lambda: publisher.poll() or publisher.demand.events, "the demand")
        context.destroy(linger=0)

    with HandBroker(runs_dir) as broker, Publisher("r", broker=broker.address) as publisher:
        lease(broker.address)
        version = publisher.demand_version
        broker.end(signal.SIGKILL)
        broker.start()
        publisher.publish(Event.BATCH_END)
        # The consumer has not come to the new broker yet.
        wait_for(lambda: publisher.poll() or publisher.recorded_all, "the new broker")
        assert publisher.demand_version == version
        assert publisher.statistics().broker_restarts == 1
        # It never does.
        wait_for(lambda: publisher.poll() or not publisher.demand.events, "the end of the lease")
