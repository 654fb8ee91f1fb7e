"""What the layers of a model of foreign code keep: told by a pass over shapes alone, without memory or arithmetic."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from penstock.config.cache_spec import CacheKind, CacheSpec

FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


class Tracer:
    """Takes the place of a model where attention asks for it, and notes what it is given."""

    def __init__(self) -> None:
        self.specs: dict[int, CacheSpec] = {}

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, seen: int | None, **_: Any) -> Tensor:
        """As FallbackModel.attend, of tensors without contents."""
        kind = CacheKind.FULL if seen is None else CacheKind.SLIDING
        self.specs[index] = CacheSpec(kind, key.shape[1], key.shape[3], value.shape[3], seen)
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def traced(made: Any, settings: Any, attention: str, layers: int) -> tuple[CacheSpec, ...] | None:
    """Every layer's needs; None where the code cannot run on shapes, or not every layer attends once.

    Args:
        made: the class of the model.
        settings: its configuration.
        attention: the name of the attention that calls `attend` of each module's `penstock`.
        layers: how many there are.
    """
    settings = copy.deepcopy(settings)
    settings._attn_implementation = attention
    tracer = Tracer()
    try:
        with torch.device("meta"), torch.inference_mode():
            module = made(settings).eval()
            for part in module.modules():
                part.penstock = tracer
            ids = torch.zeros(1, 2, dtype=torch.int64)
            module(ids, position_ids=torch.arange(2)[None], use_cache=False)
    except FAILURES:
        return None
    return tuple(tracer.specs[index] for index in range(layers)) if set(tracer.specs) == set(range(layers)) else None
