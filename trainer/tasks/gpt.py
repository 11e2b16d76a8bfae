"""The small GPT of the task ``chars``, and its text as tensors."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # the known characters; any other counts as a space


def encode(text: str) -> Tensor:
    positions = {character: index for index, character in enumerate(ALPHABET)}
    other = positions[" "]
    return torch.tensor([positions.get(character, other) for character in text])


def cut_into_pieces(text: Tensor, length: int) -> TensorDataset:
    """Return pieces, whose targets are the same pieces one character later."""
    pieces = text[: (len(text) - 1) // length * length + 1]
    return TensorDataset(pieces[:-1].view(-1, length), pieces[1:].view(-1, length))


class Gpt(nn.Module):
    """A decoder-only transformer: scores for the next character from character numbers of shape (rows, length)."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.characters: nn.Embedding = nn.Embedding(len(ALPHABET), width)
        self.positions: nn.Embedding = nn.Embedding(length, width)
        self.layers: nn.Sequential = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.norm: nn.LayerNorm = nn.LayerNorm(width)
        self.scores: nn.Linear = nn.Linear(width, len(ALPHABET))

    def forward(self, text: Tensor) -> Tensor:
        positions = torch.arange(text.shape[1], device=text.device)
        hidden = self.layers(self.characters(text) + self.positions(positions))
        scores: Tensor = self.scores(self.norm(hidden))
        return scores


class Layer(nn.Module):
    """Causal self-attention with four heads and a two-layer network, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attention: nn.LayerNorm = nn.LayerNorm(width)
        self.norm_network: nn.LayerNorm = nn.LayerNorm(width)
        self.query_key_value: nn.Linear = nn.Linear(width, 3 * width)
        self.mix: nn.Linear = nn.Linear(width, width)
        self.network: nn.Sequential = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

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
