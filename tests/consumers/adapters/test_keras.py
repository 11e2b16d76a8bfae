"""Callbacks that were written for Keras run in a consumer."""

import math
import os
import pickle
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

os.environ["KERAS_BACKEND"] = "torch"

import cloudpickle  # type: ignore[import-untyped]
import keras
import numpy as np
from commands import Run, command
from consumers_stream import record_run, snapshots_of_training
from keras.callbacks import (
    Callback,
    CSVLogger,
    EarlyStopping,
    History,
    LambdaCallback,
    ModelCheckpoint,
    ReduceLROnPlateau,
    RemoteMonitor,
    TerminateOnNaN,
)
from theirs import continued, rows, trained

from offloop.bus.errors import ConfigurationError
from offloop.consumers import CannotWorkError
from offloop.consumers.adapters.keras import KerasCallback
from offloop.consumers.cli.main import main
from offloop.consumers.cli.registry import CALLBACKS
from offloop.consumers.testing import LiveRun, MemoryStream, replay
from offloop.keras import OffloopCallback

LOSSES = (1.0, 0.9, 0.95, 0.96, 0.5)


def val_losses(epoch: int) -> Any:
    return {"val": {"loss": LOSSES[epoch - 1]}}


class Seen(Callback):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []


def _see(name: str) -> Any:
    def called(self: Seen, logs: Any = None) -> None:
        self.calls.append((name, dict(logs or {})))

    def called_with_number(self: Seen, number: int, logs: Any = None) -> None:
        self.calls.append((name, number, dict(logs or {})))

    return called_with_number if "batch" in name or "epoch" in name else called


for method in KerasCallback.methods:
    if "predict" not in method and method not in ("on_batch_begin", "on_batch_end"):
        setattr(Seen, method, _see(method))


# Keras turns torch's tensors into arrays in a way that NumPy has deprecated.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning")
def test_a_callback_sees_what_it_sees_in_fit_and_writes_the_same_file(tmp_path: Path, runs_dir: Path) -> None:
    keras.utils.set_random_seed(3)
    x, y = np.random.rand(20, 4), np.random.rand(20, 1)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    theirs = Seen()
    model.fit(
        x,
        y,
        batch_size=4,
        epochs=3,
        shuffle=False,
        verbose=0,
        validation_data=(x, y),
        validation_batch_size=20,
        callbacks=[theirs, CSVLogger(tmp_path / "theirs.csv"), OffloopCallback(run_name="run", runs_dir=runs_dir)],
    )

    ours = Seen()
    stream = MemoryStream(batches_per_epoch=5, batch_size=4, max_duration="3ep")
    file = KerasCallback(CSVLogger(tmp_path / "ours.csv"))
    ended = [logs for name, *_, logs in theirs.calls if name == "on_epoch_end"]
    with stream.attach(KerasCallback(ours), file):
        for name, *place, logs in theirs.calls:
            if name != "on_train_batch_end":
                continue
            batch = place[0] + 1
            # Theirs are the means over the epoch, the stream has the loss of the batch.
            before = 0.0 if batch == 1 else mean * (batch - 1)  # noqa: F821  of the round before
            mean = logs["loss"]
            last = ended[int(stream.timestamp.epoch)] if batch == 5 else {}
            found = {name.removeprefix("val_"): value for name, value in last.items() if name.startswith("val_")}
            mae = {name: logs[name] for name in logs if name != "loss"}
            stream.batch(loss=mean * batch - before, train_metrics=mae, evaluation={"val": found} if found else None)
        stream.finish()

    def without_batches_of_tests(calls: list[Any]) -> list[Any]:
        return [call if call[0] != "on_test_batch_end" else (call[0], call[1], {}) for call in calls]

    assert [call[:-1] for call in ours.calls] == [call[:-1] for call in theirs.calls]
    for call, like in zip(*map(without_batches_of_tests, (ours.calls, theirs.calls)), strict=True):
        assert call[-1] == pytest.approx(like[-1], abs=1e-6)
    replay(KerasCallback(CSVLogger(tmp_path / "recorded.csv")), runs_dir / "run")
    expected = rows(tmp_path / "theirs.csv")
    for written in (rows(tmp_path / "ours.csv"), rows(tmp_path / "recorded.csv")):
        assert [list(row) for row in written] == [list(row) for row in expected]
        for row, like in zip(written, expected, strict=True):
            values = {name: float(value) for name, value in like.items()}
            assert {name: float(value) for name, value in row.items()} == pytest.approx(values, abs=1e-6)


def test_the_command_writes_a_file_of_a_recording(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], runs_dir: Path, tmp_path: Path
) -> None:
    consumer: Run = command("consumer", main, monkeypatch, capsys)
    run = record_run(runs_dir, "done", snapshots_of_training())
    file = tmp_path / "epochs.csv"
    done = consumer("--replay", run, "--callbacks", "keras.callbacks:CSVLogger", "-o", f"CSVLogger.filename={file}")
    assert done.code == 0, done.err
    assert [(row["epoch"], float(row["loss"])) for row in rows(file)] == [
        ("0", pytest.approx(sum(1 / batch for batch in range(1, 5)) / 4)),
        ("1", pytest.approx(sum(1 / batch for batch in range(5, 9)) / 4)),
    ]


@pytest.mark.parametrize(("patience", "stops"), [(1, 12), (2, 16)])
def test_early_stopping_stops_where_it_would_in_training(patience: int, stops: int) -> None:
    # As a Trainer hands it to the process of its callbacks.
    made = pickle.loads(cloudpickle.dumps(KerasCallback(EarlyStopping(patience=patience))))
    logged = trained(made, epochs=5, evaluation=val_losses)
    assert [(one.name, one.decided_at, one.reason) for one in logged.commands] == [
        ("stop", stops, "EarlyStopping: it set model.stop_training")
    ]


def test_a_training_that_is_not_a_number_any_more_is_stopped() -> None:
    losses = [1.0, math.nan, 1.0, 1.0]
    logged = trained(KerasCallback(TerminateOnNaN()), epochs=1, loss=lambda batch: losses[batch - 1])
    assert [one.decided_at for one in logged.commands] == [2]


def test_a_new_rate_is_a_command() -> None:
    made = KerasCallback(ReduceLROnPlateau(patience=1, factor=0.5))
    logged = trained(made, epochs=3, evaluation={"eval": {"loss": 1.0}}, lr=0.5)
    assert [(one.name, one.arguments, one.decided_at) for one in logged.commands] == [
        ("set", ("lr", 0.25), 8),
        ("set", ("lr", 0.25), 12),
    ]


def test_histories_and_functions_see_each_epoch() -> None:
    history = History()
    seen: list[Any] = []
    functions = LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append((epoch, logs)))
    evaluations = {"eval": {"loss": 2.0}, "other": {"loss": 3.0}}
    trained(KerasCallback(history), KerasCallback(functions), epochs=2, evaluation=evaluations)
    assert history.history == {"loss": [1.0, 1.0], "val_loss": [2.0, 2.0], "other_loss": [3.0, 3.0]}
    assert seen == [(epoch, {"loss": 1.0, "val_loss": 2.0, "other_loss": 3.0}) for epoch in (0, 1)]
    assert history.params == {"verbose": 1, "epochs": 2, "steps": 4}


def test_a_server_is_sent_each_epoch() -> None:
    received: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            root = f"http://127.0.0.1:{server.server_port}"
            trained(KerasCallback(RemoteMonitor(root, send_as_json=True)), epochs=2)
        finally:
            server.shutdown()
            thread.join()
    assert received == [b'{"epoch": 0, "loss": 1.0}', b'{"epoch": 1, "loss": 1.0}']


class Weights(Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.get_weights()


class Layer(Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.layers[0]


@pytest.mark.parametrize(
    ("callback", "name"), [(Weights(), "Weights uses model.get_weights"), (Layer(), "Layer uses model.layers")]
)
def test_what_needs_the_model_is_refused_at_the_first_touch(callback: Any, name: str) -> None:
    with pytest.raises(CannotWorkError, match=f"{name}, which a consumer does not have: logs, .* in the training"):
        trained(KerasCallback(callback), epochs=1)


def test_what_cannot_work_at_all_is_refused_at_the_start() -> None:
    message = "ModelCheckpoint cannot run in a consumer, .* the callback 'checkpoint' saves the training"
    with pytest.raises(ConfigurationError, match=message):
        CALLBACKS.find("keras.callbacks:ModelCheckpoint")
    with pytest.raises(ConfigurationError, match=message):
        KerasCallback(ModelCheckpoint("x.keras"))
    with pytest.raises(ConfigurationError, match=r"EarlyStopping\(restore_best_weights=True\) cannot run .* leave it"):
        CALLBACKS.create("keras.callbacks:EarlyStopping", {"restore_best_weights": "true"})


@pytest.mark.parametrize("at", [10, 40, 47, 48, 52, 53, 80])
def test_a_consumer_that_continues_knows_what_it_knew(at: int, tmp_path: Path) -> None:
    stream = MemoryStream(max_duration="4ep", evaluation=val_losses, loss=lambda batch: 1 / batch)
    stream.train()
    stream.finish()
    whole, _, second = continued(lambda: KerasCallback(EarlyStopping(patience=9)), stream, at)
    assert second.state_dict() == whole.state_dict()
    assert (whole.callback.wait, whole.callback.best) == (2, 0.9)

    files = iter(["whole.csv", "continued.csv", "continued.csv"])
    _, first, _ = continued(lambda: KerasCallback(CSVLogger(tmp_path / next(files))), stream, at)
    first.callback.csv_file.close()
    assert (tmp_path / "continued.csv").read_text() == (tmp_path / "whole.csv").read_text()


@pytest.mark.slow
def test_a_live_run_is_stopped(tmp_path: Path) -> None:
    class Stops(Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = True

    with LiveRun(tmp_path, "digits", max_duration="1000ep", wait_for="test") as run:
        run.watch(KerasCallback(Stops()))
        assert run.wait().reason == "Stops: it set model.stop_training"
