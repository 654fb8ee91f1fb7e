"""Chooses each layer's KV cache type: the one asked for, or a finer one where a probe at start shows too much loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.config.cache_spec import CacheGroup
from penstock.layers.batch import Batch, GroupTables
from penstock.layers.part import WHOLE
from penstock.models.registry import Model
from penstock.runtime.executor import EagerExecutor
from penstock.runtime.kv_memory import KVMemory

PROBED_TYPES = ("fp8", "int8", "int4")  # the others lose too little to be worth half a second of every start
FULL, FALLBACK = "float32", "float16"
PROBE_TOKENS = 64
LARGEST_LOSS = 0.05  # nats: mean Kullback-Leibler divergence of the next token's distribution over the probe


@dataclass(frozen=True, slots=True)
class KvTypes:
    """Each layer's type in layer order, and the sentence that says why."""

    of_layer: tuple[str, ...]
    reason: str


def choose_kv_types(
    model: Model, groups: Sequence[CacheGroup], wanted: str, block_size: int, device: str = "cpu"
) -> KvTypes:
    """Runs a fixed random prompt with caches of the type wanted and of float32, and compares the distributions.

    Args:
        model: loaded.
        groups: its cache groups.
        wanted: the type asked for. float32, float16 and bfloat16 are taken as they are, and so is any where the model
            makes no distributions, or a part of it is elsewhere.
        block_size: tokens of a block.
        device: the model's.

    Returns:
        The types. Where the loss with all layers in `wanted` is above LARGEST_LOSS, layers go back to float16, those
        that lose most by themselves first, until it is not.
    """
    layers = len(model.cache_specs)
    uniform = (wanted,) * layers
    if wanted not in PROBED_TYPES or model.head is None or model.part is not WHOLE:
        return KvTypes(uniform, "")
    probe = _Probe(model, groups, block_size, torch.device(device))
    exact = probe.log_probabilities((FULL,) * layers)
    loss = _divergence(exact, probe.log_probabilities(uniform))
    if loss <= LARGEST_LOSS:
        return KvTypes(uniform, f"a probe of {PROBE_TOKENS} tokens loses {loss:.4f} nats against float32")
    alone = [
        _divergence(exact, probe.log_probabilities(_with((FULL,) * layers, [layer], wanted))) for layer in range(layers)
    ]
    order = sorted(range(layers), key=lambda layer: -alone[layer])
    fewest, most = 1, layers  # layers to fall back; the loss shrinks with their number
    while fewest < most:
        middle = (fewest + most) // 2
        types = _with(uniform, order[:middle], FALLBACK)
        if _divergence(exact, probe.log_probabilities(types)) <= LARGEST_LOSS:
            most = middle
        else:
            fewest = middle + 1
    fallen = sorted(order[:most])
    return KvTypes(
        _with(uniform, fallen, FALLBACK),
        f"a probe loses {loss:.3f} nats with {wanted} in all layers, more than {LARGEST_LOSS}; "
        f"{FALLBACK} is kept in {'all layers' if most == layers else 'layers ' + ', '.join(map(str, fallen))}",
    )


def _with(types: Sequence[str], layers: Sequence[int], other: str) -> tuple[str, ...]:
    return tuple(other if layer in layers else kind for layer, kind in enumerate(types))


def _divergence(exact: Tensor, other: Tensor) -> float:
    """Mean Kullback-Leibler divergence of rows of log-probabilities, nats; infinite where one is not finite."""
    loss = float((exact.exp() * (exact - other)).sum(dim=1).mean())
    return loss if np.isfinite(loss) else float("inf")


class _Probe:
    """One prompt, in two steps so that the second reads what the first wrote."""

    def __init__(self, model: Model, groups: Sequence[CacheGroup], block_size: int, device: torch.device) -> None:
        self._model = model
        self._groups = groups
        self._block_size = block_size
        self._device = device
        self._blocks = -(-PROBE_TOKENS // block_size)
        ids = np.random.default_rng(0).integers(0, model.vocab_size, PROBE_TOKENS)
        self._ids = torch.from_numpy(ids)

    def log_probabilities(self, types: Sequence[str]) -> Tensor:
        """[tokens of the second step, vocab] float32 with caches of these types."""
        counts = (self._blocks + 1,) * len(self._groups)
        memory = KVMemory(
            self._model.kernels,
            self._model.cache_specs,
            counts,
            self._block_size,
            kv_types=types,
            device=str(self._device),
        )
        executor = EagerExecutor(self._model, memory.caches, "a probe")
        half = PROBE_TOKENS // 2
        for begin, end in ((0, half), (half, PROBE_TOKENS)):
            with self._device:
                batch = self._batch(begin, end)
            executor.forward(batch)
        logits = executor.logits(np.arange(PROBE_TOKENS - half, dtype=np.int64))
        return torch.log_softmax(logits, dim=1)

    def _batch(self, begin: int, end: int) -> Batch:
        positions = torch.arange(begin, end)
        table = torch.arange(1, self._blocks + 1, dtype=torch.int32).unsqueeze(0)
        slot = positions + self._block_size
        count = torch.tensor([end - begin], dtype=torch.int32)
        return Batch(
            token_ids=self._ids[begin:end].to(self._device),
            positions=positions.expand(self._model.position_axes, -1),
            query_start=torch.tensor([0, end - begin], dtype=torch.int32),
            context_len=torch.tensor([end], dtype=torch.int32),
            groups=(GroupTables(table, slot),) * len(self._groups),
            prompt_tokens=count,
            draft_tokens=torch.zeros(1, dtype=torch.int32),
            logit_rows=torch.arange(end - begin),
            query_lens=(end - begin,),
            context_lens=(end,),
            state_slot=torch.zeros(1, dtype=torch.int64),
        )
