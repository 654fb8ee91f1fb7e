"""What a draft model takes beside its target, in the memory plan of both. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from penstock.config.cache_spec import CacheSpec
from penstock.config.options import EngineOptions
from penstock.config.resolve import DTYPE_BYTES, ModelFacts
from penstock.config.speculation import Speculation
from penstock.startup.cache_plan import Caches, guest_bytes
from penstock.startup.memory_plan import MemoryLimits, activation_bytes

_LANES: Final = 4
_LANE_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True)
class DraftNeeds:
    """What the plan has to know of a draft model.

    Attributes:
        asked: what `--speculative-config` says.
        facts: of the model.
        weights_bytes: of its loaded weights.
        logits: rows of them that a sequence has at once.
        own: caches of its layers that are no guests of the target's blocks, but lie in lanes of their own.
    """

    asked: Speculation
    facts: ModelFacts
    weights_bytes: int
    logits: int = 1
    own: tuple[CacheSpec, ...] = ()


def with_draft_room(
    limits: MemoryLimits, draft: DraftNeeds | None, caches: Caches, options: EngineOptions
) -> MemoryLimits:
    """Limits that leave room for a draft model, if there is one, whose layers are the guests of these caches."""
    if draft is None:
        return limits
    if draft.own:
        spare = lane_blocks(draft, options) * lanes(options) * guest_bytes(replace(caches, guests=draft.own), options)
    else:
        spare = spare_blocks(draft.asked, options) * limits.max_num_seqs * guest_bytes(caches, options)
    step = activation_bytes(draft.facts, replace(limits, activation_bytes=None), DTYPE_BYTES[options.dtype])
    step += 4 * (draft.logits - 1) * limits.max_num_seqs * draft.facts.vocab_size
    return replace(limits, drafter_bytes=draft.weights_bytes + spare + step)


def spare_blocks(asked: Speculation, options: EngineOptions) -> int:
    """Blocks of a slot for drafts, and for the last known token, which may have none of its own yet."""
    return -(-(asked.num_speculative_tokens + 1) // options.block_size)


def lanes(options: EngineOptions) -> int:
    """Sequences that a model with another vocabulary drafts for at a time."""
    assert options.max_num_seqs
    return min(_LANES, options.max_num_seqs)


def lane_tokens(draft: DraftNeeds, options: EngineOptions) -> int:
    """Tokens of one of them that it sees."""
    assert options.max_model_len
    return min(_LANE_TOKENS, options.max_model_len, draft.facts.context_length)


def lane_blocks(draft: DraftNeeds, options: EngineOptions) -> int:
    """Blocks of a lane, those for drafts included."""
    return -(-(lane_tokens(draft, options) + draft.asked.num_speculative_tokens) // options.block_size)


def logits_at_once(kind: str | None, asked: Speculation) -> int:
    """Rows of logits that a sequence has at once: of a head that drafts in one pass, one for each draft."""
    return asked.num_speculative_tokens if kind == "p-eagle" else 1
