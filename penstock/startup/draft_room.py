"""What a draft model takes beside its target, in the memory plan of both. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.config.options import EngineOptions
from penstock.config.resolve import DTYPE_BYTES, ModelFacts
from penstock.config.speculation import Speculation
from penstock.startup.cache_plan import Caches, guest_bytes
from penstock.startup.memory_plan import MemoryLimits, activation_bytes


@dataclass(frozen=True, slots=True)
class DraftNeeds:
    """What the plan has to know of a draft model.

    Attributes:
        asked: what `--speculative-config` says.
        facts: of the model.
        weights_bytes: of its loaded weights.
        logits: rows of them that a sequence has at once.
    """

    asked: Speculation
    facts: ModelFacts
    weights_bytes: int
    logits: int = 1


def with_draft_room(
    limits: MemoryLimits, draft: DraftNeeds | None, caches: Caches, options: EngineOptions
) -> MemoryLimits:
    """Limits that leave room for a draft model, if there is one, whose layers are the guests of these caches."""
    if draft is None:
        return limits
    spare = spare_blocks(draft.asked, options) * limits.max_num_seqs * guest_bytes(caches, options)
    step = activation_bytes(draft.facts, replace(limits, activation_bytes=None), DTYPE_BYTES[options.dtype])
    step += 4 * (draft.logits - 1) * limits.max_num_seqs * draft.facts.vocab_size
    return replace(limits, drafter_bytes=draft.weights_bytes + spare + step)


def spare_blocks(asked: Speculation, options: EngineOptions) -> int:
    """Blocks of a slot for drafts, and for the last known token, which may have none of its own yet."""
    return -(-(asked.num_speculative_tokens + 1) // options.block_size)


def logits_at_once(kind: str | None, asked: Speculation) -> int:
    """Rows of logits that a sequence has at once: of a head that drafts in one pass, one for each draft."""
    return asked.num_speculative_tokens if kind == "p-eagle" else 1
