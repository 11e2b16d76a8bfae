"""Outputs for data without targets."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from bus.types.event import Event
from bus.types.timestamp import Timestamp
from trainer.data.spec import DataSpec
from trainer.device.batch import map_tensors
from trainer.device.device import autocast_of
from trainer.distributed.ranks import Ranks
from trainer.engine.engine import Engine
from trainer.engine.state import State
from trainer.evaluation.evaluation import inference, prepared_batches


def predict(
    state: State,
    engine: Engine,
    spec: DataSpec,
    clock: Callable[[], int],
    *,
    subset_num_batches: int = -1,
    on_outputs: Callable[[Any, Any], object] | None = None,
    in_step: Ranks | None = None,
) -> list[Any]:
    """Runs the model over a dataloader, in evaluation mode and without gradients.

    Returns the outputs of each batch, with their tensors on the host; with ``on_outputs`` that is called with each
    batch and its outputs, as they are on the device, and nothing is kept. ``in_step`` are ranks whose forward passes
    need one another. Reference: ``composer/trainer/trainer.py``,
    ``predict``.
    """
    fire, dataloader = engine.run_event, state.dataloader_in_use
    autocast = autocast_of(state.precision, state.device) or contextlib.nullcontext
    state.set_dataloader(spec, "predict", subset_num_batches)
    state.predict_timestamp = Timestamp()
    kept: list[Any] = []
    batch_began = clock() // 1000
    fire(Event.PREDICT_START)
    with inference(state.model):
        for samples, tokens in prepared_batches(state, spec, subset_num_batches, in_step):
            fire(Event.PREDICT_BATCH_START)
            fire(Event.PREDICT_BEFORE_FORWARD)
            with autocast():
                state.outputs = state.model.eval_forward(state.batch)
            fire(Event.PREDICT_AFTER_FORWARD)
            if on_outputs is None:
                kept.append(map_tensors(state.outputs, torch.Tensor.cpu))
            else:
                on_outputs(state.batch, state.outputs)
            now = clock() // 1000
            state.predict_timestamp = state.predict_timestamp.advance_batch(samples, tokens, now - batch_began)
            batch_began = now
            fire(Event.PREDICT_BATCH_END)
    fire(Event.PREDICT_END)
    state.set_dataloader(*dataloader)
    return kept
