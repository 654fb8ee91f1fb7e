"""A model that drafts for itself with its first layers: which they are, and what runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from penstock.config.cache_spec import group_layers
from penstock.config.errors import ConfigError, quoted
from penstock.config.options import EngineOptions
from penstock.config.speculation import Speculation, speculation
from penstock.kernels.api import KernelSet
from penstock.layers.batch import LayerCache
from penstock.layers.decoder import DecoderHooks, DecoderModel, Heads, ModelTraits
from penstock.models.registry import Model
from penstock.runtime.batch_builder import BatchBuilder, BatchTraits
from penstock.runtime.drafters.draft_blocks import DraftBlocks
from penstock.runtime.drafters.first_layers import FirstLayersDrafter
from penstock.runtime.executor import Executor, make_executor
from penstock.runtime.sampler import Sampler
from penstock.startup.cache_plan import every_position
from penstock.startup.draft_room import DraftNeeds
from penstock.startup.draft_spec import DraftSpec, draft_traits
from penstock.startup.memory_plan import MemoryPlan
from penstock.weights.facts import model_facts
from penstock.weights.open import open_checkpoint


def self_of(target: Model, options: EngineOptions, asked: Speculation) -> DraftSpec:
    """The first layers of a model.

    Raises:
        ConfigError: there are no such layers, or they keep something else than keys and values of every position.
    """
    layers = asked.layers or max(1, len(target.blocks) // 4)
    groups = group_layers(target.cache_specs)
    group = every_position(groups)
    why = ""
    if layers >= len(target.blocks):
        why = f"has {len(target.blocks)} layers, of which {layers} were asked for; allowed: fewer than it has"
    elif target.runs or target.head is None:
        why = f"has no layers that can be run by themselves{f': {target.runs}' if target.runs else ''}"
    elif group is None or not set(range(layers)) <= set(groups[group].layers):
        why = f"has layers among the first {layers} that do not keep every position"
    if why:
        raise ConfigError(
            f'--speculative-config: {quoted(options.model, 200)} {why}. Take other layers, or {{"method": "suffix"}}.'
        )
    heads = Heads(target.head)
    hooks = DecoderHooks(target.opening, target.closing)
    traits = ModelTraits(target.max_positions, target.dtype, mask=target.mask, position_axes=target.position_axes)
    model = DecoderModel(target.kernels, target.embedding, target.blocks[:layers], target.norm, heads, traits, hooks)
    checkpoint = open_checkpoint(options.model)
    needs = DraftNeeds(asked, model_facts(checkpoint), 0)
    return DraftSpec(needs, checkpoint, model, (), own=True)


def load_self(
    draft: DraftSpec,
    target: Model,
    kernels: KernelSet,
    options: EngineOptions,
    plan: MemoryPlan,
    caches: Sequence[LayerCache],
    lead: Callable[[Executor], Executor] = lambda executor: executor,
) -> FirstLayersDrafter:
    """Joins them with their memory, for as many sequences a step as the plan has.

    `lead` joins what runs them here with what other ranks run.
    """
    group, size = every_position(group_layers(target.cache_specs)), options.block_size
    assert group is not None and options.max_num_seqs
    rows = options.max_num_seqs
    longest = -(-plan.max_model_len // size) + 1
    builder = BatchBuilder(
        1, rows, longest, size, torch.device(options.torch_device), BatchTraits(axes=draft.model.position_axes)
    )
    traits = draft_traits(draft, target, options, plan)
    executor = lead(_executor(draft.model, options, caches))
    sampler = Sampler(target.vocab_size, rows, kernels.sampling(), watermark_key=options.watermark_key)
    blocks = DraftBlocks(builder, group, (), plan.kv_blocks[group], 0)
    return FirstLayersDrafter(executor, blocks, sampler, traits)


def _executor(layers: Model, options: EngineOptions, caches: Sequence[LayerCache]) -> Executor:
    """What runs the layers, whose caches are the first of these."""
    own = [LayerCache(0, cache.kv) for cache in caches[: len(layers.cache_specs)]]
    rows = options.max_num_seqs or 1
    return make_executor(layers, own, rows, rows, options.arithmetic == "fast")


def rank_drafts(target: Model, options: EngineOptions, caches: Sequence[LayerCache]) -> Executor | None:
    """What runs the first layers in a rank that does not lead; None where nothing drafts with them."""
    asked = speculation(options.speculative_config)
    if asked is None or asked.method != "self":
        return None
    return _executor(self_of(target, options, asked).model, options, caches)
