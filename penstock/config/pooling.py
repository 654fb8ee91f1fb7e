"""How a prompt becomes one vector, or one a token, where nothing is generated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PoolingKind(str, Enum):
    """Which tokens' hidden states make the result."""

    LAST = "last"
    CLS = "cls"  # the first
    MEAN = "mean"
    ALL = "all"  # one result a token


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """What is computed of a prompt instead of a continuation.

    Attributes:
        kind: which tokens count.
        classify: the model's classification head maps the pooled state to one score a label.
        choices: token ids; the result is the logits of these instead of the hidden state.
        activation: of scores: "softmax", "sigmoid" or "" for none.
        dimensions: of a hidden state, only so many leading elements (Matryoshka embeddings, arXiv:2205.13147).
        normalize: to a length of one, after that.
        second: position at which the second of a pair of texts begins, for models that tell them apart; 0 for none.
    """

    kind: PoolingKind = PoolingKind.LAST
    classify: bool = False
    choices: tuple[int, ...] = ()
    activation: str = ""
    dimensions: int | None = None
    normalize: bool = False
    second: int = 0
