"""From options to a running engine: from what an earlier start kept where there is that, else with torch and layers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from penstock.config.logits_processors import registered
from penstock.config.options import EngineOptions
from penstock.config.resolve import Decision
from penstock.core.policies.adapters import AdapterGate
from penstock.core.policies.order import default_gates
from penstock.core.scheduler import Scheduler
from penstock.engine.api import EngineInfo
from penstock.engine.loop import Engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.kernels.cpu.journal import JournalError
from penstock.runtime.drafters.drafter import Drafter
from penstock.runtime.drafters.drafting import Drafting
from penstock.runtime.drafters.methods import drafting_of
from penstock.runtime.logits_processors import load_processors
from penstock.startup.claim import Claim
from penstock.startup.kept_start import find
from penstock.startup.kv_events import settle_events
from penstock.startup.restart import restarted
from penstock.startup.scheduling import scheduler_options
from penstock.startup.shared_prompts import pin_shared_prompts
from penstock.startup.shortage import shortage_as_plan_error
from penstock.startup.start_workers import start_workers
from penstock.startup.started import Started
from penstock.startup.tiers import settle_tier
from penstock.structured.grammar_compiler import Vocabulary
from penstock.structured.manager import GrammarGate, StructuredOutputManager
from penstock.weights.pack_cache import PackCacheError

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
        drafter: proposes tokens for requests that allow it, all of which are verified; None for the one of the options.

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
    load_processors(claim.options.logits_processors)  # which are looked for before anything else is loaded
    drafting = drafting_of(claim.options, drafter)
    started = _again(claim, progress, drafting) if drafter is None else None
    if started is not None:
        structured = _structured_output(started.options, started.told.vocab_size, warm=grammars)
    else:
        workers = start_workers(claim)
        from penstock.startup.first_start import FirstStart

        first = FirstStart(claim.options, drafting, workers)
        claim.settle(first.options)
        structured = _structured_output(first.options, first.vocab_size, warm=grammars)
        started = first.load(progress)
    options = started.options
    limits = scheduler_options(options, started.plan, whole_prompts=started.whole_prompts)
    gates = (GrammarGate(structured), *default_gates(), AdapterGate(options.max_loras, started.adapters))
    scheduler = Scheduler(limits, started.groups, gates=gates)
    vocabulary = started.told.vocab_size
    engine = Engine(scheduler, started.runner, structured, claim.release, drafting, vocabulary, started.adapters)
    engine.alarm = None if started.others is None else started.others.alarm
    settle_events(started, scheduler.cache, claim)
    engine.idle_work[1:1] = settle_tier(started, scheduler.cache, engine)
    if options.shared_prompts:
        text = TextPipeline.of(options)
        pin_shared_prompts(engine, text, options.shared_prompts)
    return engine, _info(started, drafting.most)


def _again(claim: Claim, progress: Callable[[int, int], None] | None, drafting: Drafting) -> Started | None:
    """What an earlier start kept, started again; None where there is nothing that can be used."""
    again = find(claim.options)
    if again is None:
        return None
    claim.settle(again.options, with_torch=False)
    try:
        started = restarted(again, drafting)
    except (JournalError, PackCacheError, ValueError, RuntimeError) as error:
        log.warning("the engine starts anew: what was kept of its last start cannot be used (%s)", error)
        return None
    if progress is not None:
        progress(again.kept.facts.file_bytes, again.kept.facts.file_bytes)
    return started


def _structured_output(options: EngineOptions, vocab_size: int, *, warm: bool) -> StructuredOutputManager:
    structured = StructuredOutputManager(vocab_size, partial(_vocabulary, options, vocab_size))
    if warm:  # once streams run, it would stop them: it keeps the interpreter to itself for a second
        structured.warm()
    return structured


def _vocabulary(options: EngineOptions, size: int) -> Vocabulary:
    return grammar_vocabulary(TextPipeline.of(options), size)


def grammar_vocabulary(text: TextPipeline, size: int) -> Vocabulary:
    """What grammars need to know of a tokenizer, for a model with so many logits a position."""
    encode = partial(text.tokenizer.encode, add_special_tokens=False, parse_special=False)
    return Vocabulary(size, text.tokenizer.token_bytes, encode, text.tokenizer.special_ids, text.eos_ids)


def _info(started: Started, drafts: int) -> EngineInfo:
    options = started.options
    told = started.told
    assert options.max_num_seqs and options.max_num_batched_tokens and options.served_model_name
    return EngineInfo(
        model=options.served_model_name,
        model_path=started.model_path,
        architecture=told.architecture,
        max_model_len=started.plan.max_model_len,
        vocab_size=told.vocab_size,
        block_size=options.block_size,
        num_blocks=started.plan.kv_blocks[0],
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        dtype=options.dtype,
        device=options.device,
        determinism=told.determinism,
        settings=told.settings,
        memory=tuple(Decision(*row) for row in started.plan.table()),
        kernels=told.kernels,
        numbers=told.numbers,
        parameters=told.parameters,
        stored=told.stored,
        max_logprobs=options.max_logprobs,
        logprobs_mode=options.logprobs_mode,
        drafts=drafts,
        logits_processors=tuple(one.name for one in registered(options.logits_processors)),
        row_width=told.row_width,
    )
