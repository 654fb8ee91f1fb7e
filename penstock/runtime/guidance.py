"""Slots that share one draw: classifier-free guidance (Sanchez et al. 2023, arXiv:2306.17806)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.sampling import first_places
from penstock.runtime.sampler import Draw


@dataclass(frozen=True, slots=True)
class SharedDraws:
    """A step's draws, once slots share them.

    Attributes:
        logits: [L, V] of the draws' places.
        draws: those that are made.
        followers: slots that take the tokens of one of them: (slot, index of the draw).
    """

    logits: Tensor
    draws: list[Draw]
    followers: tuple[tuple[int, int], ...] = ()


def share(logits: Tensor, draws: list[Draw], guidance: Sequence[tuple[int, int, float]]) -> SharedDraws:
    """Mixes the logits of slots that share a draw, and leaves out those that follow; `guidance` as in StepPlan.

    Args:
        logits: [L, V] of all places, not modified.
        draws: of all slots.
        guidance: none for the null form, in which every slot draws for itself.

    Raises:
        ValueError: a slot that is named draws nothing in this step, is named twice, or has not as many drafts as the
            one that it shares with.
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
    made = [index for index in range(len(draws)) if index not in left_out]
    parts: list[Tensor] = []
    followers: list[tuple[int, int]] = []
    for index in made:
        own = logits[starts[index] : starts[index + 1]].float()
        if index in other_of:
            other, weight = other_of[index]
            less = logits[starts[other] : starts[other + 1]].float()
            if len(less) != len(own):
                raise ValueError(
                    f"slots {draws[index].slot} and {draws[other].slot} share a draw, but not as many drafts"
                )
            followers.append((draws[other].slot, len(parts)))
            own = (1.0 + weight) * own - weight * less
        parts.append(own)
    return SharedDraws(torch.cat(parts), [draws[index] for index in made], tuple(followers))
