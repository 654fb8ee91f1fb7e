"""Turns logits into tokens: one record a row, updated by one token a step, and one kernel call for the whole batch.

Every draw is a pure function of the row's logits, its parameters and tokens, and (seed, branch, position): batch mates,
preemption and restarts do not change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.core.protocol import NewRow, TokenLogprobs
from penstock.kernels.sampling import ROW_ERRORS, LogprobTable, RowSettings, SamplingKernel


class Draw(NamedTuple):
    """One token to sample.

    Attributes:
        row: the row, known from add_row.
        position: absolute position the new token will have (0 is the first prompt token).
    """

    row: int
    position: int


@dataclass(frozen=True, slots=True)
class RowSample:
    """What one draw gave: a token, or -1 and a sentence in `error`."""

    token: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


@dataclass(slots=True)
class _Row:
    kernel_row: Any
    logprobs: int | None


def row_settings(new: NewRow, vocab_size: int) -> RowSettings:
    """The kernel's view of a row. Ids beyond the model's vocabulary are left out: nothing can sample them."""
    params = new.sampling

    def known(tokens: Iterable[int]) -> tuple[int, ...]:
        return tuple(token for token in tokens if 0 <= token < vocab_size)

    return RowSettings(
        vocab_size=vocab_size,
        seed=new.seed & (2**64 - 1),
        branch=new.branch,
        temperature=float(params.temperature),
        top_k=max(params.top_k, 0),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        typical_p=float(params.typical_p),
        repetition_penalty=float(params.repetition_penalty),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        min_tokens=params.min_tokens,
        logit_bias=tuple((token, float(bias)) for token, bias in params.logit_bias if token < vocab_size),
        allowed_ids=None if params.allowed_token_ids is None else known(params.allowed_token_ids),
        bad_words=tuple(word for word in params.bad_words_ids if known(word) == word),
        stop_ids=known(new.stop_ids),
        prompt_ids=known(new.prompt_ids) if params.repetition_penalty != 1.0 else (),
        generated_ids=known(new.generated_ids),
    )


class Sampler:
    """The sampling state of all rows of a batch.

    Args:
        vocab_size: columns of the logits.
        max_rows: rows are numbered below this.
        kernel: how to sample.
    """

    def __init__(self, vocab_size: int, max_rows: int, kernel: SamplingKernel) -> None:
        self.vocab_size = vocab_size
        self._kernel = kernel
        self._rows: list[_Row | None] = [None] * max_rows

    def add_row(self, new: NewRow) -> None:
        """Takes a branch into the batch; one that was preempted brings the tokens it had generated."""
        self._rows[new.row] = _Row(self._kernel.row(row_settings(new, self.vocab_size)), new.sampling.logprobs)

    def release_row(self, row: int) -> None:
        """Forgets a row; releasing a free row does nothing."""
        self._rows[row] = None

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Takes tokens of a row that are known without having been sampled here (forced by a grammar)."""
        kernel_row = self._row(row).kernel_row
        for token in tokens:
            kernel_row.extend(token)

    def sample(
        self, logits: Tensor, draws: Sequence[Draw], masks: npt.NDArray[np.uint32] | None = None
    ) -> list[RowSample]:
        """Samples one token for each draw; the row then counts it as generated.

        Args:
            logits: [L, V] float32, one row a draw, the model's own (not modified).
            draws: L draws of different rows.
            masks: [L, ceil(V / 32)] grammar masks, bit t % 32 of word t // 32 allows token t; None allows all.

        Raises:
            ValueError: shapes do not agree, or a row appears twice.
        """
        if logits.shape != (len(draws), self.vocab_size):
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} for {len(draws)} draws over {self.vocab_size} tokens"
            )
        if not draws:
            return []
        values = self._as_taken(logits)
        rows = [self._row(draw.row) for draw in draws]
        positions = np.array([draw.position for draw in draws], np.int64)
        tokens, failed = self._kernel.sample(values, [row.kernel_row for row in rows], positions, masks)
        errors = failed.tolist()
        wanted = [i for i, row in enumerate(rows) if row.logprobs is not None and not errors[i]]
        scored = self._score_chosen(values, tokens, rows, wanted)
        return [
            RowSample(token, scored.get(i), ROW_ERRORS[error] if error else None)
            for i, (token, error) in enumerate(zip(tokens.tolist(), errors, strict=True))
        ]

    def _score_chosen(
        self, values: Any, tokens: npt.NDArray[np.int64], rows: list[_Row], wanted: list[int]
    ) -> dict[int, TokenLogprobs]:
        if not wanted:
            return {}
        tops = [rows[i].logprobs or 0 for i in wanted]
        chosen = values if len(wanted) == len(values) else values[wanted]
        table = self._kernel.logprobs(chosen, tokens[wanted], min(max(tops), self.vocab_size))
        return {i: _entry(table, at, int(tokens[i]), tops[at]) for at, i in enumerate(wanted)}

    def prompt_logprobs(self, logits: Tensor, target_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
        """Log-probabilities of known next tokens.

        Args:
            logits: [L, V] float32, at the positions before the targets.
            target_ids: L token ids.
            top: alternatives reported with each.

        Returns:
            L entries; where logits are not finite or the target is beyond the vocabulary, logprob is -inf.
        """
        if logits.shape != (len(target_ids), self.vocab_size):
            raise ValueError(f"logits of shape {tuple(logits.shape)} for {len(target_ids)} targets")
        if not target_ids:
            return []
        targets = np.asarray(target_ids, np.int64)
        inside = (targets >= 0) & (targets < self.vocab_size)
        table = self._kernel.logprobs(self._as_taken(logits), np.where(inside, targets, 0), min(top, self.vocab_size))
        return [
            _entry(table, at, int(token), top)
            if inside[at] and not table.errors[at]
            else TokenLogprobs(int(token), -float("inf"), self.vocab_size)
            for at, token in enumerate(targets)
        ]

    def _as_taken(self, logits: Tensor) -> Any:
        """Logits as the kernel takes them."""
        return logits if self._kernel.on_device else logits.to("cpu", torch.float32).contiguous().numpy()

    def _row(self, row: int) -> _Row:
        found = self._rows[row]
        if found is None:
            raise ValueError(f"row {row} is not in the batch")
        return found


def _entry(table: LogprobTable, at: int, token: int, top: int) -> TokenLogprobs:
    ids, scores = table.top_ids[at, :top].tolist(), table.top_logprobs[at, :top].tolist()
    return TokenLogprobs(token, float(table.logprobs[at]), int(table.ranks[at]), tuple(zip(ids, scores, strict=True)))
