"""The images of a run over its steps: what is kept of them, and what a browser is told."""

import numpy as np

from offloop.consumers.api.logger import Images
from offloop.consumers.dashboard.view import images as view_images
from offloop.consumers.dashboard.view.images import ImageHistory
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.web.panels import galleries_of

SIDE = 10
BYTES = SIDE * SIDE


def logged(step, name="a", count=1, value=0):
    pixels = np.full((SIDE, SIDE, 1), value, np.uint8)
    return Images(step, 0.0, name, [pixels] * count, {}, None, True)


def steps(history, name="a"):
    return [step for step, _ in history.steps().get(name, [])]


def test_what_is_logged_again_at_a_step_replaces_what_was_there():
    history = ImageHistory(max_bytes=2 * BYTES)
    for value in range(20):
        history.take(logged(1, value=value))
        history.take(logged(2, value=value))
    assert steps(history) == [1, 2]
    # A step between has those before it.
    assert [history.at("a", step).pixels[0][0, 0, 0] for step in (1, 1.5, 99)] == [19] * 3
    assert history.at("a", 0) is history.at("b", 1) is None


def test_of_too_many_steps_the_first_the_newest_and_evenly_some_between_are_kept():
    history = ImageHistory(max_bytes=20 * BYTES)
    for step in range(0, 10_000, 10):
        history.take(logged(step))
        kept = steps(history)
        assert len(kept) <= 20
        assert (kept[0], kept[-1]) == (0, step)
    between = np.diff(kept[:-1])
    assert between.max() <= 4 * between.min(), kept


def test_names_share_the_room_and_none_loses_its_newest(monkeypatch):
    history = ImageHistory(max_bytes=12 * BYTES)
    history.take(logged(1, "rare"))
    for step in range(1, 100):
        history.take(logged(step, "often"))
    history.take(logged(100, "rare"))
    assert steps(history, "rare") == [1, 100]
    assert len(steps(history, "often")) == 10
    monkeypatch.setattr(view_images, "MAX_NAMES", 2)
    history.take(logged(1, "third"))
    assert set(history.steps()) == {"rare", "third"}


def test_a_gallery_has_all_runs_with_their_steps():
    count = 3
    runs = [RunView(f"r{number}") for number in range(count)]
    for number, run in enumerate(runs):
        run.log_images(logged(number, "\u202ename"))
    runs[0].log_images(logged(7, "own"))
    both, own = galleries_of(runs, [run.run_name for run in runs])
    assert [run["steps"] for run in both["runs"]] == [[number] for number in range(count)]
    assert len({run["address"] for run in both["runs"]}) == count
    assert (both["name"], both["title"]) == ("\u202ename", "\\u202ename")
    assert [run["label"] for run in own["runs"]] == ["r0"]
