"""The sampling op: what a row asks for, and what an implementation offers. No torch here.

A row's logits pass through logit_bias, allowed_ids, the grammar's mask, bad_words and min_tokens. Then comes its chain
of samplers, if it has one, and a draw; else penalties, temperature, top_k, typical_p, top_p, min_p and a draw, which
is the chain that most requests want, made in fewer passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.config.errors import NO_TOKEN_ALLOWED
from penstock.config.samplers import Step

MASS_SLACK = 1e-12
"""A set of tokens reaches a wanted mass when it is this close below it: ties then do not depend on summation order."""

CHAIN_BOUND = 1e90
"""Samplers of a chain keep logits between this and its negative, so that their squares and cubes stay finite."""

XTC_TOKEN = 2**32 - 1
"""No token, whose random bits decide whether XTC acts at a position."""

NOT_FINITE = 1
NOTHING_ALLOWED = 2

ROW_ERRORS = {
    NOT_FINITE: "the model's logits are not finite (NaN or infinity); the weights may be damaged.",
    NOTHING_ALLOWED: NO_TOKEN_ALLOWED,
}
"""Sentences for the codes `sample` writes; 0 is no error."""


@dataclass(frozen=True, slots=True)
class RowSettings:
    """One sequence's sampling parameters and tokens; meanings as in `config.sampling.SamplingParams`.

    All token ids are below vocab_size. Equal logits rank by token id, lower first, everywhere.

    Attributes:
        seed, sequence: key of the random stream; the third part is the position of the token.
        bad_words: token sequences whose last token is banned after the others were generated.
        stop_ids: banned while fewer than min_tokens were generated.
        prompt_ids, generated_ids: the sequence's tokens so far.
        chain: samplers in the order in which they run, in the place of what stands above from temperature to
            frequency_penalty, which is neutral then.
        breaker_mask, breaker_sequences: DRY's, tokens that are sequence breakers by themselves, as `config.token_mask`
            has them, and together.
        protected_ids: XTC's.
        state: what the last sampler of a chain had learned from `generated_ids`, as `SamplingRow.state` told.
    """

    vocab_size: int
    seed: int = 0
    sequence: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    generated_ids: tuple[int, ...] = ()
    chain: tuple[Step, ...] = ()
    breaker_mask: bytes = b""
    breaker_sequences: tuple[tuple[int, ...], ...] = ()
    protected_ids: tuple[int, ...] = ()
    state: tuple[float, ...] = ()

    def named_ids(self) -> Iterator[int]:
        """All token ids that it names."""
        yield from (token for token, _ in self.logit_bias)
        for ids in (self.allowed_ids or (), self.stop_ids, self.prompt_ids, self.protected_ids):
            yield from ids
        for sequence in (*self.bad_words, *self.breaker_sequences):
            yield from sequence


def first_places(drafts: Sequence[tuple[int, ...]]) -> list[int]:
    """[R + 1]: the first place of every row with these drafts, and how many places there are."""
    return list(accumulate((len(tokens) + 1 for tokens in drafts), initial=0))


class SamplingRow(Protocol):
    """An implementation's record of one sequence.

    Attributes:
        state: what the last sampler of its chain has learned; () where none learns, and before the first draw.
    """

    state: Any

    def extend(self, token: int) -> None:
        """Takes a token that was not sampled here but is known (forced).

        Raises:
            ValueError: the token is outside the vocabulary.
        """


@dataclass(frozen=True, slots=True)
class LogprobTable:
    """Log-softmax of L rows. Where `errors` is not 0 the rest of the row means nothing.

    Attributes:
        logprobs: [L] float64, of the targets.
        ranks: [L] int64, 1 for the most probable token.
        top_ids: [L, top] int32, most probable first.
        top_logprobs: [L, top] float64.
        errors: [L] uint8, codes of ROW_ERRORS.
    """

    logprobs: npt.NDArray[np.float64]
    ranks: npt.NDArray[np.int64]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float64]
    errors: npt.NDArray[np.uint8]


class SamplingKernel(Protocol):
    """An implementation of the sampling op.

    Attributes:
        on_device: it takes logits as tensors where they lie, of any float type, instead of arrays. It then also has
            `draw`, `draw_drafted` and `score`, which are `sample`, `verify` and `logprobs` without the wait: what they
            return has `take`, which waits, and draws have the `tokens` on the device, each row's `last`, and `follow`,
            by which another row takes the tokens of some places as generated. One on the host has `drawn`, which is
            `sample` with lists of numbers for arrays, since those of a few rows take longer to make than to read.
    """

    on_device: bool

    def row(self, settings: RowSettings) -> Any:
        """A new SamplingRow, to be passed back to `sample`.

        Raises:
            ValueError: a token id is outside the vocabulary.
        """

    def sample(
        self,
        logits: Any,
        rows: Sequence[Any],
        positions: npt.NDArray[np.int64],
        masks: npt.NDArray[np.uint32] | None = None,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Runs the chain and draws one token a row, which the row takes as generated.

        Args:
            logits: [L, V] float32, contiguous; a tensor if `on_device`.
            rows: L different rows.
            positions: [L], absolute position of the token each row samples.
            masks: [L, ceil(V / 32)], bit t % 32 of word t // 32 allows token t; None allows all.

        Returns:
            tokens [L] (-1 where there is an error) and codes of ROW_ERRORS [L].

        Raises:
            ValueError: lengths do not agree, or a row appears twice.
        """

    def verify(
        self,
        logits: Any,
        rows: Sequence[Any],
        drafts: Sequence[tuple[int, ...]],
        positions: npt.NDArray[np.int64],
        masks: npt.NDArray[np.uint32] | None = None,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Draws one token a row after another, as long as each is the row's next draft: what `sample` would do in turn.

        A row with K drafts has K + 1 places, one after the other: behind its last known token and behind each draft.

        Args:
            logits: [L, V] as in `sample`, L = Σ (K + 1).
            rows: R different rows, in the order of their places.
            drafts: R tuples, () for a row that has none; a draft beyond the vocabulary is never drawn.
            positions: [R], absolute position of the first token each row draws.
            masks: [L, ceil(V / 32)] as in `sample`; None allows all.

        Returns:
            tokens [L] (-1 where there is an error, and in the places behind a draft that was not drawn) and codes of
            ROW_ERRORS [L], 0 in places that were not reached. The rows take the tokens as generated.

        Raises:
            ValueError: lengths do not agree, or a row appears twice.
        """

    def logprobs(self, logits: Any, targets: npt.NDArray[np.int64], top: int) -> LogprobTable:
        """Log-softmax of logits [L, V] at targets [L], in float64.

        Raises:
            ValueError: lengths do not agree, a target is outside the vocabulary or top exceeds it.
        """
