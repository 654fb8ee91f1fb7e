"""Keeps a start, once an engine has loaded and recorded its steps (`startup.kept_start`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config.cache_spec import CacheKind
from penstock.config.options import EngineOptions
from penstock.kernels.cpu.journal import NotKeptError
from penstock.kernels.cpu.packed import Packed
from penstock.kernels.cpu.step_program import address
from penstock.layers.batch import LayerCache
from penstock.runtime.executor import RecordedExecutor
from penstock.startup.engine_spec import EngineSpec
from penstock.startup.kept_start import (
    MOST_CONSTANTS,
    RECORDED_UNDER,
    Arena,
    KeptStart,
    Recorded,
    keep,
    weights_place,
    written,
)
from penstock.startup.started import Told
from penstock.weights.pack_cache import WeightNames

log = logging.getLogger(__name__)


def keep_start(
    spec: EngineSpec, kv_types: Sequence[str], executor: RecordedExecutor, told: Told, identity: str
) -> None:
    """Keeps what a next start of this engine can go on from, if all of it can be had again.

    Args:
        identity: `weights_identity` as of before the weights were read.
    """
    place = weights_place(spec.options, spec.facts.name, spec.checkpoint.path)
    if (why := _refusal(spec)) is not None:
        log.info("nothing of this start is kept: %s", why)
        return
    if place is None or not os.path.exists(place):  # why there is none has been told
        log.debug("nothing of this start is kept: there is no file of packed weights")
        return
    body, head = executor.recordings
    if body.journal is None or head.journal is None:
        return
    results = body.result_place, head.result_place
    caches = [_places(cache) for cache in executor.caches]
    recorded = Recorded(body.journal, head.journal, results, executor.fast, _matrices(spec), caches)
    try:
        calls, logits, arrays = written(recorded)
    except NotKeptError as reason:
        log.info("nothing of this start is kept: %s", reason)
        return
    finally:
        body.journal = head.journal = None
    if len(arrays.data) > MOST_CONSTANTS:
        log.info("nothing of this start is kept: its constants take %d bytes", len(arrays.data))
        return
    start = KeptStart(
        facts=spec.facts,
        specs=spec.model.cache_specs,
        kv_types=tuple(kv_types),
        vocab_size=spec.model.vocab_size,
        architecture=told.architecture,
        weights_bytes=spec.plan.weights_bytes,
        max_model_len=spec.plan.max_model_len,
        arena=_arena(spec.options, body.arena_bytes + head.arena_bytes),
        under={name: getattr(spec.options, name) for name in RECORDED_UNDER},
        fast=executor.fast,
        determinism=told.determinism,
        numbers=told.numbers,
        settings=told.settings,
        kernels=told.kernels,
        body=calls,
        head=logits,
        results=results,
        arrays=arrays.places,
    )
    keep(start, arrays.data, place, identity)


def _arena(options: EngineOptions, size: int) -> Arena:
    assert options.max_num_batched_tokens and options.max_num_seqs
    return Arena.of(size, options.max_num_batched_tokens, options.max_num_seqs)


def _refusal(spec: EngineSpec) -> str | None:
    """Why a start cannot be gone on from, or None."""
    model = spec.model
    if spec.options.device != "cpu" or spec.options.load_format != "auto":
        return "it is not of a model's weights on a CPU"
    if not spec.ranks.alone:
        return "the model is computed by several processes"
    if spec.options.enable_lora:
        return "adapters are read with torch"
    if spec.options.enable_prompt_embeds:
        return "rows of the embedding are given with torch"
    if spec.options.control_vector:
        return "control vectors are read at every start"
    if spec.draft is not None:
        return "a draft model is loaded at every start"
    if model.head is None or model.classifier is not None or model.projection is not None or model.whole_prompts:
        return "the model does not only make text"
    if model.position_axes > 1 or model.media_levels or model.embedding.types is not None:
        return "the model takes more than text"
    if any(cache.kind is CacheKind.CROSS for cache in model.cache_specs):
        return "rows attend to an encoder's output"
    return None


def _matrices(spec: EngineSpec) -> Mapping[str, Sequence[Any]]:
    name = WeightNames()
    packed = (weight for weight in spec.model.weights() if weight.pack is not None)
    named = {name(weight): weight.tensor for weight in packed}
    return {key: tensor.parts for key, tensor in named.items() if isinstance(tensor, Packed)}


def _places(cache: LayerCache) -> tuple[Any, int, int, Sequence[int]]:
    return cache.kv.layout, address(cache.kv.key), address(cache.kv.value), [address(state) for state in cache.state]
