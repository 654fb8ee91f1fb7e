"""A draft model beside its target: whether it can draft for it, and the drafter that runs it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from penstock.config.errors import CheckpointError, ConfigError, quoted
from penstock.config.options import EngineOptions
from penstock.config.speculation import speculation
from penstock.core.kv.cache_spec import CacheKind, group_layers
from penstock.kernels.api import KernelSet
from penstock.layers.batch import LayerCache, MaskKind
from penstock.models.registry import Model, build_model, check_architecture
from penstock.runtime.batch_builder import BatchBuilder, BatchTraits
from penstock.runtime.drafters.draft_blocks import DraftBlocks
from penstock.runtime.drafters.draft_model import DraftModelDrafter, DraftTraits
from penstock.runtime.executor import make_executor
from penstock.runtime.sampler import Sampler
from penstock.startup.cache_plan import every_position
from penstock.startup.draft_room import DraftNeeds, spare_blocks
from penstock.startup.memory_plan import MemoryPlan
from penstock.startup.resident import packer_of, resident_bytes
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.dummy import open_dummy
from penstock.weights.facts import model_facts
from penstock.weights.kept_text import read_text
from penstock.weights.loader import load_weights
from penstock.weights.open import open_checkpoint
from penstock.weights.weight_plan import LoadTarget, WeightPlan, plan_weights, planned_bytes


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """A draft model, decided before a weight is read.

    Attributes:
        needs: what the memory plan has to know of it.
        checkpoint, model, weights: as in `EngineSpec`.
    """

    needs: DraftNeeds
    checkpoint: Checkpoint
    model: Model
    weights: tuple[WeightPlan, ...]


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
    if asked is None or asked.model is None:
        return None
    dummy = options.load_format == "dummy"
    checkpoint = (open_dummy if dummy else open_checkpoint)(asked.model, None)
    check_architecture(checkpoint.config)
    with torch.device(options.torch_device):
        dtype = getattr(torch, options.dtype)
        model = build_model(checkpoint.config, kernels, dtype=dtype, max_model_len=options.max_model_len)
    _check(model, target, options, asked.model)
    _check_vocabulary(options, asked.model)
    facts = model_facts(checkpoint)
    device = LoadTarget(model.dtype, options.torch_device, options.device != "cpu")
    plans = () if model.runs else plan_weights(model, checkpoint, device)
    as_stored = replace(options, quantize=None)
    weights = planned_bytes(plans) if plans else resident_bytes(facts, packer_of(kernels), as_stored)
    return DraftSpec(DraftNeeds(asked, facts, weights), checkpoint, model, plans)


def load_drafter(
    draft: DraftSpec, target: Model, kernels: KernelSet, options: EngineOptions, plan: MemoryPlan, rows: int
) -> DraftModelDrafter:
    """Loads a draft model and joins it with its share of the blocks, for so many sequences a step."""
    model, device = draft.model, torch.device(options.torch_device)
    load_weights(model, draft.checkpoint, draft.weights)
    model.place(device)
    group, spare = every_position(group_layers(target.cache_specs)), spare_blocks(draft.needs.asked, options)
    assert group is not None and options.max_num_batched_tokens
    size, blocks = options.block_size, plan.kv_blocks[group]
    caches = [
        LayerCache(
            0,
            kernels.make_cache(
                options.kv_cache_dtype, blocks + rows * spare, size, spec.num_kv_heads, spec.key_dim, spec.value_dim,
                options.torch_device, spec.latent,
            ),
        )
        for spec in model.cache_specs
    ]  # fmt: skip
    executor = make_executor(model, caches, options.max_num_batched_tokens, rows, options.arithmetic == "fast")
    longest = -(-plan.max_model_len // size) + spare
    builder = BatchBuilder(1, rows, longest, size, device, BatchTraits(axes=model.position_axes))
    sampler = Sampler(model.vocab_size, rows, kernels.sampling(), watermark_key=options.watermark_key)
    traits = DraftTraits(
        draft.needs.asked.num_speculative_tokens,
        draft.needs.asked.draft_min,
        draft.needs.asked.draft_p_min,
        min(plan.max_model_len, draft.needs.facts.context_length),
        options.max_num_batched_tokens,
        model.vocab_size,
        target.vocab_size,
    )
    places = DraftBlocks(builder, group, [cache.kv for cache in caches], blocks, spare)
    return DraftModelDrafter(executor, places, sampler, traits)


def _check(model: Model, target: Model, options: EngineOptions, name: str) -> None:
    """Raises ConfigError for a model that cannot draft."""
    kinds = {spec.kind for spec in model.cache_specs}
    why = ""
    if model.head is None or target.head is None or MaskKind.CAUSAL not in {model.mask} & {target.mask}:
        why = "both must make text, token after token"
    elif kinds & {CacheKind.STATE, CacheKind.CROSS}:
        why = "its recurrent or cross-attention layers cannot go back where drafts are refused"
    elif every_position(group_layers(target.cache_specs)) is None:
        why = f"every layer of {options.model} forgets what lies before its window, and drafts share those blocks"
    elif model.runs and options.on_gpu:
        why = f"{model.runs}, on CPUs alone"
    if why:
        raise ConfigError(
            f"--speculative-config: model {quoted(name, 200)} cannot draft for {quoted(options.model, 200)}: {why}. "
            'Take another, or {"method": "suffix"}, which needs none.'
        )


def _check_vocabulary(options: EngineOptions, name: str) -> None:
    """Raises ConfigError unless both models read and write the same tokens."""
    ours, theirs = _tokens(options.model, options), _tokens(name, options)
    if ours == theirs:
        return
    apart = sum(ours.get(token) != number for token, number in theirs.items())
    raise ConfigError(
        f"--speculative-config: the draft model {quoted(name, 200)} has another vocabulary than "
        f"{quoted(options.model, 200)}: {len(theirs)} tokens, of which {apart} are not the same as those of its "
        f'{len(ours)}. Take a draft model of the same family, or {{"method": "suffix"}}, which needs none.'
    )


def _tokens(model: str, options: EngineOptions) -> dict[str, int]:
    """Numbers of a model's tokens; none where its files have no tokenizer, so that it is asked in token ids alone."""
    try:
        _, tokenizer = read_text(model, options.pack_cache)
    except CheckpointError:
        return {}
    return tokenizer.backend.get_vocab()
