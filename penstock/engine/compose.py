"""What every engine is joined from, however it started. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from penstock.config.options import EngineOptions, SchedulerOptions
from penstock.core.kv.cache_spec import CacheGroup
from penstock.core.policies.order import default_gates
from penstock.core.protocol import Runner
from penstock.core.scheduler import Scheduler
from penstock.engine.loop import Engine
from penstock.engine.shared_prompts import pin_shared_prompts
from penstock.engine.text_pipeline import TextPipeline
from penstock.startup.claim import Claim
from penstock.structured.grammar_compiler import Vocabulary
from penstock.structured.manager import GrammarGate, StructuredOutputManager


def structured_output(model: str, vocab_size: int, *, warm: bool) -> StructuredOutputManager:
    """For a model's vocabulary, which is loaded when a first grammar wants it, or at once where it is to be warm."""
    structured = StructuredOutputManager(vocab_size, partial(_vocabulary, model, vocab_size))
    if warm:  # once streams run, it would stop them: it keeps the interpreter to itself for a second
        structured.warm()
    return structured


def _vocabulary(model: str, size: int) -> Vocabulary:
    return grammar_vocabulary(TextPipeline.load(model), size)


def grammar_vocabulary(text: TextPipeline, size: int) -> Vocabulary:
    """What grammars need to know of a tokenizer, for a model with so many logits a position."""
    encode = partial(text.tokenizer.encode, add_special_tokens=False, parse_special=False)
    return Vocabulary(size, text.tokenizer.token_bytes, encode, text.tokenizer.special_ids, text.eos_ids)


def compose(
    options: EngineOptions,
    limits: SchedulerOptions,
    groups: Sequence[CacheGroup],
    runner: Runner,
    structured: StructuredOutputManager,
    claim: Claim,
) -> Engine:
    """An engine that is ready to step, with the prompts in its cache that its operator shares.

    Raises:
        ConfigError: one of these cannot be kept.
    """
    gates = (GrammarGate(structured), *default_gates())
    engine = Engine(Scheduler(limits, groups, gates=gates), runner, structured, claim.release)
    if options.shared_prompts:
        pin_shared_prompts(engine, TextPipeline.load(options.model), options.shared_prompts)
    return engine
