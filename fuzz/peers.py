"""The processes that the socket fuzzer attacks: ``python fuzz/peers.py PEER ADDRESS RUN``.

Their last line of output is a report in JSON. An exception that they do not catch is a finding."""

import json
import select
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from offloop.bus import Event, Publisher, Subscriber
from offloop.bus.errors import OffloopError

BATCHES_A_SECOND = 500
LOOK_SECONDS = 2.0


def _goes_on() -> bool:
    return not select.select([sys.stdin], [], [], 0)[0]


def publish(address: str, run: str) -> dict[str, Any]:
    batch, longest = 0, 0.0
    is_there = False
    with Publisher(run, broker=address) as publisher:
        while _goes_on():
            batch += 1
            begin = time.perf_counter()
            publisher.publish(Event.BATCH_END, batch=batch, loss=1 / batch)
            longest = max(longest, time.perf_counter() - begin)
            time.sleep(1 / BATCHES_A_SECOND)
            if not is_there and publisher.statistics().acknowledged:
                is_there = True
                print(json.dumps({"ready": True}), flush=True)
        publisher.publish(Event.FIT_END, batch=batch)
        dropped = publisher.statistics().dropped
    return {"batches": batch, "dropped": dropped, "longest_stall": round(1000 * longest, 3)}


def consume(_address: str, run: str) -> dict[str, Any]:
    batches, wrong = 0, 0
    with Subscriber(run, events=[Event.BATCH_END]) as subscriber:
        print(json.dumps({"ready": True}), flush=True)
        for snapshot in subscriber:
            batches += 1
            wrong += int(snapshot.timestamp.batch) != batches
    ending = subscriber.ending
    return {"batches": batches, "wrong": wrong, "gaps": subscriber.gaps, "ending": ending and ending.status}


def publish_again(address: str, run: str) -> dict[str, Any]:
    told = {"publishers": 0, "refused": 0, "events": 0}
    print(json.dumps({"ready": True}), flush=True)
    while _goes_on():
        told["publishers"] += 1
        try:
            with Publisher(f"{run}-{told['publishers']}", broker=address) as publisher:
                for batch in range(1, 101):
                    publisher.publish(Event.BATCH_END, batch=batch)
                    if Event.BATCH_START in publisher.requested_events:
                        publisher.publish(Event.BATCH_START, batch=batch)
                    publisher.poll()
                    told["events"] += 1
                    time.sleep(0.001)
        except OffloopError:
            told["refused"] += 1
    return told


PEERS = {"publish": publish, "consume": consume, "publish_again": publish_again}

if __name__ == "__main__":
    print(json.dumps(PEERS[sys.argv[1]](*sys.argv[2:])), flush=True)
