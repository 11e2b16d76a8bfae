"""The lock that says that a run is live."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from offloop.bus.runs import lock as run_lock


@pytest.fixture(params=[run_lock.CAN_ASK, False])
def opened(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The same file, opened three times; also as on a system where a lock cannot be asked about."""
    monkeypatch.setattr(run_lock, "CAN_ASK", request.param)
    descriptors = [os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2)]
    descriptors.append(os.open(tmp_path / "lock", os.O_RDONLY))
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


def test_one_has_it_and_everybody_may_ask(opened: list[int]) -> None:
    first, second, asking = opened
    assert not run_lock.is_held(asking)
    assert run_lock.take(first)
    assert run_lock.is_held(asking)
    assert run_lock.is_held(second)
    assert not run_lock.take(second)
    # Opened and closed again elsewhere in the same process, it stays.
    os.close(os.open(f"/dev/fd/{asking}", os.O_RDONLY))
    assert run_lock.is_held(asking)


def test_it_goes_with_its_holder(opened: list[int], tmp_path: Path) -> None:
    _, second, asking = opened
    holder = os.open(tmp_path / "lock", os.O_RDWR)
    assert run_lock.take(holder)
    os.close(holder)
    assert not run_lock.is_held(asking)
    assert run_lock.take(second)
