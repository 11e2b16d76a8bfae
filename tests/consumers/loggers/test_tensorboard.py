"""Event files, read back with TensorBoard's own readers."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from consumers_stream import batch_end
from logged import LogsWhatItSees, Photographer, contents
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.hparams import metadata as hparams

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.consumers import Callback, Logger, Runner
from offloop.consumers.api.logger import Row, RunContext
from offloop.consumers.loggers.tensorboard import TensorboardLogger
from offloop.consumers.runner.state_file import StateFile


def log(directory: Path, *snapshots: Snapshot) -> EventAccumulator:
    Runner(list(snapshots), [LogsWhatItSees()], [TensorboardLogger(str(directory))]).run()
    return read(directory / "run")


def read(directory: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def text(accumulator: EventAccumulator, tag: str) -> str:
    [event] = accumulator.Tensors(tag)
    [value] = event.tensor_proto.string_val
    return bytes(value).decode()


def pixels(accumulator: EventAccumulator, tag: str) -> "np.ndarray[Any, Any]":
    [event] = accumulator.Images(tag)
    decoded = np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))
    assert decoded.shape[:2] == (event.height, event.width)
    return decoded


def test_a_histogram_is_drawn_between_its_edges(tmp_path: Path) -> None:
    class Spread(Callback):
        def batch_end(self, state: Snapshot, logger: Logger) -> None:
            logger.log_histogram([3, 0, 1], [-1.0, 0.0, 1.0, 2.0], "spread")

    Runner([batch_end(4)], [Spread()], [TensorboardLogger(str(tmp_path))]).run()
    [event] = read(tmp_path / "run").Histograms("spread")
    found = event.histogram_value
    assert (event.step, found.bucket_limit, found.bucket) == (4, [0.0, 1.0, 2.0], [3.0, 0.0, 1.0])
    assert (found.min, found.max, found.num, found.sum, found.sum_squares) == (-1.0, 2.0, 4.0, 0.0, 3.0)


def test_numbers_are_scalars_at_the_step_and_time_of_their_row(tmp_path: Path) -> None:
    first = batch_end(1, rows=[[1, {"loss/train/total": 0.5, "samples": 8, "last": True}], [7, {"late": 2.0}]])
    odd = [batch_end(n, rows=[[n, {"x": x}]]) for n, x in enumerate((math.nan, math.inf, -math.inf), 3)]
    read = log(tmp_path, first, batch_end(2, rows=[[2, {"loss/train/total": 0.25}]]), *odd)
    assert sorted(read.Tags()["scalars"]) == ["last", "late", "loss/train/total", "samples", "x"]
    assert [(event.step, event.value) for event in read.Scalars("loss/train/total")] == [(1, 0.5), (2, 0.25)]
    assert [event.wall_time for event in read.Scalars("loss/train/total")] == [1.7e9 + 0.25, 1.7e9 + 0.5]
    assert [(event.step, event.value) for event in read.Scalars("late")] == [(7, 2.0)]
    assert [read.Scalars(tag)[0].value for tag in ("samples", "last")] == [8.0, 1.0]
    assert read.FirstEventTimestamp() == 1.7e9 + 0.25
    assert [repr(event.value) for event in read.Scalars("x")] == ["nan", "inf", "-inf"]


def test_texts_and_tables_are_markdown(tmp_path: Path) -> None:
    table = {"columns": ["name", "score"], "rows": [["a|b", 0.5], ["two\nlines", None]], "name": "scores"}
    fields = {"rows": [[1, {"note": "a string"}]], "text": {"text": "*hello*", "name": "greeting"}, "table": table}
    read = log(tmp_path, batch_end(1, **fields))
    assert text(read, "note") == "a string"
    assert text(read, "greeting") == "*hello*"
    assert text(read, "scores").splitlines() == [
        "| name | score |",
        "| --- | --- |",
        "| a\\|b | 0.5 |",
        "| two<br>lines |  |",
    ]
    plugins = {read.SummaryMetadata(tag).plugin_data.plugin_name for tag in ("note", "greeting", "scores")}
    assert plugins == {"text"}


def test_hyperparameters_are_a_table_and_an_entry_of_the_dashboard(tmp_path: Path) -> None:
    read = log(tmp_path, batch_end(1, hyperparameters={"lr": 0.1, "seed": 17, "bf16": True, "layers": [8, 16]}))
    assert "| layers | [8, 16] |" in text(read, "hyperparameters")
    found = hparams.parse_session_start_info_plugin_data(
        read.SummaryMetadata(hparams.SESSION_START_INFO_TAG).plugin_data.content
    )
    assert found.group_name == "run"
    assert found.start_time_secs == 1.7e9 + 0.25
    kinds = {name: str(value.WhichOneof("kind")).removesuffix("_value") for name, value in found.hparams.items()}
    assert kinds == {"lr": "number", "seed": "number", "bf16": "bool", "layers": "string"}
    assert found.hparams["lr"].number_value == 0.1


def test_images_are_read_back_pixel_for_pixel(tmp_path: Path) -> None:
    colours = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    grey = np.linspace(0, 1, 6).reshape(1, 2, 3)
    read = log(
        tmp_path,
        batch_end(3, images={"images": colours, "name": "inputs", "channels_last": True}),
        batch_end(4, images={"images": grey, "name": "grey"}),
    )
    assert read.Tags()["images"] == ["inputs/0", "inputs/1", "grey/0"]
    assert [np.array_equal(pixels(read, f"inputs/{n}"), colours[n]) for n in (0, 1)] == [True, True]
    assert pixels(read, "grey/0").tolist() == [[0, 51, 102], [153, 204, 255]]
    assert read.Images("inputs/0")[0].step == 3


def test_masks_are_drawn_over_images_with_a_colour_for_each_class(tmp_path: Path) -> None:
    image = np.full((1, 2, 2), 0.5, np.float32)
    mask = np.array([[0, 1], [2, 1]])
    images = {"images": image, "name": "cells", "masks": {"truth": mask}, "mask_class_labels": {1: "cell", 2: "wall"}}
    read = log(tmp_path, batch_end(1, images=images))
    assert pixels(read, "cells/0").shape == (2, 2)
    shown = pixels(read, "cells/0/truth")
    assert shown[0, 0].tolist() == [128, 128, 128]
    assert shown[0, 1].tolist() == shown[1, 1].tolist()
    assert len({tuple(shown[at].tolist()) for at in ((0, 0), (0, 1), (1, 0))}) == 3
    [file] = (tmp_path / "run").iterdir()
    descriptions = [v.metadata.summary_description for e in EventFileLoader(str(file)).Load() for v in e.summary.value]
    assert descriptions == ["", "1: cell, 2: wall"]


@pytest.mark.parametrize(("behind", "hyperparameters"), [(0, {}), (1, {"seed": 17})])
def test_a_resumed_attempt_has_no_step_twice(behind: int, hyperparameters: dict[str, Any], tmp_path: Path) -> None:
    """Whether rows have the step at which their batch ends or, as losses do, the one at which it began."""
    for attempt, batches in ((1, range(1, 9)), (2, range(6, 12))):
        destination = TensorboardLogger()
        destination.open(RunContext("digits", attempt, tmp_path))
        for batch in batches:
            state = batch_end(batch)
            if hyperparameters and batch == batches[0]:
                destination.log_hyperparameters(hyperparameters, state)
            rows = [Row(batch, state.time, {"y": attempt}), Row(batch - behind, state.time, {"x": attempt})]
            destination.log_rows(rows, state)
        destination.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    found = [(event.step + behind, event.value) for event in read(tmp_path / "tensorboard").Scalars("x")]
    assert found == [*((batch, 1) for batch in range(1, 6)), *((batch, 2) for batch in range(6, 12))]


def test_a_consumer_killed_at_any_moment_resumes_to_equal_bytes(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"a": 1.0}, {"a": 2.0, "b": "text"}, {}, {"b": 3.0}, {"a": 5.0}]
    stream = [batch_end(n, rows=[[n, row]], text={"text": str(n), "name": "t"}) for n, row in enumerate(rows, 1)]

    def run(directory: Path, photographer: Photographer) -> dict[str, bytes]:
        destinations = [TensorboardLogger(str(directory / "logged")), photographer]
        with StateFile(directory / "state", "mine", "run", 1) as progress:
            Runner(stream, [LogsWhatItSees()], destinations, progress=progress, commit_every=2).run()
        return contents(directory / "logged")

    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    photographer = Photographer(undisturbed)
    expected = run(undisturbed, photographer)
    assert len(photographer.copies) > len(stream)
    for copy in photographer.copies:
        assert run(copy, Photographer()) == expected


def test_an_existing_folder_is_refused_with_an_alternative(tmp_path: Path) -> None:
    log(tmp_path, batch_end(1, rows=[[1, {"x": 1}]]))
    with pytest.raises(ConfigurationError, match=r"tensorboard\.overwrite=true.*-o tensorboard\.log_dir=DIR"):
        log(tmp_path, batch_end(1, rows=[[1, {"x": 1}]]))
    with pytest.raises(ConfigurationError, match=r"-o tensorboard\.log_dir=DIR"):
        TensorboardLogger().open(RunContext("run", 1, None))
    # Of that name in another folder.
    other = TensorboardLogger(str(tmp_path))
    other.open(RunContext("run", 1, None, run_id="0123456789"))
    other.close()
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run-012345"}
