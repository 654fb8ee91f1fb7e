"""A new draft head for a target, with its first weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.train.answers import Answer
from penstock.train.nets import DraftNet, EagleNet, EagleShape, MedusaNet
from penstock.train.settings import TrainSettings
from penstock.train.target import Target

MASK_TOKEN = 0  # stands where P-EAGLE does not know a token


def begin(target: Target, answers: Sequence[Answer], settings: TrainSettings) -> tuple[DraftNet, Tensor | None]:
    """The head, and the target's ids of the tokens that it can draft; None for all."""
    torch.manual_seed(settings.seed)
    table = target.head_table().cpu()
    if settings.method == "medusa":
        heads = MedusaNet(target.facts, settings.drafts)
        heads.begin(table)
        return heads, None
    drafted = _drafted(answers, target.facts.vocab_size, settings.draft_vocab)
    rows = table if drafted is None else table[drafted]
    shape = EagleShape.of(target.facts, 3 * target.facts.hidden_size, len(rows))
    mask = target.embeddings((MASK_TOKEN,))[0].cpu() if settings.method == "p-eagle" else None
    net = EagleNet(target.facts, shape, settings.drafts, mask)
    net.begin(rows)
    return net, drafted


def _drafted(answers: Sequence[Answer], vocab: int, most: int) -> Tensor | None:
    """The tokens that answers have most often, rising; None where that is all there are."""
    if most >= vocab:
        return None
    counts = Counter(token for answer in answers for token in answer.answer)
    often = sorted(range(vocab), key=lambda token: (-counts[token], token))[:most]
    return torch.tensor(sorted(often))
