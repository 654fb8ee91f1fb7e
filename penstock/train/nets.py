"""Draft heads as they are trained: chains of drafts behind many places of an answer at once, with gradients.

The same functions as in `models.eagle3` and `models.medusa`, in torch, over what the target says of a whole answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.models.draft_heads import TargetFacts
from penstock.train.target import Reading

_BASE = 10_000.0  # of rotary positions
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class EagleShape:
    """Sizes of an EAGLE-3 head.

    Attributes:
        taps: elements of the target's states, side by side.
        heads, kv_heads, head_dim, intermediate: of its layer.
        drafted: tokens that it can draft.
    """

    taps: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    drafted: int

    @classmethod
    def of(cls, target: TargetFacts, taps: int, drafted: int) -> EagleShape:
        """What suits a target: heads of 128 or 64, four queries to a key, four times as many elements between."""
        size = target.hidden_size
        head_dim = next((width for width in (128, 64, 32, 16) if size % width == 0 and size >= 4 * width), size)
        heads = size // head_dim
        return cls(taps, heads, heads // 4 if heads % 4 == 0 else heads, head_dim, 4 * size, drafted)


class DraftNet(nn.Module, ABC):
    """A head that drafts `drafts` tokens behind each place."""

    drafts: int

    @abstractmethod
    def begin(self, table: Tensor) -> None:
        """Sets first weights; `table`: the target's [tokens that can be drafted, hidden_size] for logits."""

    @abstractmethod
    def chain(self, reading: Reading, starts: Tensor) -> Iterator[Tensor]:
        """Logits [S, tokens that can be drafted] of the first draft behind starts [S], of the second, and so on.

        A start t has read tokens 0 … t and knows t + 1; draft j guesses t + 1 + j. Drafts before it are taken to be
        right; places whose tokens end before that give what means nothing.
        """


class EagleNet(DraftNet):
    """EAGLE-3 (arXiv:2503.01840), or P-EAGLE (arXiv:2602.01469), whose drafts need no draft before them."""

    def __init__(self, target: TargetFacts, shape: EagleShape, drafts: int, mask: Tensor | None = None) -> None:
        """`mask`: the embedding [hidden_size] that stands where a token is not known; None for EAGLE-3."""
        super().__init__()
        size, width = target.hidden_size, shape.head_dim
        self.shape, self.drafts = shape, drafts
        self.fc = nn.Linear(shape.taps, size, bias=False)
        self.input_layernorm = nn.RMSNorm(size, _EPSILON)
        self.hidden_norm = nn.RMSNorm(size, _EPSILON)
        self.post_attention_layernorm = nn.RMSNorm(size, _EPSILON)
        self.q_proj = nn.Linear(2 * size, shape.heads * width, bias=False)
        self.k_proj = nn.Linear(2 * size, shape.kv_heads * width, bias=False)
        self.v_proj = nn.Linear(2 * size, shape.kv_heads * width, bias=False)
        self.o_proj = nn.Linear(shape.heads * width, size, bias=False)
        self.gate_proj = nn.Linear(size, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(size, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, size, bias=False)
        self.norm = nn.RMSNorm(size, _EPSILON)
        self.lm_head = nn.Linear(size, shape.drafted, bias=False)
        self.mask_hidden = None if mask is None else nn.Parameter(torch.zeros(1, shape.taps))
        self.mask_embedding: Tensor
        self.register_buffer("mask_embedding", mask, persistent=False)

    def begin(self, table: Tensor) -> None:
        """As DraftNet: logits as the target's, the state of the last tap, the rest small and random."""
        size = self.norm.weight.numel()
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if name.endswith("_proj.weight"):
                    weight.normal_(0, 0.02)
            self.fc.weight.normal_(0, 0.01)
            self.fc.weight[:, -size:] += torch.eye(size)
            self.lm_head.weight.copy_(table)

    def chain(self, reading: Reading, starts: Tensor) -> Iterator[Tensor]:
        known = int(starts.max()) + 1
        states = self.fc(reading.taps[:known])
        pairs = self._paired(reading.embeddings[1 : known + 1], states)
        keys = _rotated(self._heads(self.k_proj(pairs)), torch.arange(known, device=starts.device))
        values = self._heads(self.v_proj(pairs))
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        hidden, x = states[starts], pairs[starts]
        for draft in range(self.drafts):
            if draft:
                x, hidden = self._next(reading, starts + 1 + draft, hidden)
                own_keys.append(_rotated(self._heads(self.k_proj(x)), starts + draft))
                own_values.append(self._heads(self.v_proj(x)))
            queries = _rotated(self._heads(self.q_proj(x)), starts + draft)
            hidden = hidden + self.o_proj(_attended(queries, starts, (keys, values), own_keys, own_values))
            middle = self.post_attention_layernorm(hidden)
            hidden = hidden + self.down_proj(functional.silu(self.gate_proj(middle)) * self.up_proj(middle))
            yield self.lm_head(self.norm(hidden))

    def _next(self, reading: Reading, places: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer reads of a further draft, and its state."""
        if self.mask_hidden is None:
            embedding = reading.embeddings[places.clamp(max=len(reading.embeddings) - 1)]
        else:
            hidden = self.fc(self.mask_hidden).expand(len(places), -1)
            embedding = self.mask_embedding.expand(len(places), -1)
        return self._paired(embedding, hidden), hidden

    def _paired(self, embeddings: Tensor, states: Tensor) -> Tensor:
        return torch.cat((self.input_layernorm(embeddings), self.hidden_norm(states)), 1)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1, self.shape.head_dim)


def _rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x [n, heads, d], first halves of heads turned against second halves."""
    half = x.shape[-1] // 2
    rates = _BASE ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = positions[:, None, None].float() * rates
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _attended(
    queries: Tensor, starts: Tensor, context: tuple[Tensor, Tensor], keys: list[Tensor], values: list[Tensor]
) -> Tensor:
    """Queries [S, heads, d] over the context up to their starts and the keys of their own chains → [S, heads · d]."""
    count, heads, width = queries.shape
    kv_heads = context[0].shape[1]
    grouped = queries.view(count, kv_heads, heads // kv_heads, width) * width**-0.5
    scores = torch.einsum("skgd,nkd->skgn", grouped, context[0])
    behind = torch.arange(len(context[0]), device=starts.device) > starts[:, None]
    scores = scores.masked_fill(behind[:, None, None, :], float("-inf"))
    if keys:
        own = torch.einsum("skgd,jskd->skgj", grouped, torch.stack(keys))
        scores = torch.cat((scores, own), -1)
    weights = scores.softmax(-1)
    found = torch.einsum("skgn,nkd->skgd", weights[..., : len(context[0])], context[1])
    if values:
        found = found + torch.einsum("skgj,jskd->skgd", weights[..., len(context[0]) :], torch.stack(values))
    return found.reshape(count, heads * width)


class MedusaGuess(nn.Module):
    """One of Medusa's heads, with one residual layer."""

    def __init__(self, target: TargetFacts) -> None:
        super().__init__()
        size = target.hidden_size
        self.linear, self.table = nn.Linear(size, size), nn.Linear(size, target.vocab_size, bias=False)

    def begin(self, table: Tensor) -> None:
        """First weights: the target's logits."""
        with torch.no_grad():
            self.linear.weight.zero_()
            self.linear.bias.zero_()
            self.table.weight.copy_(table)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden_size] → logits [S, vocab]."""
        found: Tensor = self.table(hidden + functional.silu(self.linear(hidden)))
        return found


class MedusaNet(DraftNet):
    """Medusa's heads (arXiv:2401.10774)."""

    def __init__(self, target: TargetFacts, drafts: int) -> None:
        super().__init__()
        self.drafts = drafts
        self.guesses = [MedusaGuess(target) for _ in range(drafts)]
        for number, guess in enumerate(self.guesses):
            self.add_module(str(number), guess)

    def begin(self, table: Tensor) -> None:
        for guess in self.guesses:
            guess.begin(table)

    def chain(self, reading: Reading, starts: Tensor) -> Iterator[Tensor]:
        hidden = reading.final[starts]
        for guess in self.guesses:
            yield guess(hidden)
