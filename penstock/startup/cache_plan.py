"""The memory plan of a model whose caches are known: what it must respect, and what a block of each group takes.

No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from penstock.config.cache_spec import CacheGroup, CacheKind, CacheSpec, group_layers
from penstock.config.machine import Accelerator, Machine
from penstock.config.options import EngineOptions
from penstock.config.ranks import rank_count
from penstock.config.resolve import DTYPE_BYTES, ModelFacts
from penstock.config.speculation import speculation
from penstock.startup.adapter_room import adapter_bytes
from penstock.startup.below_room import below_room
from penstock.startup.gpu_memory import DeviceMemory, described, share
from penstock.startup.memory_plan import MemoryLimits, MemoryPlan, format_bytes, plan_memory

BlockBytes = Callable[[str, int, int, int, int, bool], int]
"""The op `cache_block_bytes`."""


@dataclass(frozen=True, slots=True)
class Caches:
    """What a model keeps.

    Attributes:
        specs: of its layers.
        block_bytes: of the kernels that make the caches.
        shared: an encoder's layers share memory, so layers of equal size count once.
        guests: of a draft model's layers, which lie in the blocks of the first group that keeps every position.
    """

    specs: tuple[CacheSpec, ...]
    block_bytes: BlockBytes
    shared: bool = False
    guests: tuple[CacheSpec, ...] = ()


def every_position(groups: Sequence[CacheGroup]) -> int | None:
    """The first group that keeps every position; None where none does."""
    kinds = (CacheKind.FULL, CacheKind.LATENT)
    return next((index for index, group in enumerate(groups) if group.kind in kinds), None)


def memory_limits(
    asked: EngineOptions, options: EngineOptions, machine: Machine, gpu: Accelerator | None, drafts: int = 0
) -> MemoryLimits:
    """What the plan must respect, for options as they were asked for and as they are resolved.

    `drafts`: most of a sequence in a step; 0 for as many as the options say.
    """
    assert options.max_model_len and options.max_num_seqs and options.max_num_batched_tokens
    available = machine.memory_available
    said = speculation(asked.speculative_config)
    most = drafts or (said.num_speculative_tokens if said else 0)
    if gpu is not None:
        available = share(options, DeviceMemory(gpu.memory_total, gpu.memory_free))
    return MemoryLimits(
        available_bytes=available,
        max_model_len=options.max_model_len,
        max_model_len_fixed=asked.max_model_len is not None,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        block_size=options.block_size,
        kv_cache_memory=options.kv_cache_memory,
        kv_cache_memory_fixed=asked.kv_cache_memory is not None,
        kv_blocks=options.kv_blocks,
        enable_prefix_caching=options.enable_prefix_caching,
        draft_states=most + 1 if most else 0,
        most_sequences=2 * options.max_num_seqs,  # half of them run, the rest is for cached prefixes
        attention_masks=gpu is None or bool(gpu.no_kernels),
        where="" if gpu is None else f", {described(options, gpu)}",
    )


def plan_caches(
    caches: Caches,
    options: EngineOptions,
    limits: MemoryLimits,
    kv_types: Sequence[str],
    facts: ModelFacts,
    weights: int,
) -> MemoryPlan:
    """The plan with the layers' caches in these types, beside weights of so many bytes.

    Raises:
        MemoryPlanError: it does not fit.
    """
    groups = group_layers(caches.specs)
    sizes = [
        0 if spec.state else _layer_bytes(caches, spec, kind, options.block_size)
        for kind, spec in zip(kv_types, caches.specs, strict=True)
    ]
    blocks = [_group_bytes(caches, group, sizes) for group in groups]
    if caches.guests and (place := every_position(groups)) is not None:
        blocks[place] += guest_bytes(caches, options)
    below = 0
    available = limits.available_bytes
    where = limits.where
    if (options.kv_ram or options.kv_disk or options.kv_store) and options.torch_device == "cpu":
        below = _below_bytes(options, [*blocks, *filter(None, [state_bytes(caches.specs)])], available)
        told = f"{where}, beside {format_bytes(below)} for copies of blocks (--kv-ram) and names of those below"
        limits = replace(limits, available_bytes=max(0, available - below), where=told)
    plan = plan_memory(
        model=facts,
        groups=groups,
        dtype_bytes=DTYPE_BYTES[options.dtype],
        block_bytes=tuple(blocks),
        limits=replace(limits, state_bytes=state_bytes(caches.specs), adapter_bytes=adapter_bytes(facts, options)),
        weights_bytes=weights,
    )
    return replace(plan, below_bytes=below, available_bytes=available, where=where)


def _below_bytes(options: EngineOptions, sizes: Sequence[int], available: int) -> int:
    """An even part of what all processes take for copies, where each plans with its part of the memory."""
    columns = options.tensor_parallel_size
    behind = [(0,) * len(sizes)] * (rank_count(options) - columns)  # stages, whose blocks are part of these
    shares = [sizes] * (columns - 1) + behind
    return below_room(options, sizes, available * columns, shares=shares).memory_bytes // columns


def _layer_bytes(caches: Caches, spec: CacheSpec, kind: str, size: int) -> int:
    own = size // spec.stripe.ranks
    return caches.block_bytes(kind, own, spec.num_kv_heads, spec.key_dim, spec.value_dim, spec.latent)


def guest_bytes(caches: Caches, options: EngineOptions) -> int:
    """Bytes that a draft model's layers keep of a block's tokens."""
    return sum(_layer_bytes(caches, spec, options.kv_cache_dtype, options.block_size) for spec in caches.guests)


def _group_bytes(caches: Caches, group: CacheGroup, sizes: Sequence[int]) -> int:
    """Bytes of a block over a group's layers."""
    if not caches.shared:
        return sum(sizes[layer] for layer in group.layers)
    return sum({caches.specs[layer]: sizes[layer] for layer in group.layers}.values())


def state_bytes(specs: Sequence[CacheSpec]) -> int:
    """Bytes of one row's recurrent states."""
    return sum(4 * prod(shape) for spec in specs for shape in spec.state)
