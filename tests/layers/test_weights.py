"""Weight declarations are found below a layer, each once, in order."""

from __future__ import annotations

import pytest
import torch

from penstock.layers.weight import Layer, Weight, WeightPart


def declare(key: str) -> Weight:
    return Weight((2,), (WeightPart(key, (2,)),))


class Leaf(Layer):
    def __init__(self, *keys: str) -> None:
        self.first = declare(keys[0])
        self.more = [declare(key) for key in keys[1:]]
        self.absent: Weight | None = None


class Tree(Layer):
    def __init__(self) -> None:
        self.start = declare("start")
        self.leaves = (Leaf("a", "b"), Leaf("c"))
        self.shared = self.start


def test_order_and_sharing():
    assert [weight.parts[0].key for weight in Tree().weights()] == ["start", "a", "b", "c"]


def test_filling_packs():
    weight = declare("x")
    with pytest.raises(RuntimeError, match="x was used before it was loaded"):
        _ = weight.value
    weight.fill([torch.ones(2)])
    assert torch.equal(weight.value, torch.ones(2))
    weight.pack = lambda parts: parts[0] * 3
    weight.fill([torch.ones(2)])
    assert torch.equal(weight.value, torch.full((2,), 3.0))
