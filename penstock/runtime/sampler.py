"""Turns logits into tokens: one record a row, updated by one token a step, and one kernel call for the whole batch.

Every draw is a pure function of the row's logits, its parameters and tokens, and (seed, sequence, position): batch
mates and preemption do not change it, nor do drafts, each of which is accepted while it is what is drawn. What Mirostat
and adaptive-p learned is kept with the sequence; an engine that goes on with the requests of one that died learns anew.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.config import limits
from penstock.config.samplers import LEARNING
from penstock.core.protocol import NewSequence, TokenLogprobs
from penstock.kernels.sampling import ROW_ERRORS, LogprobTable, SamplingKernel, first_places
from penstock.runtime.logits_processors import (
    NOTHING_PROCESSED,
    LogitsProcessors,
    ProcessedPlace,
    ProcessedRows,
    RowProcessors,
    exchanged,
    process,
)
from penstock.runtime.row_settings import row_settings
from penstock.runtime.scoring import Floats, Place, ScoredRow, as_logits, told

if TYPE_CHECKING:
    from torch import Tensor


class Draw(NamedTuple):
    """One token to sample, and what follows it as long as drafts are right.

    Attributes:
        slot: the request slot, known from add_row.
        position: absolute position the new token will have (0 is the first prompt token).
        drafts: what may come there and behind, with logits of its own behind each.
    """

    slot: int
    position: int
    drafts: tuple[int, ...] = ()


class Candidate(NamedTuple):
    """A continuation of one of a group of sequences.

    Attributes:
        sequence: its number in the group.
        token, logprob: what goes on, and its log-probability after that sequence.
        total: of the sequence and the token.
    """

    sequence: int
    token: int
    logprob: float
    total: float


class RowSample(NamedTuple):
    """What one draw gave.

    Attributes:
        tokens: accepted drafts and the token drawn behind them; () with an error.
        logprobs: one entry a token where the row asked, else ().
        error: a sentence where not even the first token could be drawn.
        state: what the sampler has learned with these tokens, to be given back with the sequence.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    state: tuple[float, ...] = ()


@dataclass(slots=True)
class _Row:
    kernel_row: Any
    logprobs: int | None
    learns: bool = False
    apart: ScoredRow | None = None
    processors: RowProcessors | None = None


@dataclass(slots=True)
class SamplingHandle:
    """Samples that are being drawn: a kernel on the device may still be at it.

    Attributes:
        last: [R] int64 on the device, each draw's last token, -1 where there is an error; None where the kernel samples
            on the host.
    """

    last: Tensor | None
    _starts: Sequence[int]
    _take: Callable[[], tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]]
    _scores: Callable[[Sequence[int]], Mapping[int, TokenLogprobs]]
    _states: Mapping[int, tuple[float, ...]]
    _processed: Sequence[ProcessedPlace] = ()
    _failures: Mapping[int, str] = field(default_factory=dict)

    def wait(self) -> list[RowSample]:
        """Waits for the samples, one a draw."""
        tokens, codes = self._take()
        sampled, errors = tokens.tolist(), codes.tolist()
        scores = self._scores(sampled)
        for place in self._processed:
            if sampled[place.number] >= 0:
                place.row.generated_ids.append(sampled[place.number])
        if len(self._starts) > len(sampled):  # one place a draw
            return _single(sampled, errors, scores, self._states, self._failures)
        samples: list[RowSample] = []
        for begin, end in pairwise(self._starts):
            drawn = tuple(token for token in sampled[begin:end] if token >= 0)
            places = range(begin, begin + len(drawn))
            entries = tuple(scores[i] for i in places) if begin in scores else ()
            error = None if drawn else self._failures.get(begin) or ROW_ERRORS[errors[begin]]
            samples.append(RowSample(drawn, entries, error, self._states.get(begin, ())))
        return samples


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log-probabilities of known tokens, being computed."""

    _targets: npt.NDArray[np.int64]
    _inside: npt.NDArray[np.bool_]
    _top: int
    _vocab_size: int
    _table: Callable[[], LogprobTable]

    def wait(self) -> list[TokenLogprobs]:
        """Waits for them; where logits are not finite or the token is beyond the vocabulary, logprob is -inf."""
        table = self._table()
        return [
            _entry(table, at, int(token), self._top)
            if self._inside[at] and not table.errors[at]
            else TokenLogprobs(int(token), -float("inf"), self._vocab_size)
            for at, token in enumerate(self._targets)
        ]


class Sampler:
    """The sampling state of all rows of a batch.

    Args:
        vocab_size: columns of the logits.
        max_rows: rows are numbered below this.
        kernel: how to sample.
        mode: what is told as log-probabilities, one of `config.logprobs.LOGPROBS_MODES`.
        watermark_key: of rows that bring no key of their own.
        processors: what rows may name as their logits processors; None where they are passed over, as of drafts.
    """

    def __init__(
        self,
        vocab_size: int,
        max_rows: int,
        kernel: SamplingKernel,
        mode: str = "raw_logprobs",
        watermark_key: int = limits.WATERMARK_KEY,
        processors: LogitsProcessors | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self._watermark_key = watermark_key
        self._mode = mode
        self._kernel: Any = kernel  # one on a device has more methods
        self._rows: list[_Row | None] = [None] * max_rows
        self._processors = processors
        self._processed: set[int] = set()  # rows that have any

    @property
    def on_device(self) -> bool:
        """Whether samples stay where the logits are until somebody waits for them."""
        return bool(self._kernel.on_device)

    def add_row(self, new: NewSequence) -> None:
        """Takes a sequence into the batch; one that was preempted brings the tokens it had generated."""
        if new.sampling.watermark and new.sampling.watermark_key == limits.WATERMARK_KEY:
            new = replace(new, sampling=replace(new.sampling, watermark_key=self._watermark_key))
        settings = row_settings(new, self.vocab_size)
        learns = bool(settings.chain) and settings.chain[-1].name in LEARNING
        apart = ScoredRow.of(new, settings, self._mode)
        processors = None if self._processors is None else self._processors.of(new)
        self._rows[new.slot] = _Row(self._kernel.row(settings), new.sampling.logprobs, learns, apart, processors)
        if processors is not None:
            self._processed.add(new.slot)

    def release_row(self, row: int) -> None:
        """Forgets a row; releasing a free row does nothing."""
        self._rows[row] = None
        self._processed.discard(row)

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Takes tokens of a row that are known without having been sampled here (forced by a grammar)."""
        found = self._row(row)
        for token in tokens:
            found.kernel_row.extend(token)
            if found.apart is not None:
                found.apart.extend(token)
            if found.processors is not None:
                found.processors.generated_ids.append(token)

    def begin(
        self,
        logits: Any,
        draws: Sequence[Draw],
        masks: npt.NDArray[np.uint32] | None = None,
        followers: Sequence[tuple[int, int]] = (),
    ) -> SamplingHandle:
        """Begins to sample one token for each draw, and more where drafts are right; the row counts them as generated.

        Args:
            logits: [L, V] float32, one row a draw and one a draft, the model's own (not modified).
            draws: of different rows.
            masks: [L, ceil(V / 32)] grammar masks, bit t % 32 of word t // 32 allows token t; None allows all.
            followers: slots without a draw that count one's tokens as generated too: (slot, index of the draw).

        Raises:
            ValueError: shapes do not agree, or a row appears twice.
        """
        drafts = [draw.drafts for draw in draws]
        drafted = any(drafts)
        starts = first_places(drafts) if drafted else range(len(draws) + 1)
        if logits.shape != (starts[-1], self.vocab_size):
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} for {starts[-1]} draws over {self.vocab_size} tokens"
            )
        values = self._as_taken(logits)
        rows = [self._row(draw.slot) for draw in draws]
        positions = np.array([draw.position for draw in draws], np.int64)
        kernel, kernel_rows = self._kernel, [row.kernel_row for row in rows]
        if drafted:
            rows = [row for row, tokens in zip(rows, drafts, strict=True) for _ in range(len(tokens) + 1)]
        scored = [i for i, row in enumerate(rows) if row.logprobs is not None]
        places = _places(positions, drafts, masks)
        asking, made = self._process(values, draws, starts)
        if kernel.on_device:
            with exchanged(values, made) as changed:
                drawn = (
                    kernel.draw_drafted(changed, kernel_rows, drafts, positions, masks)
                    if drafted
                    else kernel.draw(changed, kernel_rows, positions, masks)
                )
            for slot, index in followers:
                drawn.follow(self._row(slot).kernel_row, range(starts[index], starts[index + 1]))
            told = self._score(values, drawn.tokens.clamp(min=0), scored, rows, places, made) if scored else _no_scores
            return SamplingHandle(drawn.last, starts, drawn.take, told, _states(rows), asking, made.errors)
        with exchanged(values, made) as changed:
            found = (
                kernel.verify(changed, kernel_rows, drafts, positions, masks)
                if drafted
                else kernel.sample(changed, kernel_rows, positions, masks)
            )
        for slot, index in followers:
            self.extend(slot, [token for token in found[0][starts[index] : starts[index + 1]].tolist() if token >= 0])
        scored = [i for i in scored if found[0][i] >= 0]
        scores = _no_scores
        if scored:
            told_now = self._score(values, found[0], scored, rows, places, made)(found[0].tolist())
            scores = lambda sampled: told_now  # noqa: E731
        return SamplingHandle(None, starts, lambda: found, scores, _states(rows), asking, made.errors)

    def draw(
        self,
        logits: npt.NDArray[np.float32],
        slots: Sequence[int],
        positions: Sequence[int],
        masks: npt.NDArray[np.uint32] | None = None,
    ) -> list[RowSample]:
        """As `begin` for slots without drafts, and waits; on the host alone.

        Args:
            logits: [R, V], one row a slot.
            slots: all different.
            positions: [R], absolute positions the new tokens will have.
            masks: as in `begin`.
        """
        rows = [self._row(slot) for slot in slots]
        if not self._processed.isdisjoint(slots):  # the longer way, which knows of them
            return self.begin(logits, [Draw(*one) for one in zip(slots, positions, strict=True)], masks).wait()
        tokens, errors = self._kernel.drawn(logits, [row.kernel_row for row in rows], positions, masks)
        scored = [i for i, row in enumerate(rows) if row.logprobs is not None and tokens[i] >= 0]
        scores: Mapping[int, TokenLogprobs] = {}
        if scored:
            places = _places(positions, (), masks)
            scores = self._score(logits, np.array(tokens, np.int64), scored, rows, places)(tokens)
        return _single(tokens, errors, scores, _states(rows))

    def sample(
        self, logits: Any, draws: Sequence[Draw], masks: npt.NDArray[np.uint32] | None = None
    ) -> list[RowSample]:
        """As `begin`, and waits."""
        return self.begin(logits, draws, masks).wait()

    def _process(
        self, values: Any, draws: Sequence[Draw], starts: Sequence[int]
    ) -> tuple[Sequence[ProcessedPlace], ProcessedRows]:
        """Runs the processors of those rows that have any on copies of their logits."""
        if self._processed.isdisjoint(draw.slot for draw in draws):
            return (), NOTHING_PROCESSED
        places = [
            ProcessedPlace(start + ahead, row, draw.drafts[:ahead])
            for draw, start in zip(draws, starts, strict=False)
            if (row := self._row(draw.slot).processors) is not None
            for ahead in range(len(draw.drafts) + 1)
        ]
        copied = self._copied(values, [place.number for place in places])()
        return places, process(places, copied)

    def _score(
        self,
        values: Any,
        chosen: Any,
        scored: list[int],
        rows: Sequence[_Row],
        places: Callable[[int], Place],
        made: ProcessedRows = NOTHING_PROCESSED,
    ) -> Callable[[Sequence[int]], dict[int, TokenLogprobs]]:
        """Begins to compute the log-probabilities that rows `scored` ask for; they are told for the tokens drawn."""
        usual = [i for i in scored if rows[i].apart is None]
        apart = [(i, row) for i in scored if (row := rows[i].apart) is not None]
        table = self._usual_table(values, chosen, usual, rows) if usual else _no_table
        logits = self._copied(values, [i for i, _ in apart]) if apart else None

        def take(sampled: Sequence[int]) -> dict[int, TokenLogprobs]:
            found = table() if usual else None
            scores = {
                i: _entry(found, at, sampled[i], rows[i].logprobs or 0)
                for at, i in enumerate(usual)
                if found is not None and sampled[i] >= 0
            }
            copied = logits() if logits is not None else ()
            for at, (i, row) in enumerate(apart):
                if sampled[i] >= 0:
                    own = copied[at] if row.processed is None else made.rows.get(i, copied[at])
                    scores[i] = row.entry(own, sampled[i], places(i))
            return scores

        return take

    def _usual_table(
        self, values: Any, chosen: Any, scored: list[int], rows: Sequence[_Row]
    ) -> Callable[[], LogprobTable]:
        top = min(max(rows[i].logprobs or 0 for i in scored), self.vocab_size)
        if len(scored) < len(values):
            places = _there(np.array(scored), chosen) if self._kernel.on_device else scored
            values, chosen = values[places], chosen[places]
        return self._begin_table(values, chosen, top)

    def _copied(self, values: Any, places: Sequence[int]) -> Callable[[], Floats]:
        """Rows of logits on the host: [L, V] float32, once they are there."""
        if not self._kernel.on_device:
            return lambda: values[places]
        from penstock.kernels.copies import AsyncCopy

        copy = AsyncCopy(values[_there(np.array(places), values)].float())
        return lambda: copy.wait()[0].numpy()

    def _begin_table(self, values: Any, targets: Any, top: int) -> Callable[[], LogprobTable]:
        if self._kernel.on_device:
            taken: Callable[[], LogprobTable] = self._kernel.score(values, targets, top).take
            return taken
        table = self._kernel.logprobs(values, targets, top)
        return lambda: table

    def best_of_group(self, logits: Any, totals: Sequence[float], count: int) -> list[Candidate]:
        """One draw over a group of sequences: the most probable continuations of all of them together, best first.

        Of equal ones the earlier sequence's comes first, then the lower token.

        Args:
            logits: [G, V], the model's own after each sequence.
            totals: G log-probabilities of the sequences so far.
            count: how many; beams of width B take 2 · B, were B of them to end there.
        """
        if logits.shape != (len(totals), self.vocab_size):
            raise ValueError(f"logits of shape {tuple(logits.shape)} for a group of {len(totals)}")
        values, most = self._as_taken(logits), min(count, self.vocab_size)
        zeros = np.zeros(len(totals), np.int64)
        table = self._begin_table(values, _there(zeros, logits) if self._kernel.on_device else zeros, most)()
        found = [
            Candidate(index, token, logprob, total + logprob)
            for index, total in enumerate(totals)
            if not table.errors[index]
            for token, logprob in zip(table.top_ids[index].tolist(), table.top_logprobs[index].tolist(), strict=True)
        ]
        return sorted(found, key=lambda one: (-one.total, one.sequence, one.token))[:count]

    def begin_prompt_logprobs(self, logits: Any, target_ids: Sequence[int], top: int) -> PromptScores:
        """Begins to compute log-probabilities of known next tokens.

        Args:
            logits: [L, V] float32, at the positions before the targets.
            target_ids: L token ids, at least one.
            top: alternatives reported with each.
        """
        if logits.shape != (len(target_ids), self.vocab_size):
            raise ValueError(f"logits of shape {tuple(logits.shape)} for {len(target_ids)} targets")
        targets = np.asarray(target_ids, np.int64)
        inside = (targets >= 0) & (targets < self.vocab_size)
        asked = np.where(inside, targets, 0)
        chosen = _there(asked, logits) if self._kernel.on_device else asked
        values = self._as_taken(logits)
        table = self._begin_table(values, chosen, min(top, self.vocab_size))
        if self._mode.endswith("logits"):
            table = partial(as_logits, table, self._copied(values, range(len(targets))), asked)
        return PromptScores(targets, inside, top, self.vocab_size, table)

    def prompt_logprobs(self, logits: Any, target_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
        """As `begin_prompt_logprobs`, and waits: one entry a target."""
        return self.begin_prompt_logprobs(logits, target_ids, top).wait() if target_ids else []

    def _as_taken(self, logits: Any) -> Any:
        """Logits as the kernel takes them."""
        if self._kernel.on_device or isinstance(logits, np.ndarray):
            return logits
        return logits.cpu().float().contiguous().numpy()

    def _row(self, row: int) -> _Row:
        found = self._rows[row]
        if found is None:
            raise ValueError(f"row {row} is not in the batch")
        return found


def _there(array: npt.NDArray[Any], beside: Tensor) -> Tensor:
    """The array on the device of a tensor."""
    from penstock.kernels.copies import upload

    return upload(array, beside.device)


def _states(rows: Sequence[_Row]) -> dict[int, tuple[float, ...]]:
    """What rows have learned, of those that do, by place."""
    return {i: tuple(row.kernel_row.state) for i, row in enumerate(rows) if row.learns}


def _single(
    tokens: list[int],
    errors: list[int],
    scores: Mapping[int, TokenLogprobs],
    states: Mapping[int, tuple[float, ...]],
    failures: Mapping[int, str] = MappingProxyType({}),
) -> list[RowSample]:
    """The samples of draws of one token each; the others by number of the draw."""
    return [
        RowSample((token,), (scores[i],) if i in scores else (), None, states.get(i, ()))
        if token >= 0
        else RowSample(error=failures.get(i) or ROW_ERRORS[errors[i]])
        for i, token in enumerate(tokens)
    ]


def _places(
    positions: Sequence[int] | npt.NDArray[np.int64],
    drafts: Sequence[tuple[int, ...]],
    masks: npt.NDArray[np.uint32] | None,
) -> Callable[[int], Place]:
    """Where the tokens of all places are drawn, by number."""

    def place(number: int) -> Place:
        mask = None if masks is None else masks[number]
        if not any(drafts):
            return Place(int(positions[number]), mask)
        starts = first_places(drafts)
        row = bisect_right(starts, number) - 1
        return Place(int(positions[row]) + number - starts[row], mask)

    return place


def _no_table() -> LogprobTable:
    raise ValueError("no row of this draw asked for log-probabilities")


def _no_scores(sampled: Sequence[int]) -> Mapping[int, TokenLogprobs]:
    return {}


def _entry(table: LogprobTable, at: int, token: int, top: int) -> TokenLogprobs:
    value, rank = float(table.logprobs[at]), int(table.ranks[at])
    return told(token, value, rank, table.top_ids[at, :top], table.top_logprobs[at, :top])
