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
from penstock.kernels.cpu.rank_group import WATCHER, RankGroup, make_memory
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
from tests.weights.test_quantised_folders import FOLDERS, encode_by_method, encode_gptq, quantise

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
    "deepseek-v3": (LATENT, {"GatedMlp"}),  # which is small, beside the experts
    "qwen3-next": (SIZES, {"SparseMoe", "DeltaNet"}),  # of one expert, for all tokens
    "nemotron-h": (SIZES, {"Attention", "PlainMlp", "Mamba2Mixer"}),  # which are small
}


class OneRank:
    """A rank of a model, which a thread of its own computes."""

    def __init__(
        self, folder: Path, ranks: Ranks, memory: int, quantize: str | None, copies: int | None = None
    ) -> None:
        self.ranks = ranks
        checkpoint = open_checkpoint(folder)
        kernels = resolve_kernels(KernelContext("cpu", "float32"))
        self.model: Model = build_model(checkpoint.config, kernels, dtype=torch.float32)
        target = LoadTarget(torch.float32, quantize=quantize)
        plans = plan_weights(self.model, checkpoint, target)
        if ranks != ALONE:
            ends = SegmentEnds(checkpoint, plans)
            self.group = RankGroup(memory, ranks.rank)
            self.shards = Shards(ranks, self.group, ends, copies=copies)
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
    watching = RankGroup(memory, WATCHER)
    found: dict[int, Any] = {}
    made: dict[int, OneRank] = {}

    def compute(rank: int) -> None:
        try:
            one = made[rank] = OneRank(folder, Ranks(rank, count), memory, quantize)
            found[rank], how = one.run()
            assert how.startswith("recorded"), how
        except BaseException as error:
            found[rank] = error
            watching.stop()
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
        assert max(held) < everything or whole
    return whole


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_give_the_bits_of_one_process(family: str, tmp_path: Path) -> None:
    sizes, whole = FAMILIES[family]
    tiny.save(family, tmp_path, **sizes)
    assert check(tmp_path, (2, 3)).keys() == whole


BLOCKS: dict[str, Any] = {  # of which there are segments of 256 inputs
    **SIZES,
    "hidden_size": 256,
    "intermediate_size": 1280,
    "head_dim": 64,
    "num_hidden_layers": 2,
}


@pytest.mark.parametrize("format", ["q4_k", "q6_k", "q8_0", "q4_0", "bf16"])
def test_ranks_of_a_model_that_is_quantised_as_it_loads(format: str, tmp_path: Path) -> None:
    tiny.save("qwen3", tmp_path, **BLOCKS)
    counts = (2,) if format in ("q4_k", "q6_k") else (3, 4)  # attention has two segments of 256 inputs, or more
    assert not check(tmp_path, counts, format)


def test_ranks_of_a_small_vocabulary_have_all_of_it(tmp_path: Path) -> None:
    """Fewer units of rows than ranks; and a format with one scale a row, whose inputs cannot be cut."""
    tiny.save("qwen3", tmp_path, **{**BLOCKS, "vocab_size": 120})
    assert not check(tmp_path, (3,), "bf16")
    assert check(tmp_path, (3,), "int8").keys() == {"Attention", "GatedMlp"}


@pytest.mark.parametrize("name", ["awq", "w8a8", "fp8", "nf4", "mlx"])
def test_ranks_of_a_quantised_folder(name: str, tmp_path: Path) -> None:
    config, make = FOLDERS[name]
    quantise(tmp_path, config, encode_by_method(config, make))
    whole = check(tmp_path, (2,))
    assert whole.keys() == ({"Attention", "GatedMlp"} if name == "w8a8" else set())  # one scale a row


def test_a_matrix_in_another_order_of_inputs_is_whole_in_every_rank(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
    quantise(tmp_path, config, encode_gptq)
    assert check(tmp_path, (2,)).keys() == {"Attention", "GatedMlp"}


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_query_heads_of_one_kv_head_may_lie_with_several_ranks(kv_heads: int, tmp_path: Path) -> None:
    tiny.save("qwen3", tmp_path, **{**SIZES, "head_dim": 64, "num_key_value_heads": kv_heads})
    assert not check(tmp_path, (3, 4))


def test_a_rank_reads_its_own_bytes_alone(tmp_path: Path) -> None:
    """Of each weight that is shared; what every rank has whole is norms."""
    tiny.save("llama", tmp_path, **BLOCKS)
    memory = make_memory(4)
    alone = OneRank(tmp_path, ALONE, -1, None)
    total = sum(weight.tensor.nbytes for weight in alone.model.weights())
    for rank in range(4):
        own = sum(weight.tensor.nbytes for weight in OneRank(tmp_path, Ranks(rank, 4), memory, None).model.weights())
        assert own < 0.32 * total
    os.close(memory)
