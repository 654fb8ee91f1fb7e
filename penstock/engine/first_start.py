"""An engine from a checkpoint: make its spec, load, join. The engine's only module that needs torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.config.resolve import Decision
from penstock.engine.api import EngineInfo
from penstock.engine.compose import compose, structured_output
from penstock.engine.loop import Engine
from penstock.runtime.drafter import Drafter
from penstock.runtime.executor import RecordedExecutor
from penstock.startup.build_runner import load, make_runner
from penstock.startup.claim import Claim
from penstock.startup.engine_spec import EngineSpec, kernel_decisions, make_engine_spec
from penstock.startup.keep_start import Told, keep_start
from penstock.startup.levels import guarantee, level_notes, products_note
from penstock.startup.scheduling import scheduler_options

log = logging.getLogger(__name__)


def built(
    claim: Claim, progress: Callable[[int, int], None] | None, grammars: bool, drafter: Drafter | None
) -> tuple[Engine, EngineInfo]:
    """Builds an engine; arguments as of build_engine. What the next start can go on from is kept.

    Raises:
        PenstockError: as `make_engine_spec`; also weights that are missing, left over or damaged.
    """
    spec = make_engine_spec(claim.options, drafts=drafter.most if drafter else 0)
    concrete = spec.options
    model = spec.model
    kernels = spec.kernels
    for row in spec.plan.table():
        log.info("%-12s %12s  %s", *row)
    claim.settle(concrete)
    structured = structured_output(concrete.model, model.vocab_size, warm=grammars)
    spec, kv_types, notes = load(spec, progress)
    limits = scheduler_options(concrete, spec.plan, whole_prompts=model.whole_prompts)
    runner, executor = make_runner(spec, kv_types, limits.max_num_seqs, drafter)
    engine = compose(concrete, limits, spec.groups, runner, structured, claim)
    mode, _, detail = executor.describe.partition(": ")
    notes += (Decision("step", mode, detail), *level_notes(concrete.arithmetic, executor.fast))
    for note in notes:
        log.info("%-14s %s%s", note.name, note.value, f" ({note.reason})" if note.reason else "")
    numbers = f"weights {concrete.quantize or 'as stored'}, KV cache {' '.join(kv_types)}{products_note(kernels)}"
    info = replace(engine_info(spec, model.vocab_size, notes, executor.fast), numbers=numbers)
    if drafter is None and isinstance(executor, RecordedExecutor):
        settings = tuple(note for note in notes if note.name not in ("packed weights", "step"))
        keep_start(spec, kv_types, executor, Told(info.determinism, numbers, settings, info.kernels))
    return engine, info


def engine_info(spec: EngineSpec, vocab_size: int, notes: Sequence[Decision] = (), fast: bool = False) -> EngineInfo:
    """The facts of an engine built from this; `fast`: level fast is in use."""
    concrete = spec.options
    architectures = spec.checkpoint.config.get("architectures") or ["?"]
    assert concrete.max_num_seqs and concrete.max_num_batched_tokens and concrete.served_model_name
    return EngineInfo(
        model=concrete.served_model_name,
        model_path=str(spec.checkpoint.path),
        architecture=str(architectures[0]),
        max_model_len=spec.plan.max_model_len,
        vocab_size=vocab_size,
        block_size=concrete.block_size,
        num_blocks=spec.plan.kv_blocks[0],
        max_num_seqs=concrete.max_num_seqs,
        max_num_batched_tokens=concrete.max_num_batched_tokens,
        dtype=concrete.dtype,
        device=concrete.device,
        determinism=guarantee(spec.kernels, fast),
        settings=(*spec.settings, *notes),
        memory=tuple(Decision(*row) for row in spec.plan.table()),
        kernels=kernel_decisions(spec.kernels),
    )
