"""The page of a run, below the charts: images over the steps, checkpoints, files, alerts, and what the run says."""

import sys
import textwrap
from pathlib import Path

import pytest
from browser import Visit, commanded, visit

from bus import Event, Publisher

pytestmark = pytest.mark.timeout(120)

CONSUMER = (sys.executable, "-m", "consumers", "-o", "dashboard.port=0", "--log", "")

PICTURES = textwrap.dedent("""
    import numpy as np
    from consumers import Callback

    class Pictures(Callback):
        def batch_end(self, state, logger):
            batch = int(state.timestamp.batch)
            logger.log_images(np.full((3, 4, 4), 10 * batch, np.uint8), name="__proto__")
            if batch % 2:
                logger.log_images([np.full((2, 2), batch / 10)] * 2, name="maps")
""")


@pytest.fixture
def run(runs_dir: Path) -> Path:
    """A run of six batches that has ended."""
    with Publisher("r", info={"config": {"lr": 0.5}}) as publisher:
        publisher.publish(Event.FIT_START, hyperparameters={"config": {"lr": 0.5, "width": 32}})
        for batch in range(1, 7):
            publisher.publish(Event.BATCH_END, batch=batch, sample=8 * batch, batch_size=8, loss=1 / batch)
    return runs_dir / "r"


def pixels(there: Visit, name: str) -> list[list[int]]:
    """The first pixel of each image of that name that is loaded."""
    code = """(name) => [...document.querySelectorAll(`section[aria-label="${name}"] img`)].map((image) => {
        if (!image.complete || !image.naturalWidth) return null;
        const canvas = document.createElement("canvas");
        canvas.width = canvas.height = 1;
        const context = canvas.getContext("2d");
        context.drawImage(image, 0, 0);
        return [...context.getImageData(0, 0, 1, 1).data.slice(0, 3)];
    })"""
    return list(there.page.evaluate(code, name))


def test_images_of_every_step_are_loaded_when_they_are_chosen(run: Path, tmp_path: Path, browser) -> None:
    (tmp_path / "pictures.py").write_text(PICTURES)
    callbacks = f"dashboard,{tmp_path / 'pictures.py'}:Pictures"
    with commanded(*CONSUMER, "--callbacks", callbacks, "--replay", str(run)) as served:
        served.has_said("stays at")
        with visit(browser, served.url, viewport={"width": 1280, "height": 2000}) as there:
            asked: list[str] = []
            there.page.on("request", lambda request: asked.append(request.url))
            there.waits_for(lambda: pixels(there, "__proto__") == [[60] * 3], "the newest image")
            slider = there.page.get_by_label("Step of __proto__")
            slider.focus()
            there.page.keyboard.press("ArrowLeft")
            there.waits_for(lambda: slider.get_attribute("aria-valuetext") == "batch 5", "the step in words")
            there.waits_for(lambda: pixels(there, "__proto__") == [[50] * 3], "the one before")
            there.page.keyboard.press("Home")
            there.waits_for(lambda: pixels(there, "__proto__") == [[10] * 3], "the first")
            assert pixels(there, "maps") == [[128] * 3] * 2, "other names stay where they are"
            assert not [url for url in asked if "step=3" in url and "__proto__" in url], "not those between"
            there.waits_for(lambda: "image=__proto__" in there.page.url, "the step in the address")
            there.page.reload()
            there.waits_for(lambda: pixels(there, "__proto__") == [[10] * 3], "the same after a reload")
            there.page.get_by_role("button", name="Newest of __proto__").click()
            there.waits_for(lambda: pixels(there, "__proto__") == [[60] * 3], "the newest again")
