"""The sampling chain in plain numpy, float64 probabilities, one row at a time: what every other sampler must equal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.kernels.reference.chain import draw, left_by_chain
from penstock.kernels.reference.noise import noise, scores
from penstock.kernels.sampling import (
    MASS_SLACK,
    NOT_FINITE,
    NOTHING_ALLOWED,
    LogprobTable,
    RowSettings,
    first_places,
)

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_LARGEST = float(np.finfo(np.float32).max)
_LEAST_TEMPERATURE = 1e-30


@dataclass(slots=True, eq=False)
class ReferenceRow:
    """A sequence: its settings and every token generated so far."""

    settings: RowSettings
    generated: list[int] = field(default_factory=list)
    state: tuple[float, ...] = ()

    def extend(self, token: int) -> None:
        if not 0 <= token < self.settings.vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {self.settings.vocab_size}.")
        self.generated.append(token)


def _to_logit(value: float) -> np.float32:
    """Rounds to float32; what overflows stays finite."""
    return np.float32(value if value == -math.inf else min(max(value, -_LARGEST), _LARGEST))


def bias_logits(logits: Floats, row: ReferenceRow) -> None:
    """logit_bias."""
    for token, bias in row.settings.logit_bias:
        logits[token] = _to_logit(float(logits[token]) + bias)


def keep_allowed(logits: Floats, row: ReferenceRow) -> None:
    """allowed_token_ids."""
    if row.settings.allowed_ids is not None:
        banned = np.ones(len(logits), bool)
        banned[list(row.settings.allowed_ids)] = False
        logits[banned] = -np.inf


def keep_grammatical(logits: Floats, mask: npt.NDArray[np.uint32] | None) -> None:
    """The grammar's mask of this step."""
    if mask is not None:
        bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")[: len(logits)]
        logits[bits == 0] = -np.inf


def ban_bad_words(logits: Floats, row: ReferenceRow) -> None:
    """bad_words: the last token of a sequence, once the others were generated."""
    for word in row.settings.bad_words:
        before = list(word[:-1])
        if not before or row.generated[-len(before) :] == before:
            logits[word[-1]] = -np.inf


def ban_stops(logits: Floats, row: ReferenceRow) -> None:
    """min_tokens."""
    if len(row.generated) < row.settings.min_tokens:
        logits[list(row.settings.stop_ids)] = -np.inf


def penalise(logits: Floats, row: ReferenceRow) -> None:
    """Repetition (Keskar et al. 2019, 1909.05858), frequency and presence penalties."""
    s = row.settings
    if (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) == (1.0, 0.0, 0.0):
        return
    counts = Counter(row.generated)
    seen = set(row.generated) | (set(s.prompt_ids) if s.repetition_penalty != 1.0 else set())
    for token in seen:
        value = float(logits[token])
        value = value / s.repetition_penalty if value > 0 else value * s.repetition_penalty
        if counts[token]:
            value = value - s.frequency_penalty * counts[token] - s.presence_penalty
        logits[token] = _to_logit(value)


@dataclass(slots=True)
class Candidates:
    """The tokens still possible, ascending ids, with float32 logits and x = (logit - largest) / temperature."""

    ids: Ids
    logits: Floats
    x: Doubles

    def keep(self, chosen: npt.NDArray[np.bool_] | Ids) -> None:
        self.ids = self.ids[chosen]
        self.logits = self.logits[chosen]
        self.x = self.x[chosen]

    def probabilities(self) -> Doubles:
        weights = np.exp(self.x)
        return np.asarray(weights / weights.sum())

    def keep_mass(self, order: Ids, mass: float) -> None:
        """Keeps the shortest beginning of `order` with this probability."""
        reached = np.cumsum(self.probabilities()[order]) >= mass - MASS_SLACK
        count = int(np.argmax(reached)) + 1 if reached.any() else len(order)
        self.keep(np.sort(order[:count]))


def keep_top_k(tokens: Candidates, s: RowSettings) -> None:
    """The k largest logits."""
    if s.top_k > 0:
        tokens.keep(np.sort(np.argsort(-tokens.logits, kind="stable")[: s.top_k]))


def keep_typical(tokens: Candidates, s: RowSettings) -> None:
    """The locally typical set (Meister et al. 2022, 2202.00666): surprise nearest to the entropy first."""
    if s.typical_p < 1.0:
        p = tokens.probabilities()
        surprise = math.log(float(np.exp(tokens.x).sum())) - tokens.x
        distance = np.abs(surprise - float(np.sum(np.where(p > 0, p * surprise, 0.0))))
        tokens.keep_mass(np.argsort(distance, kind="stable"), s.typical_p)


def keep_nucleus(tokens: Candidates, s: RowSettings) -> None:
    """top_p (Holtzman et al. 2019, 1904.09751)."""
    if s.top_p < 1.0:
        tokens.keep_mass(np.argsort(-tokens.logits, kind="stable"), s.top_p)


def keep_min_p(tokens: Candidates, s: RowSettings) -> None:
    """min_p (Nguyen et al. 2024, 2407.01082)."""
    if s.min_p > 0.0:
        tokens.keep(tokens.x - tokens.x.max() >= math.log(s.min_p))


FILTERS: tuple[Callable[[Candidates, RowSettings], None], ...] = (keep_top_k, keep_typical, keep_nucleus, keep_min_p)


def masked_logits(logits: Floats, row: ReferenceRow, mask: npt.NDArray[np.uint32] | None) -> Floats:
    """A copy of logits [V] after masks and penalties."""
    out = logits.copy()
    bias_logits(out, row)
    keep_allowed(out, row)
    keep_grammatical(out, mask)
    ban_bad_words(out, row)
    ban_stops(out, row)
    penalise(out, row)
    return out


def candidates(logits: Floats, settings: RowSettings) -> Candidates:
    """The tokens left by the filters; temperature is not 0."""
    ids = np.flatnonzero(logits > -np.inf)
    left = logits[ids]
    scale = 1.0 / max(settings.temperature, _LEAST_TEMPERATURE)
    tokens = Candidates(ids, left, (left.astype(np.float64) - float(left.max())) * scale)
    for keep in FILTERS:
        keep(tokens, settings)
    return tokens


def sample_row(
    logits: Floats, row: ReferenceRow, position: int, mask: npt.NDArray[np.uint32] | None = None
) -> tuple[int, int]:
    """(token, 0), or (-1, code of ROW_ERRORS)."""
    if not (logits < np.inf).all() or logits.max() == -np.inf:
        return -1, NOT_FINITE
    logits = masked_logits(logits, row, mask)
    if logits.max() == -np.inf:
        return -1, NOTHING_ALLOWED
    if row.settings.chain:
        history = [*row.settings.prompt_ids, *row.generated]
        found = left_by_chain(logits, row.settings, history, position, row.state)
        token = draw(found)
        row.state = tuple(found.state)
        return token, 0
    if row.settings.temperature == 0.0:
        return int(np.argmax(logits)), 0
    left = candidates(logits, row.settings)
    drawn = noise(row.settings.seed, row.settings.sequence, position, left.ids)
    return int(left.ids[np.argmax(scores(left.x, drawn))]), 0


def _check_different(rows: Sequence[ReferenceRow]) -> None:
    if len({id(row) for row in rows}) != len(rows):
        raise ValueError("a row appears more than once in one call.")


class ReferenceSampling:
    """The sampling op in numpy; see `kernels.sampling.SamplingKernel`."""

    on_device = False

    def row(self, settings: RowSettings) -> ReferenceRow:
        """A row that keeps all its tokens."""
        for token in settings.named_ids():
            if not 0 <= token < settings.vocab_size:
                raise ValueError(f"token id {token} is outside the vocabulary of {settings.vocab_size}.")
        row = ReferenceRow(settings, state=settings.state)
        for token in settings.generated_ids:
            row.extend(token)
        return row

    def sample(
        self,
        logits: Floats,
        rows: Sequence[ReferenceRow],
        positions: Ids,
        masks: npt.NDArray[np.uint32] | None = None,
    ) -> tuple[Ids, npt.NDArray[np.uint8]]:
        """As in SamplingKernel."""
        if not len(logits) == len(rows) == len(positions) or (masks is not None and len(masks) != len(rows)):
            raise ValueError("logits, rows, positions and masks differ in length.")
        _check_different(rows)
        tokens, errors = np.empty(len(rows), np.int64), np.empty(len(rows), np.uint8)
        for i, row in enumerate(rows):
            mask = None if masks is None else masks[i]
            tokens[i], errors[i] = sample_row(logits[i], row, int(positions[i]), mask)
            if tokens[i] >= 0:
                row.extend(int(tokens[i]))
        return tokens, errors

    def drawn(
        self,
        logits: Floats,
        rows: Sequence[ReferenceRow],
        positions: Sequence[int],
        masks: npt.NDArray[np.uint32] | None = None,
    ) -> tuple[list[int], list[int]]:
        """As `sample`, of numbers."""
        tokens, errors = self.sample(logits, rows, np.array(positions, np.int64), masks)
        return tokens.tolist(), errors.tolist()

    def verify(
        self,
        logits: Floats,
        rows: Sequence[ReferenceRow],
        drafts: Sequence[tuple[int, ...]],
        positions: Ids,
        masks: npt.NDArray[np.uint32] | None = None,
    ) -> tuple[Ids, npt.NDArray[np.uint8]]:
        """As in SamplingKernel: `sample` for one place after the other."""
        starts = first_places(drafts)
        if not len(rows) == len(positions) == len(drafts) or len(logits) != starts[-1]:
            raise ValueError("logits, rows, drafts and positions differ in length.")
        if masks is not None and len(masks) != len(logits):
            raise ValueError("logits and masks differ in length.")
        _check_different(rows)
        tokens, errors = np.full(len(logits), -1, np.int64), np.zeros(len(logits), np.uint8)
        for row, ahead, start, position in zip(rows, drafts, starts, positions, strict=False):
            for index in range(len(ahead) + 1):
                place = slice(start + index, start + index + 1)
                mask = None if masks is None else masks[place]
                found = self.sample(logits[place], [row], np.array([position + index]), mask)
                tokens[place], errors[place] = found
                if index == len(ahead) or tokens[start + index] != ahead[index]:
                    break
        return tokens, errors

    def logprobs(self, logits: Floats, targets: Ids, top: int) -> LogprobTable:
        """As in SamplingKernel."""
        count, vocab = logits.shape
        if len(targets) != count or top > vocab or (count and not 0 <= targets.min() <= targets.max() < vocab):
            raise ValueError("a target is outside the vocabulary, or lengths differ.")
        out = LogprobTable(
            np.zeros(count),
            np.zeros(count, np.int64),
            np.zeros((count, top), np.int32),
            np.zeros((count, top)),
            np.zeros(count, np.uint8),
        )
        for i, target in enumerate(targets):
            row = logits[i].astype(np.float64)
            if not (row < np.inf).all() or row.max() == -np.inf:
                out.errors[i] = NOT_FINITE
                continue
            shifted = row - row.max()
            scores = shifted - math.log(float(np.exp(shifted).sum()))
            out.logprobs[i] = scores[target]
            out.ranks[i] = 1 + np.sum(row > row[target]) + np.sum(row[:target] == row[target])
            out.top_ids[i] = np.argsort(-row, kind="stable")[:top]
            out.top_logprobs[i] = scores[out.top_ids[i]]
        return out
