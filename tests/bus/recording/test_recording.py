"""A recording as people use it: iterated over, left and closed."""

from pathlib import Path

import psutil
import pytest

from offloop.bus import Event, Publisher, Recording


@pytest.mark.usefixtures("runs_dir")
def test_with_closes_the_file_of_an_iteration_that_was_left() -> None:
    with Publisher("r") as publisher:
        for batch in range(1, 4):
            publisher.publish(Event.BATCH_END, batch=batch)

    def is_open() -> bool:
        return publisher.recording.resolve() in [Path(one.path) for one in psutil.Process().open_files()]

    with Recording(publisher.recording) as recording:
        iteration = iter(recording)
        next(iteration)
        assert is_open()
    assert not is_open()
    recording.close()
    assert len(list(recording)) == 3
    assert not is_open()
