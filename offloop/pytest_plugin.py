"""The pytest plug-in: fixtures for tests of callbacks."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from offloop.bus.recording.recording import Recording
    from offloop.consumers.testing.golden import Golden
    from offloop.consumers.testing.harness import Logged

__all__ = ["golden", "recording", "replay"]

UPDATE = "--offloop-update-golden"
FOLDER = "offloop_recordings"
GOLDEN = "golden"  # folder of golden files, beside the test


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("offloop").addoption(
        UPDATE,
        action="store_true",
        dest="offloop_update_golden",
        help="write the golden files of tests (offloop)",
    )
    parser.addini(FOLDER, "further folder of recordings, relative to the rootdir (offloop)", default="")


@pytest.fixture
def recording(request: pytest.FixtureRequest) -> "Callable[..., Recording]":
    """``recording("digits.mcap")``: open a recording, or the newest one of a run's directory.

    ``attempt`` chooses another. The path is relative to the test's file, or to the folder of the setting
    ``offloop_recordings``."""

    def open_recording(path: str | Path, attempt: int | None = None) -> "Recording":
        __tracebackhide__ = True
        from offloop.bus.recording.recording import Recording

        return Recording(_find(path, request), attempt)

    return open_recording


@pytest.fixture
def replay(request: pytest.FixtureRequest) -> "Callable[..., Logged]":
    """``replay(callbacks, source)``: replay a recording to callbacks, see :func:`offloop.consumers.testing.replay`.

    A path is resolved as by the fixture ``recording``."""

    def run(callbacks: Any, source: Any, **options: Any) -> "Logged":
        from offloop.consumers.testing.harness import replay as replay_source

        return replay_source(callbacks, _find(source, request) if isinstance(source, str | Path) else source, **options)

    return run


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> "Golden":
    """``golden.check(logged, "name")``: compare with the file ``golden/NAME.jsonl`` beside the test.

    See :class:`offloop.consumers.testing.Golden`. ``pytest --offloop-update-golden`` writes the files anew."""
    from offloop.consumers.testing.golden import Golden

    update = bool(request.config.getoption("offloop_update_golden"))
    return Golden(request.path.parent / GOLDEN, update, f"pytest '{request.node.nodeid}' {UPDATE}")


def _find(path: str | Path, request: pytest.FixtureRequest) -> Path:
    __tracebackhide__ = True
    from offloop.bus.errors import RecordingError

    places = [request.path.parent / path]
    folder = request.config.getini(FOLDER)
    if folder:
        places.append(request.config.rootpath / folder / path)
    for place in places:
        if place.exists():
            return place
    raise RecordingError(
        f"there is no recording {' and no '.join(map(str, places))}: use a path relative to the test, or set "
        f"{FOLDER} to the folder of recordings"
    )
