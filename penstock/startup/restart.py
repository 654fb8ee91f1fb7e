"""The runner of an engine that goes on from what an earlier start kept (`startup.kept_start`). No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.config.cache_spec import group_layers
from penstock.config.limits import PROMPT_LOGIT_ROWS
from penstock.config.resolve import Decision
from penstock.kernels.cache import KvTensors
from penstock.kernels.cpu.journal import JournalError, Places, replayed
from penstock.kernels.cpu.native import NativeSampling
from penstock.kernels.cpu.packed import kv_layout, zero_pages
from penstock.kernels.cpu.step_program import StepProgram, address
from penstock.runtime.batch_builder import BatchBuilder
from penstock.runtime.drafters.drafting import Drafting
from penstock.runtime.kv_memory import KVMemory
from penstock.runtime.logits_processors import load_processors
from penstock.runtime.replay import ReplayExecutor
from penstock.runtime.runner import Collaborators, ModelRunner
from penstock.runtime.sampler import Sampler
from penstock.startup.kept_start import Again
from penstock.startup.scheduling import scheduler_options, spare_states
from penstock.startup.started import Started, Told, log_notes, log_plan
from penstock.weights.pack_cache import PackCache


class ArrayCaches:
    """Makes caches of arrays in the native library's layout."""

    def make_cache(
        self,
        kv_type: str,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        device: str = "cpu",
        latent: bool = False,
    ) -> KvTensors:
        """As in kernels.api.MakeCache; of memory, nothing else is looked at than addresses and rows."""
        layout = kv_layout(kv_type, block_size, num_kv_heads, key_dim, value_dim, latent)
        key: Any = zero_pages(num_blocks, layout.key_block_bytes)
        value: Any = zero_pages(num_blocks, layout.value_block_bytes)
        return KvTensors(key, value, layout, latent)


@dataclass(frozen=True, slots=True)
class _Programs:
    body: StepProgram
    head: StepProgram
    keeps: Any


def restarted(again: Again, drafting: Drafting) -> Started:
    """The model that was kept, ready to compute steps, with drafts by `drafting`.

    Raises:
        JournalError: what was kept does not fit this library.
    """
    kept = again.kept
    plan = again.plan
    limits = scheduler_options(again.options, plan)
    size = limits.block_size
    rows, most = limits.max_num_seqs, max(limits.max_num_seqs, PROMPT_LOGIT_ROWS)
    memory = KVMemory(
        ArrayCaches(),
        kept.specs,
        plan.kv_blocks,
        size,
        kv_types=kept.kv_types,
        device=None,
        state_slots=rows + spare_states(plan),
    )
    made = _programs(again, memory, limits.max_num_batched_tokens, most)
    executor = ReplayExecutor(made.body, made.head, kept.results, limits.max_num_batched_tokens, most, made.keeps)
    groups = group_layers(kept.specs)
    builder = BatchBuilder(len(groups), rows, -(-plan.max_model_len // size), size, None)
    told, key = again.options.logprobs_mode, again.options.watermark_key
    processors = load_processors(again.options.logits_processors)
    sampler = Sampler(kept.vocab_size, rows, NativeSampling(), told, key, processors)
    runner = ModelRunner(executor, memory, sampler, builder, Collaborators(drafting=drafting))
    log_plan(plan)
    return Started(again.options, plan, again.options.model, groups, False, runner, _told(again, executor.describe))


def _told(again: Again, describe: str) -> Told:
    kept = again.kept
    mode, _, detail = describe.partition(": ")
    notes = (
        Decision("packed weights", "kept", f"mapped from {again.weights.path}"),
        *kept.settings,
        Decision("step", mode, f"{detail}, as an earlier start recorded them"),
    )
    log_notes(notes)
    facts = kept.facts
    return Told(
        kept.architecture,
        kept.vocab_size,
        kept.determinism,
        kept.numbers,
        (*again.settings, *notes),
        kept.kernels,
        parameters=facts.parameters,
        stored=kept.under["quantize"] or facts.stored,
    )


def _programs(again: Again, memory: KVMemory, max_tokens: int, max_logit_rows: int) -> _Programs:
    kept, caches = again.kept, memory.caches
    constants = np.frombuffer(again.constants.data("constants"), np.uint8)
    begin, matrices = address(constants), _Matrices(again.weights)

    def place(layer: int, which: str | int) -> int:
        kv = caches[layer].kv
        named = {"key": kv.key, "value": kv.value}
        return address(named[which] if isinstance(which, str) else caches[layer].state[which])

    def places(before: StepProgram | None) -> Places:
        return Places(
            matrices=matrices,
            layouts=[cache.kv.layout for cache in caches],
            memory=place,
            arrays=[begin + offset for offset, _ in kept.arrays],
            before=lambda value: int(before.program.address(value)) if before else 0,
        )

    body = StepProgram(replayed(kept.body, places(None)), kept.fast)
    body.program.finish(max_tokens, max_tokens)
    head = StepProgram(replayed(kept.head, places(body)), kept.fast)
    head.program.finish(0, max_logit_rows)
    return _Programs(body, head, (constants, matrices, memory))


class _Matrices:
    """Packed matrices by the name of their weight."""

    def __init__(self, file: PackCache) -> None:
        self._file = file
        self._found: dict[str, Sequence[Any]] = {}

    def __call__(self, name: str) -> Sequence[Any]:
        if name not in self._found:
            weight = self._file.get(name)
            if weight is None:
                raise JournalError(f"the file of packed weights lacks {name}")
            self._found[name] = weight.parts
        return self._found[name]
