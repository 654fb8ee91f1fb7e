"""From options to a running engine: make its spec, load, join. The engine's only module that needs torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from penstock.config.options import EngineOptions
from penstock.config.resolve import Decision
from penstock.core.policies.order import default_gates
from penstock.core.scheduler import Scheduler
from penstock.engine.api import EngineInfo
from penstock.engine.loop import Engine
from penstock.engine.shared_prompts import pin_shared_prompts
from penstock.engine.text_pipeline import TextPipeline
from penstock.runtime.drafter import Drafter
from penstock.startup.build_runner import load, make_runner, scheduler_options
from penstock.startup.claim import Claim
from penstock.startup.engine_spec import EngineSpec, kernel_decisions, make_engine_spec
from penstock.startup.levels import guarantee, level_notes, products_note
from penstock.startup.shortage import shortage_as_plan_error
from penstock.structured.grammar_compiler import Vocabulary
from penstock.structured.manager import GrammarGate, StructuredOutputManager

log = logging.getLogger(__name__)


def build_engine(
    options: EngineOptions,
    progress: Callable[[int, int], None] | None = None,
    *,
    grammars: bool = False,
    drafter: Drafter | None = None,
) -> tuple[Engine, EngineInfo]:
    """Builds an engine that is ready to step.

    Args:
        options: as given by the user.
        progress: called with (bytes read, bytes in all) while weights load.
        grammars: the vocabulary is loaded for them meanwhile; else the first grammar waits for it.
        drafter: proposes tokens for requests that allow it; None for nobody.

    Raises:
        PenstockError: as `make_engine_spec`; also weights that are missing, left over or damaged, or another engine of
            this process that has other threads or another instruction set.
    """
    claim = Claim(options)
    try:
        return _built(claim, progress, grammars, drafter)
    except BaseException as error:
        claim.release()
        if (said := shortage_as_plan_error(error)) is not error:
            raise said from None
        raise


def _built(
    claim: Claim, progress: Callable[[int, int], None] | None, grammars: bool, drafter: Drafter | None
) -> tuple[Engine, EngineInfo]:
    spec = make_engine_spec(claim.options, drafts=drafter.most if drafter else 0)
    concrete = spec.options
    model = spec.model
    kernels = spec.kernels
    for row in spec.plan.table():
        log.info("%-12s %12s  %s", *row)
    claim.settle(concrete)
    structured = StructuredOutputManager(model.vocab_size, partial(_vocabulary, concrete.model, model.vocab_size))
    if grammars:  # once streams run, it would stop them: it keeps the interpreter to itself for a second
        structured.warm()
    spec, kv_types, notes = load(spec, progress)
    limits = scheduler_options(concrete, spec.plan, model)
    runner, executor = make_runner(spec, kv_types, limits.max_num_seqs, drafter)
    gates = (GrammarGate(structured), *default_gates())
    engine = Engine(Scheduler(limits, spec.groups, gates=gates), runner, structured, claim.release)
    if concrete.shared_prompts:
        pin_shared_prompts(engine, TextPipeline.load(concrete.model), concrete.shared_prompts)
    mode, _, detail = executor.describe.partition(": ")
    notes += (Decision("step", mode, detail), *level_notes(concrete.arithmetic, executor.fast))
    for note in notes:
        log.info("%-14s %s%s", note.name, note.value, f" ({note.reason})" if note.reason else "")
    numbers = f"weights {concrete.quantize or 'as stored'}, KV cache {' '.join(kv_types)}{products_note(kernels)}"
    return engine, replace(engine_info(spec, model.vocab_size, notes, executor.fast), numbers=numbers)


def _vocabulary(model: str, size: int) -> Vocabulary:
    return grammar_vocabulary(TextPipeline.load(model), size)


def grammar_vocabulary(text: TextPipeline, size: int) -> Vocabulary:
    """What grammars need to know of a tokenizer, for a model with so many logits a position."""
    encode = partial(text.tokenizer.encode, add_special_tokens=False, parse_special=False)
    return Vocabulary(size, text.tokenizer.token_bytes, encode, text.tokenizer.special_ids, text.eos_ids)


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
