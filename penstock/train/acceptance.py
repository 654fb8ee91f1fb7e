"""What a draft head brings on answers that it was not trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.train.answers import Answer
from penstock.train.nets import DraftNet
from penstock.train.target import Target


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of greedy drafts behind every token of answers.

    Attributes:
        tokens: of those answers.
        match: share of places at which drafts 1 … j are all right, by j.
        steps: of the target in which the answers come, behind their first tokens, where it verifies up to j drafts.
        accepted: drafts that are right then, by j.
    """

    tokens: int
    match: tuple[float, ...]
    steps: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def tokens_a_step(self) -> tuple[float, ...]:
        """Tokens that such a step gives, by j."""
        return tuple(self.tokens / steps for steps in self.steps)


@torch.no_grad()
def measure(
    net: DraftNet,
    target: Target,
    answers: Sequence[Answer],
    drafted: Tensor | None = None,
    told: Callable[[int, int], None] = lambda done, total: None,
    room: int | None = None,
) -> Acceptance:
    """Measures it; `drafted` as in Training, `told` as in `Progress`.

    `room`: tokens that an answer may have (`max_tokens`), as the engine verifies no draft for which there is none
    behind the token that it draws itself; None for any number.
    """
    right: list[Tensor] = []
    for done, answer in enumerate(answers, start=1):
        right.append(_right(net, target, answer, drafted))
        told(done, len(answers))
    places = torch.cat(right)
    rounds = [_rounds(right, most, room) for most in range(1, net.drafts + 1)]
    shares = (places > torch.arange(net.drafts)[:, None]).float().mean(1)
    steps, accepted = zip(*rounds, strict=True)
    return Acceptance(len(places), tuple(shares.tolist()), steps, accepted)


def _right(net: DraftNet, target: Target, answer: Answer, drafted: Tensor | None) -> Tensor:
    """How many drafts are right behind each token of an answer but its last, [n]."""
    reading = target.read(answer.tokens)
    starts = torch.arange(len(answer.prompt), len(answer.tokens), device=target.device) - 1
    starts = starts[: len(answer.answer) - 1]
    right = torch.zeros(len(starts), dtype=torch.int64)
    going = torch.ones(len(starts), dtype=torch.bool)
    for draft, logits in enumerate(net.chain(reading, starts)):
        guessed = logits.argmax(-1)
        guessed = guessed if drafted is None else drafted.to(guessed.device)[guessed]
        places = starts + 2 + draft
        there = places < len(answer.tokens)
        same = guessed == reading.tokens[places.clamp(max=len(answer.tokens) - 1)]
        going &= (same & there).cpu()
        right += going
    return right


def _rounds(right: Sequence[Tensor], most: int, room: int | None) -> tuple[int, int]:
    """Steps of the target in which answers come, the first tokens of which their prompts give; and drafts accepted."""
    steps = accepted = 0
    for counts in right:
        at = 0
        while at < len(counts):
            found = min(int(counts[at]), most, most if room is None else room - at - 2)
            at += 1 + found
            accepted += found
            steps += 1
    return steps, accepted
