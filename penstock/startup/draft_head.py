"""A head that drafts for its target from hidden states: whether it is one of this target's, and what runs it."""

from __future__ import annotations

from dataclasses import replace

import torch

from penstock.config.cache_spec import group_layers
from penstock.config.errors import CheckpointError, ConfigError, quoted
from penstock.config.options import EngineOptions
from penstock.config.speculation import Speculation
from penstock.kernels.api import KernelSet
from penstock.layers.batch import MaskKind
from penstock.layers.draft_head import DraftHead
from penstock.layers.part import FINAL, WHOLE, layer_input
from penstock.layers.state_heads import StateHeads
from penstock.models import eagle, eagle3, medusa, mlp_speculator, mtp, redrafter
from penstock.models.blueprint import Blueprint
from penstock.models.draft_heads import LAST_STATE, TAPPED, TargetFacts, tapped_layers
from penstock.models.fields import Fields
from penstock.models.registry import Model
from penstock.runtime.drafters.drafting import TappedDrafter
from penstock.runtime.drafters.head import HeadDrafter, ParallelDrafter
from penstock.runtime.drafters.head_blocks import HeadBlocks
from penstock.runtime.drafters.hidden_states import Taps
from penstock.runtime.drafters.last_state import LastStateDrafter
from penstock.runtime.executor import make_executor
from penstock.runtime.places import place_of
from penstock.runtime.sampler import Sampler
from penstock.startup.cache_plan import every_position
from penstock.startup.draft_room import DraftNeeds, logits_at_once
from penstock.startup.draft_spec import DraftSpec, draft_memory, draft_traits
from penstock.startup.memory_plan import MemoryPlan
from penstock.weights.checkpoint import Checkpoint
from penstock.weights.draft_heads import HeadFiles, check_numbers, draft_ids, head_files, kind_of
from penstock.weights.loader import load_weights
from penstock.weights.weight_plan import LoadTarget, plan_weights, planned_bytes


def head_of(
    checkpoint: Checkpoint, target: Model, kernels: KernelSet, options: EngineOptions, asked: Speculation
) -> DraftSpec | None:
    """Declares the head that lies in a checkpoint; None where there is a whole model, and no head was asked for.

    Raises:
        ConfigError: it is damaged, or cannot draft for this target.
    """
    facts = TargetFacts(hidden_size(target), target.vocab_size, len(target.blocks))
    try:
        if (kind := kind_of(checkpoint, asked.method)) is None:
            return None
        check_target(target, kind)
        files = head_files(checkpoint, kind)
        with torch.device(options.torch_device):
            fields = Fields(files.config, f"{files.path}: config.json")
            model = _declared(files, fields, kernels, options, facts)
        ids = draft_ids(files, facts)
        if ids is not None and model.head is not None and len(ids) != (guessed := model.head.weight.shape[0]):
            raise CheckpointError(f"its 'd2t' names {len(ids)} tokens, and it guesses {guessed}.")
        most = model.count if isinstance(model, StateHeads) else asked.num_speculative_tokens
        if asked.num_speculative_tokens > most:
            raise CheckpointError(
                f"num_speculative_tokens is {asked.num_speculative_tokens}, and there are {most} heads, each for one."
            )
        weights = plan_weights(model, files, LoadTarget(model.dtype, options.torch_device, options.device != "cpu"))
        needs = DraftNeeds(asked, files.facts(), planned_bytes(weights), logits_at_once(kind, asked))
        check_numbers(files)
    except CheckpointError as error:
        raise ConfigError(
            f"--speculative-config: {quoted(str(checkpoint.path), 200)} cannot draft for {quoted(options.model, 200)}: "
            f"{error} What fits is a head that was made for a model with hidden states of {facts.hidden_size} "
            f"elements, {facts.vocab_size} tokens and {facts.layers} layers."
        ) from error
    return DraftSpec(needs, files, model, weights, files, _taps(kind, fields, facts))


def load_head(
    draft: DraftSpec, target: Model, kernels: KernelSet, options: EngineOptions, plan: MemoryPlan, rows: int
) -> TappedDrafter:
    """Loads a head and joins it with its target's tables and blocks, for so many sequences a step."""
    head, files = draft.model, draft.files
    device = torch.device(options.torch_device)
    assert files is not None and options.max_num_batched_tokens
    if isinstance(head, (DraftHead, StateHeads)):
        head.share(target)
    load_weights(head, files, draft.weights)
    head.place(device)
    traits = draft_traits(draft, target, options, plan)
    sampler = Sampler(target.vocab_size, rows, kernels.sampling(), watermark_key=options.watermark_key)
    if isinstance(head, StateHeads):
        return LastStateDrafter(head, sampler, place_of(device), traits)
    assert isinstance(head, DraftHead)
    memory = draft_memory(draft, target, kernels, options, plan, rows)
    ids = draft_ids(files, TargetFacts(hidden_size(target), target.vocab_size, len(target.blocks)))
    parallel = isinstance(head, eagle3.ParallelHead)
    # All of a step's logits at once: a head that drafts in one pass has as many a row as there may be drafts.
    most = rows * (traits.most if parallel else 1)
    tokens = options.max_num_batched_tokens + (rows * traits.most if parallel else 0)
    part = replace(WHOLE, taps=(head.chained,))
    executor = make_executor(head, memory.caches, max(tokens, rows), most, options.arithmetic == "fast", part)
    keys = [cache.kv for cache in memory.caches]
    blocks = HeadBlocks(memory.builder, memory.group, keys, memory.blocks, memory.spare)
    make = ParallelDrafter if parallel else HeadDrafter
    places = None if ids is None else torch.from_numpy(ids).to(device)
    return make(head, executor, blocks, sampler, traits, draft.taps, places)


def hidden_size(model: Model) -> int:
    """Elements of the hidden states of a model that makes text; 0 of others."""
    return 0 if model.head is None else int(model.head.weight.shape[1])


def _declared(
    files: HeadFiles, fields: Fields, kernels: KernelSet, options: EngineOptions, target: TargetFacts
) -> Model:
    dtype, names = getattr(torch, options.dtype), files.tensors
    if files.layout is not None:
        return mtp.build(fields.values, kernels, dtype, options.max_model_len, target, names, files.layout)
    blueprint = Blueprint.read(fields, kernels, dtype, options.max_model_len)
    if files.kind == "medusa":
        return medusa.build(blueprint, target, names)
    if files.kind == "mlp_speculator":
        return mlp_speculator.build(blueprint, target, names)
    if files.kind == "redrafter":
        return redrafter.build(blueprint, target)
    if files.kind == "eagle":
        return eagle.build(blueprint, target, names)
    return eagle3.build(blueprint, target, names, files.kind == "p-eagle")


def _taps(kind: str, fields: Fields, target: TargetFacts) -> Taps:
    if kind in TAPPED:
        return Taps(tuple(layer_input(layer) for layer in tapped_layers(fields, target)))
    return Taps((FINAL,), every=kind not in LAST_STATE)


def check_target(target: Model, kind: str) -> None:
    """Raises CheckpointError for a target that nothing of this kind can draft for."""
    if target.head is None or target.mask is not MaskKind.CAUSAL:
        raise CheckpointError("the target does not make text, token after token.")
    if target.runs:
        raise CheckpointError(f"the target's hidden states cannot be read: {target.runs}.")
    if kind not in LAST_STATE and every_position(group_layers(target.cache_specs)) is None:
        raise CheckpointError(
            "every layer of the target forgets what lies before its window, and drafts share those blocks; Medusa's "
            "heads keep nothing there."
        )
