"""The task ``chars``: a language model on text that every machine with Python has."""

import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset

from bus.errors import ConfigurationError
from trainer.data.models import CrossEntropy, LanguageModel
from trainer.data.spec import DataSpec
from trainer.distributed.sampling import RankBatchSampler
from trainer.tasks import check_batch_size, check_rate

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""The characters that are told apart; any other one counts as a space."""

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
    """A small GPT on the characters of Python's own standard library.

    It reads the source of the modules on this machine and learns to tell the next character. The loss is in bits per
    character: the frequencies of the characters alone need about 4.5; after the default 600 batches the model needs
    less than 2.5 on text that it was not trained on.

    batch_size: pieces of text in a batch, over all ranks.
    length: characters in a piece.
    width: size of a character's vector, a multiple of 4.
    layers: transformer layers.
    lr: learning rate of AdamW.
    characters: how much of the source to read, one part in twenty of it for the evaluation.
    """
    check_batch_size(batch_size)
    check_rate(lr)
    if width % 4:
        raise ConfigurationError(f"width {width} is not allowed: use a multiple of 4, one part for each attention head")
    text = encode(read_source(characters))
    split = int(len(text) * (1 - _HELD_OUT))
    model = LanguageModel(Gpt(width, layers, length), metrics={"BitsPerCharacter": CrossEntropy(base=2)})
    windows, held_out = _windows(text[:split], length), _windows(text[split:], length)
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
    """The beginning of the standard library's source, its modules in the order of their names."""
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


def encode(text: str) -> Tensor:
    """The text as positions in the alphabet."""
    positions = {character: index for index, character in enumerate(ALPHABET)}
    other = positions[" "]
    return torch.tensor([positions.get(character, other) for character in text])


def _windows(text: Tensor, length: int) -> TensorDataset:
    pieces = text[: (len(text) - 1) // length * length + 1]
    return TensorDataset(pieces[:-1].view(-1, length), pieces[1:].view(-1, length))


class Gpt(nn.Module):
    """A decoder-only transformer: scores for the next character from character numbers of shape (rows, length)."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, len(ALPHABET))

    def forward(self, text: Tensor) -> Tensor:
        positions = torch.arange(text.shape[1], device=text.device)
        hidden = self.layers(self.characters(text) + self.positions(positions))
        scores: Tensor = self.scores(self.norm(hidden))
        return scores


class Layer(nn.Module):
    """Causal self-attention with four heads and a two-layer network, each added to what goes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._attend(self.norm_attention(hidden))
        added: Tensor = hidden + self.network(self.norm_network(hidden))
        return added

    def _attend(self, hidden: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        heads = self.query_key_value(hidden).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.mix(mixed.transpose(1, 2).reshape(rows, length, width))
        return out
