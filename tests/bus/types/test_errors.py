"""Errors carry what programs need of them, besides the text."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from offloop.bus import Event, Recording, Snapshot
from offloop.bus.errors import (
    BrokerError,
    ConfigurationError,
    FieldNotAvailableError,
    FrozenSnapshotError,
    InvalidRunNameError,
    InvalidTimeError,
    OffloopError,
    ProtocolError,
    RecordingError,
    RunNotFoundError,
)
from offloop.bus.plugins.options import convert_options, options_of
from offloop.bus.protocol.frames import MAX_FRAME, check_run_name, split_frame
from offloop.bus.publisher.launch import error_by_name
from offloop.bus.types.time import Time
from offloop.consumers import SpeedMonitor


def _assign() -> None:
    Snapshot.build(Event.BATCH_END).loss = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "fail", "data"),
    [
        (InvalidTimeError, lambda: Time.from_timestring("5"), {"value": "5"}),
        (InvalidRunNameError, lambda: check_run_name("a/b"), {"run": "a/b", "path": None}),
        (RecordingError, lambda: Recording("absent.mcap"), {"path": Path("absent.mcap")}),
        (ProtocolError, lambda: split_frame(bytes(MAX_FRAME + 1)), {"size": MAX_FRAME + 1, "limit": MAX_FRAME}),
        (FieldNotAvailableError, lambda: Snapshot.build(Event.BATCH_END).absent, {"field": "absent"}),
        (FrozenSnapshotError, _assign, {"field": "loss"}),
        (
            ConfigurationError,
            lambda: convert_options("speed", options_of(SpeedMonitor), {"window_size": "ten"}),
            {"name": "speed.window_size", "value": "ten"},
        ),
    ],
)
def test_an_error_carries_its_data_also_through_a_pickle(
    kind: type[OffloopError], fail: Callable[[], object], data: dict[str, object], runs_dir: Path
) -> None:
    with pytest.raises(kind) as raised:
        fail()
    for error in (raised.value, pickle.loads(pickle.dumps(raised.value))):
        assert type(error) is kind
        assert str(error) == str(raised.value)
        assert {name: getattr(error, name) for name in data} == data


@pytest.mark.parametrize("name", ["Path", "ValueError", ""])
def test_a_broker_can_name_errors_of_ours_alone(name: str) -> None:
    assert type(error_by_name(name, "refused")) is BrokerError


def test_only_declared_attributes_can_be_given() -> None:
    with pytest.raises(TypeError, match="RunNotFoundError has no attribute color"):
        RunNotFoundError("no run", color="red")
