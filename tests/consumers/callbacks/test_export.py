"""A trained model is written so that it runs without its code, and says the same as the model that was trained."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgpack
import onnxruntime  # type: ignore[import-untyped]
import pytest
import torch
from callback_calls import handle
from gold import GoldMLP, gold_data
from safetensors.torch import save
from tensor_stream import TensorStream
from torch import Tensor, nn
from training import gold_trainer

from offloop.bus.errors import ConfigurationError
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.event import Event
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers import Logger
from offloop.consumers.api.logger import Upload
from offloop.consumers.api.view import view_for
from offloop.consumers.callbacks.export import ExportForInferenceCallback, load_weights
from offloop.trainer import Classifier
from offloop.trainer.stream.run_stream import TrainingStream

# torch deprecates TorchScript, and calls deprecated names of its own within torch.onnx.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
]
INPUTS, _ = gold_data("predict", 7)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def sent(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Tensors as the value of a field."""
    image = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return {"$tensors": 1, "bytes": len(image), "image": image}


def fit_end(weights: Mapping[str, Tensor]) -> Snapshot:
    return Snapshot.build(
        Event.FIT_END, timestamp=Timestamp(batch=8, epoch=2), weights=sent(weights), on_demand=["weights"]
    )


def batch_start(inputs: Mapping[str, Tensor], batch: int = 0) -> Snapshot:
    return Snapshot.build(
        Event.BATCH_START, timestamp=Timestamp(batch=batch), inputs=sent(inputs), on_demand=["inputs"]
    )


def load_program(path: Path) -> Callable[..., Any]:
    module: Callable[..., Any] = torch.export.load(path).module()
    return module


def load_onnx(path: Path) -> Callable[..., Any]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(inputs: Any) -> Tensor:
        given = inputs[0] if isinstance(inputs, tuple) else inputs
        (output,) = session.run(None, {session.get_inputs()[0].name: given.numpy()})
        return torch.from_numpy(output)

    return run


LOADERS: dict[str, Callable[[Path], Callable[..., Any]]] = {
    "torch.export": load_program,
    "torchscript": lambda path: torch.jit.load(path),
    "onnx": load_onnx,
}


@pytest.mark.slow
@pytest.mark.parametrize("save_format", LOADERS)
def test_a_part_of_the_trained_model_is_exported_for_batches_of_any_size(tmp_path: Path, save_format: Any) -> None:
    trained = GoldMLP()
    path = tmp_path / "models" / "net.bin"
    callback = ExportForInferenceCallback(save_format, path, model=net)
    # A batch of one: the file must not be made for batches of one.
    logger = handle(callback, [batch_start({"inputs": INPUTS[:1]}), fit_end(trained.state_dict())], Logger())
    loaded = LOADERS[save_format](path)
    for rows in (1, 7):
        assert torch.allclose(loaded(INPUTS[:rows]), trained((INPUTS[:rows], None)), atol=1e-5)
    others = logger.take_non_metrics(fit_end({}))
    assert others is not None
    (upload,) = others.entries
    assert isinstance(upload, Upload)
    assert (upload.remote_file_name, upload.file_path) == ("net.bin", path)
    assert list(path.parent.iterdir()) == [path]


# -- what the model is called with ------------------------------------------------------------------------------------


class Named(nn.Module):
    """Takes a batch that is a mapping with a mapping in it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 2)

    def forward(self, batch: Any) -> Tensor:
        scores: Tensor = self.net(batch["views"]["left"] + batch["views"]["right"]) * batch["scale"]
        return scores


X, Y = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1)).unbind()
BATCHES: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], dict[str, Tensor], Any]] = {
    "mapping": (
        Named, Named, {"views.left": X, "views.right": Y, "scale": torch.tensor(2.0)},
        ({"scale": torch.tensor(2.0), "views": {"left": X, "right": Y}},),
    ),
    "one tensor": (lambda: nn.Linear(8, 2), lambda: nn.Linear(8, 2), {"inputs": X}, (X,)),
    "two inputs of a part": (
        lambda: nn.ModuleDict({"pair": nn.Bilinear(8, 8, 2)}), lambda: nn.Bilinear(8, 8, 2), {"1": Y, "0": X}, (X, Y),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BATCHES)
def test_the_model_is_called_with_what_the_batch_was_made_of(tmp_path: Path, kind: str) -> None:
    train, built, inputs, arguments = BATCHES[kind]
    trained = train()
    path = tmp_path / "m.pt2"
    # TorchScript has no maps of both tensors and maps.
    callback = ExportForInferenceCallback("torch.export", path, model=built)
    handle(callback, [batch_start(inputs), fit_end(trained.state_dict())], Logger())
    part: Any = trained["pair"] if isinstance(trained, nn.ModuleDict) else trained
    assert torch.allclose(load_program(path)(*arguments), part(*arguments), atol=1e-5)


def test_inputs_are_asked_for_at_the_first_batch_of_an_epoch_and_at_the_last_one() -> None:
    demand = ExportForInferenceCallback("torchscript", "m.pt", model=net).demand()

    def is_shown(event: Event, batch: int, done: int) -> bool:
        timestamp = Timestamp(batch=done, epoch=batch // 4, batch_in_epoch=batch % 4 + done - batch)
        before, fields = Timestamp(batch=batch), {"inputs": sent({"inputs": X}), "on_demand": ["inputs"]}
        snapshot = Snapshot.build(event, timestamp=timestamp, previous_timestamp=before, max_duration="8ba", **fields)
        shown = view_for(demand, snapshot)
        return bool(shown and shown.on_demand)

    assert [batch for batch in range(8) if is_shown(Event.BATCH_START, batch, batch)] == [0, 4]
    assert [batch for batch in range(8) if is_shown(Event.BATCH_END, batch, batch + 1)] == [7]


def test_a_consumer_that_goes_on_has_the_sample_of_the_one_before(tmp_path: Path) -> None:
    before = ExportForInferenceCallback("torchscript", tmp_path / "m.pt", model=net)
    assert before.state_dict() == {"sample": {}}
    handle(before, [batch_start({"inputs": INPUTS})], Logger())
    kept = msgpack.unpackb(msgpack.packb(before.state_dict()))
    after = ExportForInferenceCallback("torchscript", tmp_path / "m.pt", model=net)
    after.load_state_dict(kept)
    handle(after, [fit_end(GoldMLP().state_dict())], Logger())
    assert torch.jit.load(tmp_path / "m.pt")(INPUTS).shape == (7, 4)


# -- weights ----------------------------------------------------------------------------------------------------------


def test_transforms_are_applied_to_the_trained_model(tmp_path: Path) -> None:
    sample = INPUTS.double()
    transforms = [lambda module: nn.Sequential(module, nn.ReLU()), nn.Module.double]
    callback = ExportForInferenceCallback(
        "torchscript", tmp_path / "m.pt", model=net, sample_input=sample, transforms=transforms
    )
    trained = GoldMLP()
    handle(callback, [fit_end(trained.state_dict())], Logger())
    expected = trained.double()((sample, None)).relu()
    assert torch.allclose(torch.jit.load(tmp_path / "m.pt")(sample), expected, atol=1e-5)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("flags", torch.tensor([True, False]))


def views(weights: Mapping[str, Tensor]) -> Any:
    return fit_end(weights).weights


def test_weights_of_every_kind_are_copied_and_tied_ones_stay_tied() -> None:
    trained = Tied()
    with torch.no_grad():
        trained.norm.num_batches_tracked.fill_(7)  # type: ignore[union-attr]
    state = {name: value.clone() for name, value in trained.state_dict().items()}
    state["norm.running_mean"] = torch.randn(3).bfloat16()
    built = Tied()
    built.norm.double()
    assert load_weights(built, views(state)) == ""
    assert built.head.weight is built.embed.weight
    assert built.norm.weight.dtype == torch.float64
    assert all(torch.equal(value.double(), state[name].double()) for name, value in built.state_dict().items())


def test_weights_that_do_not_fit_are_refused_and_named() -> None:
    wider = nn.ModuleDict({"net": nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 4))})
    with pytest.raises(ConfigurationError, match=r"net.0.weight is \(9, 8\), trained is \(16, 8\)"):
        load_weights(wider, views(GoldMLP().state_dict()))


# -- what goes wrong --------------------------------------------------------------------------------------------------


class Branching(nn.Sequential):
    """What no compiler can follow."""

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = super().forward(inputs)
        return scores if scores.sum().item() > 0 else -scores


def test_a_model_that_cannot_be_exported_leaves_the_old_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    path.write_text("the one before")
    callback = ExportForInferenceCallback("torch.export", path, model=lambda: Branching(*net()), sample_input=INPUTS)
    with pytest.raises(ConfigurationError):
        handle(callback, [fit_end(GoldMLP().state_dict())], Logger())
    assert path.read_text() == "the one before"
    assert list(tmp_path.iterdir()) == [path]


# -- the whole path ---------------------------------------------------------------------------------------------------


def test_the_last_weights_of_a_training_are_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = tmp_path / "model.pt", Classifier(net())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stream = TensorStream(ExportForInferenceCallback("torchscript", path, model=net))
    monkeypatch.setattr(TrainingStream, "_start_publisher", lambda *_: stream)
    with gold_trainer(model=model, publish=True) as trainer:
        trainer.fit()
    assert not any(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.allclose(torch.jit.load(path)(INPUTS), model((INPUTS, None)), atol=1e-5)
