"""TensorBoard event files."""

import colorsys
import io
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from offloop.bus.lazy import LazyModule
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.consumers.api.images import as_bytes, as_png
from offloop.consumers.api.logger import Entry, Histogram, Images, LogValue, Row, RunContext, Text, Upload
from offloop.consumers.api.optional import np
from offloop.consumers.loggers.files import FileDestination

event_pb2: LazyModule = LazyModule("tensorboard.compat.proto.event_pb2")
summary_pb2: LazyModule = LazyModule("tensorboard.compat.proto.summary_pb2")
hparams: LazyModule = LazyModule("tensorboard.plugins.hparams.summary_v2")
image_metadata: LazyModule = LazyModule("tensorboard.plugins.image.metadata")
text_plugin: LazyModule = LazyModule("tensorboard.plugins.text.summary_v2")
record_writer: LazyModule = LazyModule("tensorboard.summary.writer.record_writer")

_FILE_VERSION = "brain.Event:2"
_BEFORE_THE_TRAINING_TIME_IS_KNOWN = (Event.INIT, Event.BEFORE_LOAD)
_BEFORE_THE_RUN_DESCRIBES_ITSELF = (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD)
_GOLDEN_RATIO = 0.618034


class TensorboardLogger(FileDestination):
    """Writes event files for TensorBoard, by default to ``tensorboard`` in the run's directory.

    Numbers are scalars (32-bit floats in TensorBoard) and texts are texts, each with the step and the time of its
    event. Images are PNG, a tag for each image of a call (``Images/0``, ``Images/1``) and for each of its masks
    (``Images/0/prediction``): the classes in colours over the image, except class 0, the background. Floats in images
    go from 0 to 1; other images are stretched to that range. Tables are Markdown. Hyperparameters are a table, and an
    entry of the HParams dashboard: those of the run, and those that callbacks logged until then. Files are left out.

    With ``log_dir`` each run has a directory in it, of its name and the start of its id. Every attempt writes a
    separate file, and TensorBoard shows them as one run: of a step that was trained twice, the later attempt. Equal
    streams give files with equal bytes."""

    name = "tensorboard"
    elsewhere = "log_dir=DIR"
    requires: tuple[str, str] = ("tensorboard", "tensorboard.compat.proto.event_pb2")

    def __init__(self, log_dir: str | None = None, overwrite: bool = False) -> None:
        super().__init__(None, overwrite)
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._run_name = ""
        self._begins_again = False
        self._waiting: dict[str, Any] = {}  # hyperparameters for the dashboard, which shows only the first entry
        self._waiting_since = (0.0, 0)

    def open(self, context: RunContext) -> None:
        self._run_name = context.run_name
        if not self._goes_on:
            self._begins_again = context.attempt > 1
        super().open(context)
        self.where: str = f"tensorboard --logdir {shlex.quote(str(self.opened_path.parent))}"

    def log_rows(self, rows: Sequence[Row], state: Snapshot) -> None:
        self._begin_attempt(state, min(row.step for row in rows))
        if state.event not in _BEFORE_THE_RUN_DESCRIBES_ITSELF:
            self._write_for_dashboard()
        for row in rows:
            self._write_values((_metric(name, value) for name, value in row.metrics.items()), row.time, row.step)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any], state: Snapshot) -> None:
        # They come before the rows of their event, and those of a batch may have the step at which it began.
        began = state.previous_timestamp if state.event is Event.BATCH_END else None
        self._begin_attempt(state, (began or state.timestamp).values.batch)
        step = state.timestamp.values.batch
        values = {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in hyperparameters.items()
        }
        table = _markdown(["name", "value"], list(map(list, values.items())))
        self._write_values([_text("hyperparameters", table)], state.time, step)
        if not self._waiting:
            self._waiting_since = (state.time, step)
        self._waiting |= values
        if state.event not in _BEFORE_THE_RUN_DESCRIBES_ITSELF:
            self._write_for_dashboard()

    def log_entry(self, entry: Entry, state: Snapshot) -> None:
        if isinstance(entry, Upload):
            return
        self._begin_attempt(state, entry.step)
        if isinstance(entry, Images):
            values = _pictures(entry)
        elif isinstance(entry, Histogram):
            values = iter([_histogram(entry)])
        else:
            text = entry.text if isinstance(entry, Text) else _markdown(entry.columns, entry.rows)
            values = iter([_text(entry.name, text)])
        self._write_values(values, entry.time, entry.step)

    def close(self) -> None:
        try:
            if self._file is not None:
                self._write_for_dashboard()
        finally:
            super().close()

    def state_dict(self) -> dict[str, Any]:
        waiting = {"waiting": dict(self._waiting), "waiting_since": list(self._waiting_since)}
        return {**super().state_dict(), "begins_again": self._begins_again, **waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._begins_again = bool(state["begins_again"])
        self._waiting = dict(state.get("waiting", {}))
        time, step = state.get("waiting_since", (0.0, 0))
        self._waiting_since = (float(time), int(step))

    def _default_path(self, context: RunContext) -> Path:
        if self._log_dir is None:
            directory = super()._default_path(context).with_name("tensorboard")
        else:
            directory = self._log_dir / context.unique_name
        # TensorBoard reads the files of a directory in the order of their names.
        return directory / f"events.out.tfevents.{context.attempt:010}.offloop"

    def _begin_attempt(self, state: Snapshot, step: int) -> None:
        """Let TensorBoard forget earlier attempts from the next step on."""
        if self._begins_again and state.event not in _BEFORE_THE_TRAINING_TIME_IS_KNOWN:
            self._begins_again = False
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write_event(wall_time=state.time, step=step, session_log=start)

    def _write_for_dashboard(self) -> None:
        if self._waiting:
            time, step = self._waiting_since
            entry = hparams.hparams_pb(self._waiting, trial_id=self._run_name, start_time_secs=time)
            self._write_values(entry.value, time, step)
            self._waiting = {}

    def _write_values(self, values: Iterable[Any], time: float, step: int) -> None:
        self._write_event(wall_time=time, step=step, summary=summary_pb2.Summary(value=values))

    def _write_event(self, wall_time: float, **content: Any) -> None:
        records = [event_pb2.Event(wall_time=wall_time, **content)]
        if not self._bytes:
            records.insert(0, event_pb2.Event(wall_time=wall_time, file_version=_FILE_VERSION))
        self._append(b"".join(map(_framed, records)))


def _framed(record: Any) -> bytes:
    frame = io.BytesIO()
    record_writer.RecordWriter(frame).write(record.SerializeToString())
    return frame.getvalue()


def _metric(name: str, value: LogValue) -> Any:
    return _text(name, value) if isinstance(value, str) else summary_pb2.Summary.Value(tag=name, simple_value=value)


def _histogram(entry: Histogram) -> Any:
    middles = [(low + high) / 2 for low, high in pairwise(entry.edges)]
    moments = (math.fsum(n * x**power for n, x in zip(entry.counts, middles, strict=True)) for power in (0, 1, 2))
    sums = dict(zip(("num", "sum", "sum_squares"), moments, strict=True))
    bins = {"bucket_limit": entry.edges[1:], "bucket": entry.counts}
    histogram = summary_pb2.HistogramProto(min=entry.edges[0], max=entry.edges[-1], **sums, **bins)
    return summary_pb2.Summary.Value(tag=entry.name, histo=histogram)


def _text(name: str, text: str) -> Any:
    return text_plugin.text_pb(name, text).value[0]


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    text = "" if value is None else str(value)
    return text.replace("|", "\\|").replace("\n", "<br>")


def _pictures(entry: Images) -> Iterator[Any]:
    labels = entry.mask_class_labels or {}
    legend = ", ".join(f"{number}: {label}" for number, label in labels.items())
    for number, image in enumerate(entry.images):
        pixels = as_bytes(image)
        tag = f"{entry.name}/{number}"
        yield _picture(tag, pixels)
        for name, masks in entry.masks.items():
            yield _picture(f"{tag}/{name}", _overlaid(pixels, masks[number]), legend)


def _picture(tag: str, pixels: "np.ndarray[Any, Any]", description: str = "") -> Any:
    height, width, channels = pixels.shape
    size = {"height": height, "width": width, "colorspace": channels}
    picture = summary_pb2.Summary.Image(**size, encoded_image_string=as_png(pixels))
    metadata = image_metadata.create_summary_metadata(None, description)
    return summary_pb2.Summary.Value(tag=tag, image=picture, metadata=metadata)


def _overlaid(pixels: "np.ndarray[Any, Any]", mask: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    shown = np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels[:, :, :3].copy()
    for number in np.unique(mask[mask != 0]):
        chosen = mask == number
        colour = colorsys.hsv_to_rgb(math.fmod(int(number) * _GOLDEN_RATIO, 1.0), 1.0, 1.0)
        shown[chosen] = (shown[chosen] // 2) + np.array([int(part * 127) for part in colour], np.uint8)
    return shown
