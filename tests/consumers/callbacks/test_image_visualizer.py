"""The images of a training are what the reference logs, live and from the recording, and nothing is changed by it."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from callback_calls import handle
from helpers import REFERENCE
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save
from tensor_stream import TensorStream
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from training import gold_trainer

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.demand import BASE_EVENTS
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers import Logger
from offloop.consumers.api.logger import Images
from offloop.consumers.callbacks.image_visualizer import ImageVisualizer
from offloop.trainer import Evaluator
from offloop.trainer.stream.run_stream import TrainingStream

GOLD = json.loads((REFERENCE / "cb_image_visualizer.json").read_text())["runs"]
SEGMENTATION = "seg_2ba_ignore_index_CORRUPTS_TARGETS"


# -- the recorded job --------------------------------------------------------------------------------------------------


def gold_images(rows: int, offset: int, segmentation: bool) -> TensorDataset:
    i, c, h, w = np.ogrid[offset : offset + rows, :3, :4, :5]
    images = torch.from_numpy((((60 * i + 20 * c + 5 * h + w) % 97) / 97).astype(np.float32))
    i, h, w = np.ogrid[offset : offset + rows, :4, :5]
    targets = (i + h + w) % 5 - 1 if segmentation else np.arange(offset, offset + rows) % 4
    return TensorDataset(images, torch.from_numpy(targets))


class PixelModel(nn.Module):
    def __init__(self, segmentation: bool) -> None:
        super().__init__()
        self.segmentation = segmentation
        self.conv = nn.Conv2d(3, 4, 1)
        self.conv.load_state_dict(
            {"weight": (torch.arange(12) * 0.1 - 0.5).reshape(4, 3, 1, 1), "bias": torch.zeros(4)}
        )

    def forward(self, batch: Any) -> Tensor:
        scores: Tensor = self.conv(batch[0])
        return scores if self.segmentation else scores.mean((2, 3))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return cross_entropy(outputs, batch[1], ignore_index=-1)

    def eval_forward(self, batch: Any, outputs: Tensor | None = None) -> Tensor:
        return self(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {}

    def update_metric(self, batch: Any, outputs: Tensor, metric: Any) -> None:
        raise AssertionError("there is none")


class CallLog(Logger):
    """Keeps the calls of log_images(), as the reference's files have them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []

    def begin(self, state: Snapshot) -> None:
        super().begin(state)
        self.handled = state

    def log_images(self, images: Any, name: str = "Images", channels_last: bool = False, **more: Any) -> None:  # type: ignore[override]
        super().log_images(images, name, channels_last, **more)
        self.calls.append(
            {
                "step": int(self.handled.timestamp.batch) if more.get("step") is None else more["step"],
                "event": self.handled.event.name,
                "name": name,
                "channels_last": channels_last,
                "use_table": more.get("use_table", True),
                "type": type(images).__name__,
                "dtype": str(images.dtype),
                "shape": list(images.shape),
                "sum": float(images.sum(dtype=np.float64)),
                "masks": None
                if more.get("masks") is None
                else {n: {"shape": list(m.shape), "values": m.tolist()} for n, m in more["masks"].items()},
                "mask_class_labels": more.get("mask_class_labels"),
            }
        )


def train(segmentation: bool, **arguments: Any) -> None:
    model = PixelModel(segmentation)
    with gold_trainer(
        model=model,
        train_dataloader=DataLoader(gold_images(24, 0, segmentation), batch_size=6),
        eval_dataloader=Evaluator("eval", DataLoader(gold_images(8, 500, segmentation), batch_size=5)),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
        run_name="r",
        **arguments,
    ) as trainer:
        trainer.fit()


CALLBACKS: dict[str, dict[str, Any]] = {
    "input_2ba": {"interval": "2ba", "num_images": 4},
    "input_1ep_mb2": {"interval": "1ep", "num_images": 4},
    SEGMENTATION: {"interval": "2ba", "num_images": 2, "mode": "segmentation"},
}


@pytest.mark.parametrize("run", GOLD)
def test_the_images_are_those_of_the_reference(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = TensorStream(ImageVisualizer(**CALLBACKS[run]))
    monkeypatch.setattr(TrainingStream, "_start_publisher", lambda *_: stream)
    arguments = {"device_train_microbatch_size": 2} if run == "input_1ep_mb2" else {}
    train(run == SEGMENTATION, publish=True, **arguments)
    log = CallLog()
    handle(ImageVisualizer(**CALLBACKS[run]), stream.snapshots, log)
    calls = log.calls
    expected = GOLD[run]["log_images_calls"]
    if run == SEGMENTATION:
        # The reference writes into the training's labels here, and comes no further.
        assert [(call["step"], call["name"]) for call in calls] == [
            (0, "Images/Train"), (2, "Images/Train"), (4, "Images/Eval"),
            (4, "Images/Train"), (6, "Images/Train"), (8, "Images/Eval"),
        ]  # fmt: skip
        calls = calls[:1]
    else:
        # Nothing more was computed, copied and sent.
        inner = [one for one in stream.snapshots if one.event not in BASE_EVENTS]
        assert len(inner) == len(calls)
        assert all(one.on_demand == ("inputs",) for one in inner)
    assert [call | {"sum": pytest.approx(call["sum"], rel=1e-12)} for call in calls] == expected


# -- every shape of images -------------------------------------------------------------------------------------------


def before_forward(batch: int = 0, **fields: dict[str, Any]) -> Snapshot:
    sent: dict[str, Any] = {}
    for field, tensors in fields.items():
        image = save({name: np.ascontiguousarray(array) for name, array in tensors.items()})
        sent[field] = {"$tensors": 1, "bytes": len(image), "image": image}
    return Snapshot.build(
        Event.BEFORE_LOSS if "outputs" in fields else Event.BEFORE_FORWARD,
        timestamp=Timestamp(batch=batch),
        **sent,
        on_demand=[*sent],
    )


def logged(callback: ImageVisualizer, snapshot: Snapshot) -> list[Images]:
    logger = handle(callback, [snapshot], Logger())
    others = logger.take_non_metrics(snapshot)
    return [entry for entry in others.entries if isinstance(entry, Images)] if others else []


@settings(max_examples=40)
@given(
    rows=st.integers(1, 5),
    size=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    channels=st.sampled_from([None, 1, 3, 4]),
    last=st.booleans(),
    dtype=st.sampled_from(["uint8", "int64", "float32", "float16"]),
    num_images=st.integers(1, 7),
)
def test_images_of_every_shape_come_out_as_they_went_in(
    rows: int, size: tuple[int, int], channels: int | None, last: bool, dtype: str, num_images: int
) -> None:
    shape = (rows, *size, channels or 1)
    pixels = (np.arange(np.prod(shape)) % 256).reshape(shape)
    expected = (pixels / 256 if dtype.startswith("float") else pixels).astype(dtype)
    given_as = expected if last else np.moveaxis(expected, 3, 1)
    if channels is None:
        given_as = expected[..., 0]
    callback = ImageVisualizer("1ba", num_images=num_images, channels_last=last)
    (entry,) = logged(callback, before_forward(inputs={"inputs": given_as}))
    assert len(entry.images) == min(rows, num_images)
    for image, one in zip(entry.images, expected, strict=False):
        assert image.dtype == (np.uint8 if dtype == "int64" else dtype)
        assert np.array_equal(image, one)


# -- parts of a batch --------------------------------------------------------------------------------------------------

LEFT, RIGHT = np.zeros((2, 4, 4), np.float32), np.ones((2, 4, 4), np.float32)


def test_a_part_of_the_inputs_is_named() -> None:
    key = "views.right"
    inputs = {key: RIGHT, "left": LEFT}
    (entry,) = logged(ImageVisualizer("1ba", input_key=key), before_forward(inputs=inputs))
    assert all((image == 1).all() for image in entry.images)


def test_a_part_that_cannot_be_told_is_said_to_be_so() -> None:
    with pytest.raises(ConfigurationError, match="left, right"):
        logged(ImageVisualizer("1ba", input_key="image"), before_forward(inputs={"left": LEFT, "right": RIGHT}))


def test_that_inputs_are_not_images_or_could_not_be_sent_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    callback = ImageVisualizer("1ba")
    for batch in range(3):
        assert logged(callback, before_forward(batch, inputs={"inputs": np.zeros((2, 8))})) == []
    assert len(caplog.records) == 1
    caplog.clear()
    callback = ImageVisualizer("1ba")
    for batch in range(3):
        snapshot = Snapshot.build(
            Event.BEFORE_FORWARD, timestamp=Timestamp(batch=batch), not_sent="inputs: no shared memory is free"
        )
        assert logged(callback, snapshot) == []
    assert [record.getMessage().endswith("no shared memory is free") for record in caplog.records] == [True]
