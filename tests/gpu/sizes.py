"""How large what is checked is: on a GPU, and in Triton's interpreter, which would take hours for that."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sizes:
    """Of checks.

    Attributes:
        matrices: (outputs, inputs) of weights.
        rows: of activations that they are multiplied with.
        attention: (queries, context) of rows.
        heads: (query heads, KV heads, size).
        dtype: compute type; in the interpreter, products of float32 are the fastest.
        experts: how many, and their size.
        vocabularies: tokens to sample from.
        steps: tokens of an answer.
    """

    matrices: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    attention: tuple[tuple[int, int], ...]
    heads: tuple[int, int, int]
    dtype: torch.dtype
    experts: tuple[int, int]
    vocabularies: tuple[int, ...]
    steps: int


REAL = Sizes(
    matrices=((6144, 4096), (4096, 14336)),
    rows=(1, 40, 600),
    attention=((1, 5000), (1, 300), (4, 2100), (100, 1500), (130, 130)),
    heads=(32, 8, 128),
    dtype=torch.bfloat16,
    experts=(16, 768),
    vocabularies=(128_256, 262_144),
    steps=24,
)
SMALL = Sizes(
    matrices=((20, 256),),
    rows=(2,),
    attention=((1, 20), (12, 30)),
    heads=(4, 2, 16),
    dtype=torch.float32,
    experts=(3, 128),
    vocabularies=(1500,),
    steps=3,
)
