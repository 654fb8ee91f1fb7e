"""What is asked of a training of draft heads. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.config.errors import ConfigError, quoted

METHODS: Final = ("eagle3", "p-eagle", "medusa")
MOST_DRAFTS: Final = 16


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How a head is trained.

    Attributes:
        method: one of METHODS.
        drafts: tokens that it learns to draft one after the other; of Medusa's the heads.
        epochs: how often every answer is read.
        batch_size: answers a step.
        starts: places of an answer at which drafts are learned, in one reading.
        learning_rate: of AdamW, at its highest.
        draft_vocab: most tokens that an EAGLE-3 head can draft.
        held_out: share of the answers that measure what was learned.
        seed: of the order of answers, the places and the first weights.
    """

    method: str = "eagle3"
    drafts: int = 5
    epochs: int = 3
    batch_size: int = 4
    starts: int = 160
    learning_rate: float = 1e-3
    draft_vocab: int = 32_000
    held_out: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for what is out of range."""
        if self.method not in METHODS:
            raise ConfigError(f"--method is {quoted(self.method)}; allowed: {', '.join(METHODS)}.")
        for name, most in (("drafts", MOST_DRAFTS), ("epochs", 1000), ("batch_size", 1024), ("starts", 65536)):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}; allowed: 1 to {most}.")
        if not 0 < self.learning_rate <= 1:
            raise ConfigError(f"--learning-rate is {self.learning_rate:g}; allowed: above 0, up to 1.")
        if not 0 < self.held_out <= 0.5:
            raise ConfigError(f"--held-out is {self.held_out:g}; allowed: above 0, up to 0.5.")
        if self.draft_vocab < 1:
            raise ConfigError(f"--draft-vocab is {self.draft_vocab}; allowed: 1 or more.")
