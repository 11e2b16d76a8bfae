"""The task ``chars``: a language model on text that every machine with Python has. Imports torch only to train."""

import sysconfig
from pathlib import Path
from typing import Any

from offloop.bus.errors import ConfigurationError
from offloop.trainer.arguments.checks import check_count, check_number

_HELD_OUT = 0.05
_EVALUATED_WINDOWS = 256


def chars(
    *,
    batch_size: int = 32,
    length: int = 64,
    width: int = 96,
    layers: int = 2,
    lr: float = 0.003,
    characters: int = 2_000_000,
) -> dict[str, Any]:
    """Train a small GPT on the characters of Python's own standard library.

    It reads the source of the modules on this machine and learns to predict the next character. The loss is in bits per
    character. The frequencies of the characters alone need about 4.5; after the default 600 batches the model needs
    less than 2.5 on held-out text.

    batch_size: pieces of text in a batch, over all ranks.
    length: characters in a piece.
    width: size of a character's vector, a multiple of 4.
    layers: transformer layers.
    lr: learning rate of AdamW.
    characters: how much of the source to read, of which 5 % is for the evaluation."""
    import torch
    from torch.utils.data import DataLoader, Subset

    from offloop.trainer.data.models import CrossEntropy, LanguageModel
    from offloop.trainer.data.spec import DataSpec
    from offloop.trainer.distributed.sampling import RankBatchSampler
    from offloop.trainer.tasks.gpt import Gpt, cut_into_pieces, encode

    check_count(batch_size, "batch_size")
    check_number(lr, "lr")
    if width % 4:
        raise ConfigurationError(f"width {width} is not allowed: use a multiple of 4, one part for each attention head")
    text = encode(read_source(characters))
    split = int(len(text) * (1 - _HELD_OUT))
    model = LanguageModel(Gpt(width, layers, length), metrics={"BitsPerCharacter": CrossEntropy(base=2)})
    windows, held_out = cut_into_pieces(text[:split], length), cut_into_pieces(text[split:], length)
    train = DataLoader(windows, batch_sampler=RankBatchSampler(windows, batch_size, shuffle=True, drop_last=True))
    evaluated = Subset(held_out, range(min(_EVALUATED_WINDOWS, len(held_out))))
    return {
        "model": model,
        "train_dataloader": DataSpec(train, get_num_tokens_in_batch=lambda batch: int(batch[0].numel())),
        "eval_dataloader": DataLoader(evaluated, batch_sampler=RankBatchSampler(evaluated, _EVALUATED_WINDOWS // 2)),
        "optimizers": torch.optim.AdamW(model.parameters(), lr=lr),
        "max_duration": "600ba",
        "eval_interval": "100ba",
    }


def read_source(characters: int) -> str:
    parts: list[str] = []
    total = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(path.read_text(encoding="utf-8", errors="replace"))
        total += len(parts[-1])
        if total >= characters:
            break
    text = "".join(parts)[:characters]
    if len(text) < characters // 4:
        raise ConfigurationError(
            f"only {len(text)} characters of source are in {sysconfig.get_path('stdlib')}: "
            "this Python comes without the source of its standard library; use one that has it"
        )
    return text
