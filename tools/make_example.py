"""Trains the run that the start page of the site shows, as ``docs/example.html``: ``python tools/make_example.py``."""

import contextlib
import tempfile
from pathlib import Path

import torch

from offloop import Algorithm, Event, Trainer
from offloop.bus.runs.directory import find_run
from offloop.bus.tools.report import ReportedRun, write_report
from offloop.trainer.algorithms import EMA, GradientClipping
from offloop.trainer.schedulers import CosineAnnealingWithWarmupScheduler
from offloop.trainer.tasks.chars import chars
from offloop.trainer.tasks.gpt import ALPHABET, encode

EXAMPLE = Path(__file__).parents[1] / "docs" / "example.html"
PROMPTS = ("def ", "class ", "    return ", "        for ", "    # ")


class Samples(Algorithm):
    """Logs norms, and every 50 batches how the model continues some beginnings."""

    def match(self, event, state):
        return event is Event.AFTER_TRAIN_BATCH

    def apply(self, event, state, logger):
        weights = list(state.model.parameters())
        moments = [one["exp_avg"] for one in state.optimizers[0].state.values()]
        tensors = {"gradients": [one.grad for one in weights], "weights": weights, "moments": moments}
        logger.log_metrics({f"norm/{name}": float(torch.nn.utils.get_total_norm(of)) for name, of in tensors.items()})
        step = int(state.timestamp.batch)
        if step % 50 == 49:
            chance = torch.Generator().manual_seed(step)
            texts = [complete(state.model.module, one, chance) for one in PROMPTS]
            logger.log_table("samples", list(zip(PROMPTS, texts, strict=True)), ["prompt", "completion"], step=step)


@torch.no_grad()
def complete(gpt, prompt, chance):
    text = encode(prompt)
    while len(text) < 64:
        scores = gpt(text[None])[0, -1]
        text = torch.cat([text, torch.multinomial((scores / 0.7).softmax(0), 1, generator=chance)])
    return "".join(ALPHABET[one] for one in text[len(prompt) :]).strip("\n")


with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
    with Trainer(
        **chars() | {"max_duration": "1000ba", "eval_interval": "50ba"},
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="60ba", alpha_f=0.05),
        algorithms=[Samples(), GradientClipping("norm", 1.0), EMA(half_life="30ba")],
        record="#samples",
        run_name="gpt",
        seed=1,
        config={"lr": 0.003, "warmup": "60ba", "clip": 1.0, "ema": "30ba", "width": 96, "layers": 2},
    ) as trainer:
        trainer.fit()
    write_report([ReportedRun(find_run("gpt"))], EXAMPLE, "html", force=True)
