"""Guided sequences: two that share each draw, of which one reads the negative prompt (Sanchez et al. 2023, 2306.17806).

Both go on by themselves up to their last known token. That one is computed when both are there, in one step, and the
token that is drawn from their mixture becomes known to both. The one that follows tells nobody anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from penstock.config.adapters import activated
from penstock.config.sampling import SamplingParams
from penstock.core.plan_builder import PlanBuilder
from penstock.core.protocol import SlotResult
from penstock.core.sequence import Sequence


def followers_of(sequences: Iterable[Sequence]) -> list[Sequence]:
    """For each guided sequence the one that follows it; none of others."""
    made: list[Sequence] = []
    for leader in sequences:
        request = leader.request
        if not request.guided:
            continue
        reads = replace(
            request,
            prompt_ids=request.sampling.negative_prompt_ids,
            sampling=SamplingParams(max_tokens=request.sampling.max_tokens),
            stop_ids=(),
            grammar=None,
            thinking=None,
            media=(),
            adapters=activated(request.adapters, request.sampling.negative_prompt_ids),
        )
        tokens = list(reads.prompt_ids)
        leader.partner = Sequence(reads, leader.index, leader.order, leader.namespace, tokens, arrived=leader.arrived)
        leader.partner.partner, leader.partner.follows = leader, True
        made.append(leader.partner)
    return made


def lonely(builder: PlanBuilder) -> list[Sequence]:
    """Those that would draw in this step without their partner: there was no room, or it was sent back."""
    return [
        sequence
        for sequence, tokens in builder.scheduled.items()
        if tokens.sample and sequence.partner is not None and sequence.partner not in builder.scheduled
    ]


def followed(slot: int, shared: SlotResult) -> SlotResult:
    """What becomes of a slot that follows, of the result of the one that drew."""
    return SlotResult(slot, shared.tokens, error=shared.error, again=shared.again, back=shared.back)
