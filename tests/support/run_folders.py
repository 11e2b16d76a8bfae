"""Runs on disk, made without training anything."""

import os

from offloop.bus import Event
from offloop.bus.protocol.frames import END, Topic, event_encoder, pack_map
from offloop.bus.protocol.order import Ending
from offloop.bus.protocol.run_state import Reached
from offloop.bus.recording.writer import RecordingWriter
from offloop.bus.runs.writing import RunDirectory

STARTED = 1_700_000_000.0


class WrittenRun:
    """A run as a broker leaves it on the disk, written event by event; live until :meth:`end`."""

    def __init__(self, runs_dir, name, hyperparameters=None, started=STARTED, world_size=1):
        self.directory = RunDirectory(runs_dir, name)
        self.name, self.started, self.path = name, started, self.directory.path
        self.attempt, recording = self.directory.next_attempt()
        self.writer = RecordingWriter(recording, name, self.attempt, self.directory.run_id)
        self.directory.begin_attempt(recording, self.attempt, {}, world_size, started)
        self.directory.announce(self.attempt, "ipc://control", "ipc://stream")
        self.seq = self.batch = 0
        self.context = pack_map({"max_duration": "9ep", "dataloader_len": 10})
        self.send(Event.INIT, {"hyperparameters": hyperparameters or {}})
        self.send(Event.FIT_START, {})

    def send(self, event, fields):
        """Record an event of the first rank."""
        self.seq += 1
        topic, batch = Topic(self.name, Event(event).value if event != END else END, 0), self.batch
        now = (0, batch // 10, batch, 8 * batch, 0, 0, 0, batch % 10, 0, 0, 1000 * batch, 0, 0, 1000)
        before = (0, 0, batch - 1, *now[3:]) if batch else None
        time_ns = int(self.started * 10**9) + self.seq
        frame = event_encoder(topic, self.attempt)(self.seq, self.seq, time_ns, now, before, fields, self.context)
        self.writer.append(topic.encode()[:-1], self.seq, self.seq, time_ns, frame[len(topic.encode()) :])

    def train(self, losses, accuracy=None):
        """Record a batch for each loss, and an evaluation where there is an accuracy."""
        for loss in losses:
            self.batch += 1
            self.send(Event.BATCH_END, {"loss": loss, "lr": {"SGD": [0.1]}})
        if accuracy is not None:
            metrics = {"eval": {"Accuracy": accuracy}}
            self.send(Event.EVAL_END, {"dataloader_label": "eval", "eval_metrics": metrics})
        self.writer.flush()
        return self

    def end(self, status="finished", error=None):
        """End the run; return its directory."""
        self.send(END, {"status": status, "error": error})
        self.writer.close()
        reached = Reached(self.batch // 10, self.batch, 8 * self.batch, "9ep")
        self.directory.end_attempt(Ending(status, error), reached=reached, ended=self.started + 60)
        self.directory.release()
        return self.path

    def abandon(self):
        """Leave what is left when the broker is killed."""
        self.writer.flush()
        self.directory._close()
        os.close(self.writer._descriptor)


def write_run(runs_dir, name, losses=(1.0, 0.5), accuracy=None, status="finished", started=STARTED, **hyperparameters):
    """Return a run that has ended; returns its directory."""
    return WrittenRun(runs_dir, name, hyperparameters, started).train(losses, accuracy).end(status)
