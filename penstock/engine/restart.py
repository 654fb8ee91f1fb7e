"""An engine from what an earlier start kept: its programs, packed weights and caches. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.config.names import served_name
from penstock.config.resolve import Decision
from penstock.core.kv.cache_spec import group_layers
from penstock.engine.api import EngineInfo
from penstock.engine.compose import compose, structured_output
from penstock.engine.loop import Engine
from penstock.kernels.cache import KvTensors
from penstock.kernels.cpu.journal import JournalError, Places, replayed
from penstock.kernels.cpu.native import NativeSampling
from penstock.kernels.cpu.packed import kv_layout, zero_pages
from penstock.kernels.cpu.step_program import StepProgram, address
from penstock.runtime.batch_builder import BatchBuilder
from penstock.runtime.kv_memory import KVMemory
from penstock.runtime.replay import ReplayExecutor
from penstock.runtime.runner import PROMPT_LOGIT_ROWS, ModelRunner
from penstock.runtime.sampler import Sampler
from penstock.startup.claim import Claim
from penstock.startup.kept_start import Again
from penstock.startup.scheduling import scheduler_options, spare_states
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


def restarted(claim: Claim, again: Again, *, grammars: bool) -> tuple[Engine, EngineInfo]:
    """Builds the engine; `grammars` as in build_engine.

    Raises:
        JournalError: what was kept does not fit this library.
        PenstockError: as build_engine.
    """
    kept, options, plan = again.kept, again.options, again.plan
    claim.settle(options, with_torch=False)
    limits = scheduler_options(options, plan)
    rows, most = limits.max_num_seqs, max(limits.max_num_seqs, PROMPT_LOGIT_ROWS)
    memory = KVMemory(
        ArrayCaches(),
        kept.specs,
        plan.kv_blocks,
        options.block_size,
        kv_types=kept.kv_types,
        device=None,
        state_slots=rows + spare_states(plan),
    )
    made = _programs(again, memory, limits.max_num_batched_tokens, most)
    groups = group_layers(kept.specs)
    blocks = -(-plan.max_model_len // options.block_size)
    executor = ReplayExecutor(made.body, made.head, kept.results, limits.max_num_batched_tokens, most, made.keeps)
    builder = BatchBuilder(len(groups), rows, blocks, options.block_size, None)
    runner = ModelRunner(executor, memory, Sampler(kept.vocab_size, rows, NativeSampling()), builder)
    structured = structured_output(options.model, kept.vocab_size, warm=grammars)
    engine = compose(options, limits, groups, runner, structured, claim)
    return engine, _info(again, executor.describe)


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


def _info(again: Again, describe: str) -> EngineInfo:
    kept, options, plan = again.kept, again.options, again.plan
    assert options.max_num_seqs and options.max_num_batched_tokens
    mode, _, detail = describe.partition(": ")
    settings = (
        *again.settings,
        Decision("packed weights", "kept", f"mapped from {again.weights.path}"),
        *kept.settings,
        Decision("step", mode, f"{detail}, as an earlier start recorded them"),
    )
    return EngineInfo(
        model=options.served_model_name or served_name(options.model),
        model_path=options.model,
        architecture=kept.architecture,
        max_model_len=plan.max_model_len,
        vocab_size=kept.vocab_size,
        block_size=options.block_size,
        num_blocks=plan.kv_blocks[0],
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        dtype=options.dtype,
        device=options.device,
        determinism=kept.determinism,
        settings=settings,
        memory=tuple(Decision(*row) for row in plan.table()),
        kernels=kept.kernels,
        numbers=kept.numbers,
    )
