"""What drafts for a model, decided before a weight is read, and the memory that it is given beside its target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.config.cache_spec import CacheSpec, group_layers
from penstock.config.options import EngineOptions
from penstock.kernels.api import KernelSet
from penstock.layers.batch import LayerCache
from penstock.models.registry import Model
from penstock.runtime.batch_builder import BatchBuilder, BatchTraits
from penstock.runtime.drafters.draft_draws import DraftTraits
from penstock.runtime.drafters.hidden_states import NO_TAPS, Taps
from penstock.startup.cache_plan import every_position
from penstock.startup.draft_room import DraftNeeds, spare_blocks
from penstock.startup.memory_plan import MemoryPlan
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.draft_heads import HeadFiles
from penstock.weights.weight_plan import WeightPlan


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """A draft model or head, decided before a weight is read.

    Attributes:
        needs: what the memory plan has to know of it.
        checkpoint, model, weights: as in `EngineSpec`.
        files: of a head; None for a draft model.
        taps: what of its target it reads.
        own: it is a part of its target, weights and memory included.
    """

    needs: DraftNeeds
    checkpoint: Checkpoint
    model: Model
    weights: tuple[WeightPlan, ...]
    files: HeadFiles | None = None
    taps: Taps = NO_TAPS
    own: bool = False

    @property
    def guests(self) -> tuple[CacheSpec, ...]:
        """What its layers keep in the target's blocks beside what those hold."""
        return () if self.own or self.needs.own else tuple(self.model.cache_specs)


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Where a drafter's layers keep what they keep.

    Attributes:
        caches: of its layers, in the target's blocks and spare ones.
        builder: of its batches.
        group, blocks: of the target's, which group those blocks are of, and how many there are.
        spare: blocks of each slot behind those.
    """

    caches: Sequence[LayerCache]
    builder: BatchBuilder
    group: int
    blocks: int
    spare: int


def draft_memory(
    draft: DraftSpec, target: Model, kernels: KernelSet, options: EngineOptions, plan: MemoryPlan, rows: int
) -> DraftMemory:
    """Memory for so many sequences a step, of a draft whose layers keep keys and values."""
    group, spare = every_position(group_layers(target.cache_specs)), spare_blocks(draft.needs.asked, options)
    assert group is not None
    size, blocks = options.block_size, plan.kv_blocks[group]
    caches = [
        LayerCache(
            0,
            kernels.make_cache(
                options.kv_cache_dtype, blocks + rows * spare, size, spec.num_kv_heads, spec.key_dim, spec.value_dim,
                options.torch_device, spec.latent,
            ),
        )
        for spec in draft.model.cache_specs
    ]  # fmt: skip
    longest = -(-plan.max_model_len // size) + spare
    traits = BatchTraits(axes=draft.model.position_axes)
    builder = BatchBuilder(1, rows, longest, size, torch.device(options.torch_device), traits)
    return DraftMemory(caches, builder, group, blocks, spare)


def draft_traits(draft: DraftSpec, target: Model, options: EngineOptions, plan: MemoryPlan) -> DraftTraits:
    """What a draft model or head is asked for, and can do."""
    asked = draft.needs.asked
    assert options.max_num_batched_tokens
    return DraftTraits(
        asked.num_speculative_tokens,
        asked.draft_min,
        asked.draft_p_min,
        min(plan.max_model_len, draft.needs.facts.context_length),
        options.max_num_batched_tokens,
        draft.model.vocab_size,
        target.vocab_size,
    )
