"""A training on one machine that waits for a consumer which reads it from JetStream, and hands it tensors."""

import hashlib
import json
import subprocess
import sys

from tensor_stream import Wide
from training import Act, gold_trainer

from offloop.bus import Event

PYTHON = (sys.executable, "-m")
JUDGE = """
import hashlib, json, sys, time
from offloop.bus import Event, RunNotFoundError, Subscriber
from offloop.bus.types.demand import Demand, EventDemand
while True:
    try:
        stream = Subscriber(
            "r", stream=sys.argv[1], name="judge", barrier_events=[Event.BATCH_END],
            demand=Demand({Event.BATCH_END: EventDemand(1, {"weights": 1})}),
        )
        break
    except RunNotFoundError:
        time.sleep(0.05)
with stream:
    for snapshot in stream:
        if int(snapshot.timestamp.batch) == 5 and "weights" in snapshot.on_demand:
            views = snapshot.weights.items()
            print(json.dumps({name: hashlib.sha256(view.numpy().tobytes()).hexdigest() for name, view in views}))
            snapshot.send_command("set", "lr", 0.25)
        if int(snapshot.timestamp.batch) == 7:
            snapshot.stop_training("enough")
print(json.dumps([str(outcome) for outcome in stream.outcomes]))
"""
"""Stops the training at its batch 7, and says what its weights are at batch 5."""


def test_a_reader_on_another_host_is_awaited_commands_and_receives_tensors(server, runs_dir):
    begun, weights, rates = [], {}, []

    def begin(_event, state, logger):
        begun.append(subprocess.Popen([sys.executable, "-c", JUDGE, server.address], stdout=subprocess.PIPE, text=True))
        bridge = ("offloop.bus", "server", "bridge", "r", "--runs-dir", str(runs_dir), "--stream", server.address)
        begun.append(subprocess.Popen([*PYTHON, *bridge], stderr=subprocess.DEVNULL))

    def note(_event, state, logger):
        rates.append(state.optimizers[0].param_groups[0]["lr"])
        if int(state.timestamp.batch) == 5:
            weights.update(
                {
                    name: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
                    for name, value in state.model.state_dict().items()
                }
            )

    with gold_trainer(
        24, 6, publish=True, run_name="r", runs_dir=runs_dir, max_duration="10ep", wait_for="judge", model=Wide(),
        algorithms=[Act(begin, Event.INIT), Act(note, Event.BATCH_END)],
    ) as trainer:  # fmt: skip
        trainer.fit()
    try:
        assert trainer.state.timestamp.values[2] == 7
        said = begun[0].communicate(timeout=100)[0].splitlines()
        assert json.loads(said[0]) == weights
        assert json.loads(said[1]) == [
            "'set lr 0.25' took effect at batch 5 (batch_checkpoint), 0 batches after the decision",
            "'stop' took effect at batch 7 (batch_end), 0 batches after the decision",
        ]
        assert rates[5:] == [0.25, 0.25]
        assert 0.25 not in rates[:5]
    finally:
        for process in begun:
            process.kill()
            process.wait()
