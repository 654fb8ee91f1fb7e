"""A draft model beside its target: whether it can draft for it, and what runs it; heads are `startup.draft_head`'s."""

from __future__ import annotations

from dataclasses import replace

import torch

from penstock.config.cache_spec import CacheKind, group_layers
from penstock.config.errors import CheckpointError, ConfigError, quoted
from penstock.config.options import EngineOptions
from penstock.config.speculation import HEADS, speculation
from penstock.kernels.api import KernelSet
from penstock.layers.batch import LayerCache, MaskKind
from penstock.models.registry import Model, build_model, check_architecture
from penstock.runtime.batch_builder import BatchBuilder, BatchTraits
from penstock.runtime.drafters.draft_blocks import DraftBlocks
from penstock.runtime.drafters.draft_model import DraftModelDrafter
from penstock.runtime.drafters.text_draft import TextDrafter, Vocabularies
from penstock.runtime.executor import make_executor
from penstock.runtime.sampler import Sampler
from penstock.startup.cache_plan import every_position
from penstock.startup.draft_head import head_of
from penstock.startup.draft_room import DraftNeeds, lane_blocks, lane_tokens, lanes
from penstock.startup.draft_self import self_of
from penstock.startup.draft_spec import DraftSpec, draft_memory, draft_traits
from penstock.startup.memory_plan import MemoryPlan
from penstock.startup.resident import packer_of, resident_bytes
from penstock.weights.dummy import open_dummy
from penstock.weights.facts import model_facts
from penstock.weights.kept_text import read_text
from penstock.weights.loader import load_weights
from penstock.weights.open import open_checkpoint
from penstock.weights.weight_plan import LoadTarget, plan_weights, planned_bytes


def draft_of(target: Model, kernels: KernelSet, options: EngineOptions) -> DraftSpec | None:
    """Opens and declares the draft model that options ask for, if they do.

    Args:
        target: the model whose tokens it proposes.
        kernels: it computes with.
        options: concrete.

    Raises:
        CheckpointError: it cannot be read.
        ConfigError: it cannot draft for this target.
    """
    asked = speculation(options.speculative_config)
    if asked is None or not asked.loads:
        return None
    if asked.method == "self":
        return self_of(target, options, asked)
    name = asked.model or options.model
    if asked.method in HEADS or options.load_format != "dummy":
        checkpoint = open_checkpoint(name)
        if (head := head_of(checkpoint, target, kernels, options, asked)) is not None:
            return head
    else:
        checkpoint = open_dummy(name, None)
    check_architecture(checkpoint.config)
    with torch.device(options.torch_device):
        dtype = getattr(torch, options.dtype)
        model = build_model(checkpoint.config, kernels, dtype=dtype, max_model_len=options.max_model_len)
    shared = _same_vocabulary(options, name)
    _check(model, target, options, name, shared)
    facts = model_facts(checkpoint)
    device = LoadTarget(model.dtype, options.torch_device, options.device != "cpu")
    plans = () if model.runs else plan_weights(model, checkpoint, device)
    as_stored = replace(options, quantize=None)
    weights = planned_bytes(plans) if plans else resident_bytes(facts, packer_of(kernels), as_stored)
    own = () if shared else tuple(model.cache_specs)
    return DraftSpec(DraftNeeds(asked, facts, weights, own=own), checkpoint, model, plans)


def load_drafter(
    draft: DraftSpec, target: Model, kernels: KernelSet, options: EngineOptions, plan: MemoryPlan, rows: int
) -> DraftModelDrafter:
    """Loads a draft model and joins it with its share of the blocks, for so many sequences a step."""
    model = draft.model
    load_weights(model, draft.checkpoint, draft.weights)
    model.place(torch.device(options.torch_device))
    memory = draft_memory(draft, target, kernels, options, plan, rows)
    traits = draft_traits(draft, target, options, plan)
    executor = make_executor(model, memory.caches, traits.max_tokens, rows, options.arithmetic == "fast")
    sampler = Sampler(model.vocab_size, rows, kernels.sampling(), watermark_key=options.watermark_key)
    keys = [cache.kv for cache in memory.caches]
    places = DraftBlocks(memory.builder, memory.group, keys, memory.blocks, memory.spare)
    return DraftModelDrafter(executor, places, sampler, traits)


def load_text_drafter(
    draft: DraftSpec, target: Model, kernels: KernelSet, options: EngineOptions, plan: MemoryPlan
) -> TextDrafter:
    """Loads a draft model with another vocabulary, in lanes of its own."""
    model, needs = draft.model, draft.needs
    device = torch.device(options.torch_device)
    load_weights(model, draft.checkpoint, draft.weights)
    model.place(device)
    rows, each = lanes(options), lane_blocks(needs, options)
    size = options.block_size
    caches = [
        LayerCache(
            0,
            kernels.make_cache(
                options.kv_cache_dtype, rows * each, size, spec.num_kv_heads, spec.key_dim, spec.value_dim,
                options.torch_device, spec.latent,
            ),
        )
        for spec in model.cache_specs
    ]  # fmt: skip
    traits = replace(draft_traits(draft, target, options, plan), longest=lane_tokens(needs, options))
    builder = BatchBuilder(1, rows, each, size, device, BatchTraits(axes=model.position_axes))
    executor = make_executor(model, caches, traits.max_tokens, rows, options.arithmetic == "fast")
    assert needs.asked.model is not None
    words = Vocabularies(*(read_text(one, options.pack_cache)[1] for one in (options.model, needs.asked.model)))
    words.draft.prepare()
    words.target.prepare()
    return TextDrafter(executor, builder, words, traits, rows)


def _check(model: Model, target: Model, options: EngineOptions, name: str, shared: bool) -> None:
    """Raises ConfigError for a model that cannot draft. `shared`: both have one vocabulary, and then blocks too."""
    kinds = {spec.kind for spec in model.cache_specs}
    why = ""
    if model.head is None or target.head is None or MaskKind.CAUSAL not in {model.mask} & {target.mask}:
        why = "both must make text, token after token"
    elif kinds & {CacheKind.STATE, CacheKind.CROSS}:
        why = "its recurrent or cross-attention layers cannot go back where drafts are refused"
    elif shared and every_position(group_layers(target.cache_specs)) is None:
        why = f"every layer of {options.model} forgets what lies before its window, and drafts share those blocks"
    elif model.runs and options.on_gpu:
        why = f"{model.runs}, on CPUs alone"
    if why:
        raise ConfigError(
            f"--speculative-config: model {quoted(name, 200)} cannot draft for {quoted(options.model, 200)}: {why}. "
            'Take another, or {"method": "suffix"}, which needs none.'
        )


def _same_vocabulary(options: EngineOptions, name: str) -> bool:
    """Whether both models read and write the same tokens; else drafts are told through text.

    Raises:
        ConfigError: one of them has no tokenizer.
    """
    ours, theirs = _tokens(options.model, options), _tokens(name, options)
    if ours == theirs:
        return True
    if ours and theirs:
        return False
    lacks, has = (name, options.model) if ours else (options.model, name)
    raise ConfigError(
        f"--speculative-config: the draft model {quoted(name, 200)} cannot draft for {quoted(options.model, 200)}: "
        f"{quoted(lacks, 200)} has no tokenizer, and {quoted(has, 200)} has one of {len(ours or theirs)} tokens. Put "
        'the tokenizer beside the model, or take {"method": "suffix"}, which needs none.'
    )


def _tokens(model: str, options: EngineOptions) -> dict[str, int]:
    """Numbers of a model's tokens; none where its files have no tokenizer, so that it is asked in token ids alone."""
    try:
        _, tokenizer = read_text(model, options.pack_cache)
    except CheckpointError:
        return {}
    return tokenizer.backend.get_vocab()
