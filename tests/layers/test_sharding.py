"""Ranks that each have a share of a model's layers give the bits of one process, for any number of ranks."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.api import resolve_kernels
from penstock.kernels.cpu import native
from penstock.kernels.cpu.rank_group import RankGroup, make_memory
from penstock.kernels.registry import KernelContext
from penstock.layers.sharding import Shards, shard_model
from penstock.models.registry import Model, build_model
from penstock.parallel.ranks import ALONE, Ranks
from penstock.runtime.executor import make_executor
from penstock.weights.loader import load_weights
from penstock.weights.open import open_checkpoint
from penstock.weights.shares import SegmentEnds
from penstock.weights.weight_plan import LoadTarget, plan_weights
from tests.models import tiny
from tests.models.harness import Harness
from tests.runtime.test_executor import WORK, Through

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
SIZES: dict[str, Any] = {  # of which there are segments for four ranks
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 320,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
OLD: dict[str, Any] = {"vocab_size": 300, "hidden_size": 256, "num_attention_heads": 8, "n_head": 8, "n_embd": 256}
LATENT = {key: value for key, value in SIZES.items() if key not in ("head_dim", "num_key_value_heads")} | {
    "num_key_value_heads": 8,
    "v_head_dim": 32,
    "moe_intermediate_size": 40,
}
SHARED = {"Attention", "LatentAttention", "GatedMlp", "PlainMlp", "SparseMoe"}
FAMILIES: dict[str, tuple[dict[str, Any], set[str]]] = {  # sizes, and kinds of layers that are not shared
    "llama-biases": (SIZES, set()),
    "qwen2": (SIZES, set()),
    "qwen3": (SIZES, set()),
    "qwen3-moe": ({**SIZES, "moe_intermediate_size": 40}, set()),
    "mixtral": (SIZES, set()),
    "gpt-oss": (SIZES, set()),
    "gemma3": ({**SIZES, "tie_word_embeddings": True}, set()),
    "olmo2": (SIZES, {"Attention"}),
    "phi3": ({**SIZES, "hidden_size": 256}, set()),
    "gptj": ({**OLD, "num_key_value_heads": None}, set()),
    "falcon-groups": (
        {**SIZES, "hidden_size": 256, "num_kv_heads": 4, "head_dim": None, "intermediate_size": None},
        set(),
    ),
    "deepseek-v3": (LATENT, set()),
    "qwen3-next": (SIZES, set()),
    "nemotron-h": (SIZES, set()),
}


class OneRank:
    """A rank of a model, which a thread of its own computes."""

    def __init__(self, folder: Path, ranks: Ranks, memory: int, quantize: str | None) -> None:
        self.ranks = ranks
        checkpoint = open_checkpoint(folder)
        kernels = resolve_kernels(KernelContext("cpu", "float32"))
        self.model: Model = build_model(checkpoint.config, kernels, dtype=torch.float32)
        target = LoadTarget(torch.float32, quantize=quantize)
        plans = plan_weights(self.model, checkpoint, target)
        if ranks != ALONE:
            ends = SegmentEnds(checkpoint, plans)
            self.group = RankGroup(memory, ranks.rank)
            self.shards = Shards(ranks, self.group, ends)
            shard_model(self.model, self.shards)
            plans = plan_weights(self.model, checkpoint, target)
        load_weights(self.model, checkpoint, plans)

    def run(self) -> tuple[list[Tensor], str]:
        """The logits of every step of WORK, and how they were computed."""
        harness = Harness(self.model, seed=1)
        executor = make_executor(self.model, harness.caches, 48, 7)
        harness.model = Through(executor, self.model)  # type: ignore[assignment]
        with torch.inference_mode():
            return [logits for work in WORK for logits in harness.step(work).values()], executor.describe


def logits_of(folder: Path, count: int, quantize: str | None = None) -> tuple[list[list[Tensor]], list[OneRank]]:
    """What each of so many ranks says."""
    if count == 1:
        alone = OneRank(folder, ALONE, -1, quantize)
        return [alone.run()[0]], [alone]
    memory = make_memory(count)
    found: dict[int, Any] = {}
    made: dict[int, OneRank] = {}

    def compute(rank: int) -> None:
        try:
            one = made[rank] = OneRank(folder, Ranks(rank, count), memory, quantize)
            found[rank], how = one.run()
            assert how.startswith("recorded"), how
        except BaseException as error:
            found[rank] = error
            made[rank].group.stop()
            raise

    threads = [threading.Thread(target=compute, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(memory)
    for rank in range(count):
        if isinstance(found[rank], BaseException):
            raise found[rank]
    return [found[rank] for rank in range(count)], [made[rank] for rank in range(count)]


def check(folder: Path, counts: Sequence[int], quantize: str | None = None) -> dict[str, str]:
    """Ranks say what one process says; which layers they did not share."""
    ((expected,), (alone,)) = logits_of(folder, 1, quantize)
    whole: dict[str, str] = {}
    for count in counts:
        said, ranks = logits_of(folder, count, quantize)
        for rank in range(count):
            assert all(map(torch.equal, said[rank], expected)), f"rank {rank} of {count}"
        whole = ranks[0].shards.whole
        held = [sum(weight.tensor.nbytes for weight in one.model.weights()) for one in ranks]
        everything = sum(weight.tensor.nbytes for weight in alone.model.weights())
        assert max(held) < everything
    return whole


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_give_the_bits_of_one_process(family: str, tmp_path: Path) -> None:
    sizes, whole = FAMILIES[family]
    tiny.save(family, tmp_path, **sizes)
    assert check(tmp_path, (2, 3)).keys() & SHARED == whole
