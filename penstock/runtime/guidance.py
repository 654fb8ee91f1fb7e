"""Slots that share one draw: classifier-free guidance (Sanchez et al. 2023, arXiv:2306.17806).

One slot draws, under its own parameters and masks; the other follows: it takes the tokens, and counts them as
generated. Log-probabilities are of the mixture and are told of the slot that draws. A follower is there to be mixed,
and brings none, whatever its request asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from penstock.kernels.sampling import first_places
from penstock.runtime.sampler import Draw


@dataclass(frozen=True, slots=True)
class SharedDraws:
    """A step's draws, once slots share them.

    Attributes:
        logits: [L, V] of the draws' places.
        draws: those that are made, with the drafts that count.
        followers: slots that take the tokens of one of them: (slot, index of the draw).
    """

    logits: Tensor
    draws: list[Draw]
    followers: tuple[tuple[int, int], ...] = ()


def share(logits: Tensor, draws: list[Draw], guidance: Sequence[tuple[int, int, float]]) -> SharedDraws:
    """Mixes the logits of slots that share a draw, and leaves out those that follow; `guidance` as in StepPlan.

    Drafts count as far as both slots have the same ones: behind others the two have read different tokens.

    Args:
        logits: [L, V] of all places, not modified.
        draws: of all slots.
        guidance: none for the null form, in which every slot draws for itself.

    Raises:
        ValueError: a slot that is named draws nothing in this step, or is named twice.
    """
    if not guidance:
        return SharedDraws(logits, draws)
    starts = first_places([draw.drafts for draw in draws])
    found = {draw.slot: index for index, draw in enumerate(draws)}
    named = [slot for pair in guidance for slot in pair[:2]]
    if len(set(named)) < len(named) or not found.keys() >= set(named):
        raise ValueError(f"slots {named} cannot share draws in pairs: each has to draw in this step, with one other")
    other_of = {found[slot]: (found[other], weight) for slot, other, weight in guidance}
    left_out = {other for other, _ in other_of.values()}
    parts: list[Tensor] = []
    made: list[Draw] = []
    followers: list[tuple[int, int]] = []
    for index, draw in enumerate(draws):
        if index in left_out:
            continue
        if index not in other_of:
            parts.append(logits[starts[index] : starts[index + 1]].float())
            made.append(draw)
            continue
        other, weight = other_of[index]
        drafts = _common(draw.drafts, draws[other].drafts)
        own, less = (logits[starts[at] : starts[at] + len(drafts) + 1].float() for at in (index, other))
        parts.append((1.0 + weight) * own - weight * less)
        followers.append((draws[other].slot, len(made)))
        made.append(draw._replace(drafts=drafts))
    return SharedDraws(torch.cat(parts), made, tuple(followers))


def _common(drafts: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    """The drafts that both begin with."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(drafts, others, strict=False))
    return tuple(draft for draft, _ in same)
