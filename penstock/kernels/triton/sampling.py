"""The sampling op on the device: settings of rows in one table a step, tokens that may stay there for the next step.

Bans (allowed tokens, bad words, stops before min_tokens) join the grammar's masks on the host; counts for penalties and
biases lie on the device. Rows that have chains of samplers are drawn on the host, which their steps wait for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from penstock.kernels.copies import AsyncCopy, upload
from penstock.kernels.cpu import native
from penstock.kernels.cpu.native import NativeSampling
from penstock.kernels.reference.sampling import ReferenceSampling
from penstock.kernels.registry import KernelContext
from penstock.kernels.sampling import (
    MASS_SLACK,
    NOT_FINITE,
    LogprobTable,
    RowSettings,
    SamplingKernel,
    first_places,
)
from penstock.kernels.triton import sampling_kernels as kernels
from penstock.kernels.triton.packing import HOME

_LEAST_TEMPERATURE = 1e-30
_ROWS = 64  # sampled at once, so that scratch memory stays small
_BLOCK = 1024
Words = npt.NDArray[np.uint32]


def refuse(_: KernelContext) -> str | None:
    return None


def sampling() -> DeviceSampling:
    """A new sampling op."""
    return DeviceSampling()


@dataclass(slots=True, eq=False)
class DeviceRow:
    """A sequence.

    Attributes:
        generated: its tokens that are known here.
        drawn: how many were generated, those still on the device included.
        fields: its row of the kernels' table, but for position and mask.
        static: words of what allowed_ids and bad words of one token leave; None for all.
        held: counts and biases on the device, whose addresses are in `fields`.
        before: what it was drawn in last, until that is taken.
        chained: of a row with a chain of samplers, its row of the kernel on the host, which draws its tokens there.
    """

    settings: RowSettings
    fields: npt.NDArray[np.int64]
    static: Words | None
    held: tuple[Tensor | None, Tensor | None]
    generated: list[int] = field(default_factory=list)
    drawn: int = 0
    before: Drawn | None = None
    chained: Any = None

    @property
    def state(self) -> tuple[float, ...]:
        return () if self.chained is None else tuple(self.chained.state)

    def extend(self, token: int) -> None:
        if not 0 <= token < self.settings.vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {self.settings.vocab_size}.")
        self.generated.append(token)
        self.drawn += 1
        if self.chained is not None:
            self.chained.extend(token)
        if self.held[0] is not None:
            self.held[0][token] += 2

    def bans(self, ahead: Sequence[int] = ()) -> Words | None:
        """Words of what is allowed at this step, behind the tokens `ahead`, the grammar apart; None where all is."""
        s = self.settings
        if not s.bad_words and self.drawn + len(ahead) >= s.min_tokens:
            return self.static
        if self.before is not None and any(len(word) > 1 for word in s.bad_words):
            self.before.take()  # the bad words of a next token depend on the last tokens
        longest = max((len(word) for word in s.bad_words), default=1)
        said = [*self.generated[-longest:], *ahead]
        words = [word[-1] for word in s.bad_words if len(word) > 1 and said[1 - len(word) :] == list(word[:-1])]
        stops = s.stop_ids if self.drawn + len(ahead) < s.min_tokens else ()
        if not words and not stops:
            return self.static
        allowed = _every(s.vocab_size) if self.static is None else self.static.copy()
        return _without(allowed, (*words, *stops))


@dataclass(slots=True, eq=False)
class Drawn:
    """Tokens that were drawn and may not be on the host yet.

    Attributes:
        tokens: [L] int64 on the device, -1 where there is an error, and behind a draft that was not drawn.
        last: [R] int64 on the device, each row's last token, -1 for none; the tokens where each row has one place.
        copies: of the tokens and of the codes of ROW_ERRORS [L] uint8.
        rows: by place.
        followers: rows that take the tokens of some places too.
    """

    tokens: Tensor
    last: Tensor
    copies: AsyncCopy
    rows: tuple[DeviceRow, ...]
    followers: list[tuple[DeviceRow, range]] = field(default_factory=list)
    _counted: bool = False

    def follow(self, row: DeviceRow, places: range) -> None:
        """Before the tokens are taken: another row, which drew nothing, takes those of some places as generated."""
        counts = row.held[0]
        if row.chained is not None:
            for token in self.tokens[places.start : places.stop].tolist():
                if token >= 0:
                    row.chained.extend(token)
        if counts is not None:
            tokens = self.tokens[places.start : places.stop]
            counts.index_add_(0, tokens.clamp(min=0), (tokens >= 0).to(counts.dtype) * 2)
        row.drawn += len(places)
        row.before = self
        self.followers.append((row, places))

    def take(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Waits for the tokens and codes; the rows take the tokens as generated."""
        tokens, errors = (part.numpy() for part in self.copies.wait())
        if not self._counted:
            self._counted = True
            given = tokens.tolist()
            following = ((row, given[place]) for row, places in self.followers for place in places)
            for row, token in (*zip(self.rows, given, strict=True), *following):
                row.before = None if row.before is self else row.before
                if token >= 0:
                    row.generated.append(token)
                else:
                    row.drawn -= 1
        return tokens, errors


@dataclass(frozen=True, slots=True)
class Scored:
    """The arrays of a LogprobTable on their way to the host, in parts of rows."""

    parts: tuple[AsyncCopy, ...]

    def take(self) -> LogprobTable:
        """Waits for them."""
        found = [part.wait() for part in self.parts]
        return LogprobTable(*(np.concatenate([arrays[i].numpy() for arrays in found]) for i in range(5)))


def _every(vocab: int) -> Words:
    return np.full(-(-vocab // 32), 0xFFFFFFFF, np.uint32)


def _without(words: Words, tokens: Sequence[int]) -> Words:
    ids = np.asarray(tokens, np.int64)
    np.bitwise_and.at(words, ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
    return words


def _static(s: RowSettings) -> Words | None:
    single = [word[0] for word in s.bad_words if len(word) == 1]
    if s.allowed_ids is None and not single:
        return None
    words = _every(s.vocab_size)
    if s.allowed_ids is not None:
        ids = np.asarray(s.allowed_ids, np.int64)
        words = np.zeros_like(words)
        np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return _without(words, single)


def _bound(s: RowSettings) -> float:
    """Scaled distance from the largest logit beyond which no token can be kept, whatever the others are."""
    if s.top_k > 0 or s.typical_p < 1.0:
        return -math.inf
    if s.top_p < 1.0:  # all weights below together have less than 1 - top_p of the mass, which is at least 1
        return math.log(max(1.0 - s.top_p, 1e-300) / s.vocab_size) - 1e-6
    return math.log(s.min_p) if s.min_p > 0.0 else -math.inf


def _fields(s: RowSettings, counts: Tensor | None, bias: Tensor | None) -> npt.NDArray[np.int64]:
    fields = np.zeros(kernels.FIELDS.value, np.int64)
    floats = fields.view(np.float64)
    floats[:8] = (
        0.0 if s.temperature == 0.0 else 1.0 / max(s.temperature, _LEAST_TEMPERATURE),
        s.top_p - MASS_SLACK if s.top_p < 1.0 else 2.0,
        s.typical_p - MASS_SLACK if s.typical_p < 1.0 else 2.0,
        math.log(s.min_p) if s.min_p > 0.0 else -math.inf,
        _bound(s),
        s.repetition_penalty,
        s.presence_penalty,
        s.frequency_penalty,
    )
    filtered = s.top_k > 0 or s.top_p < 1.0 or s.typical_p < 1.0 or s.min_p > 0.0
    seed = np.array(s.seed & (2**64 - 1), np.uint64).astype(np.int64)
    addresses = (0 if held is None else held.data_ptr() for held in (counts, bias))
    fields[8:] = (seed, s.sequence, 0, s.top_k, *addresses, -1, filtered, 0, 0)
    return fields


def _counts(s: RowSettings) -> Tensor | None:
    """2 · how often each token was generated, plus one if a penalty looks at it in the prompt."""
    if (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) == (1.0, 0.0, 0.0):
        return None
    counts = 2 * np.bincount(np.asarray(s.generated_ids, np.int64), minlength=s.vocab_size).astype(np.int32)
    if s.repetition_penalty != 1.0:
        counts[list(s.prompt_ids)] += 1
    return upload(counts, torch.device(HOME))


def _bias(s: RowSettings) -> Tensor | None:
    if not s.logit_bias:
        return None
    bias = np.zeros(s.vocab_size)
    for token, value in s.logit_bias:
        bias[token] += value
    return upload(bias, torch.device(HOME))


class DeviceSampling:
    """The sampling op in Triton; see `kernels.sampling.SamplingKernel`. Logits stay where they are."""

    on_device = True

    def row(self, settings: RowSettings) -> DeviceRow:
        """A row whose counts and biases, if it has any, lie on the device."""
        for token in (*settings.named_ids(), *settings.generated_ids):
            if not 0 <= token < settings.vocab_size:
                raise ValueError(f"token id {token} is outside the vocabulary of {settings.vocab_size}.")
        counts, bias = _counts(settings), _bias(settings)
        fields, generated = _fields(settings, counts, bias), list(settings.generated_ids)
        row = DeviceRow(settings, fields, _static(settings), (counts, bias), generated, len(generated))
        if settings.chain:
            row.chained = _on_host().row(settings)
        return row

    def sample(
        self, logits: Tensor, rows: Sequence[DeviceRow], positions: npt.NDArray[np.int64], masks: Words | None = None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """As in SamplingKernel."""
        return self.draw(logits, rows, positions, masks).take()

    def draw(
        self, logits: Tensor, rows: Sequence[DeviceRow], positions: npt.NDArray[np.int64], masks: Words | None = None
    ) -> Drawn:
        """As `sample`, without waiting for the tokens; arguments are those of SamplingKernel.

        Draws of a row are to be taken in order. Only rows with bad words of several tokens wait for the draw before.
        """
        if not len(logits) == len(rows) == len(positions) or (masks is not None and len(masks) != len(rows)):
            raise ValueError("logits, rows, positions and masks differ in length.")
        if len({id(row) for row in rows}) != len(rows):
            raise ValueError("a row appears more than once in one call.")
        tokens, errors = _drawn_at(logits, rows, positions, masks)
        one = np.arange(len(rows) + 1)
        _draw_on_host(_Places(logits, rows, [()] * len(rows), one, positions, masks), tokens, errors)
        return _noted(Drawn(tokens, tokens, AsyncCopy(tokens, errors), tuple(rows)))

    def verify(
        self,
        logits: Tensor,
        rows: Sequence[DeviceRow],
        drafts: Sequence[tuple[int, ...]],
        positions: npt.NDArray[np.int64],
        masks: Words | None = None,
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """As in SamplingKernel."""
        return self.draw_drafted(logits, rows, drafts, positions, masks).take()

    def draw_drafted(
        self,
        logits: Tensor,
        rows: Sequence[DeviceRow],
        drafts: Sequence[tuple[int, ...]],
        positions: npt.NDArray[np.int64],
        masks: Words | None = None,
    ) -> Drawn:
        """As `verify`, without waiting for the tokens; rows that have drafts are to be taken before they draw again.

        All places are drawn at once, each as if the drafts before it were accepted; then what is behind the first
        other token is struck out.
        """
        starts = first_places(drafts)
        if not len(rows) == len(positions) == len(drafts) or len(logits) != starts[-1]:
            raise ValueError("logits, rows, drafts and positions differ in length.")
        if masks is not None and len(masks) != len(logits):
            raise ValueError("logits and masks differ in length.")
        if len({id(row) for row in rows}) != len(rows):
            raise ValueError("a row appears more than once in one call.")
        device, count = logits.device, len(rows)
        counts = [0 if row.held[0] is None else row.held[0].data_ptr() for row in rows]
        expected = [token for tokens in drafts for token in (*tokens, -1)]
        facts = upload(np.array([*starts, *counts, *expected], np.int64), device)
        begins, held, following = facts.split((count + 1, count, len(expected)))
        lengths = [len(tokens) + 1 for tokens in drafts]
        inner = np.array([i for length in lengths for i in range(length)], np.int64)
        addresses = [
            following.data_ptr() + 8 * start if tokens else 0 for start, tokens in zip(starts, drafts, strict=False)
        ]
        ahead = _Ahead(
            [tokens[:i] for tokens in drafts for i in range(len(tokens) + 1)],
            np.array(addresses, np.int64).repeat(lengths),
        )
        by_place = tuple(row for row, length in zip(rows, lengths, strict=True) for _ in range(length))
        tokens, errors = _drawn_at(logits, by_place, positions.repeat(lengths) + inner, masks, ahead)
        _draw_on_host(_Places(logits, rows, drafts, np.array(starts), positions, masks), tokens, errors)
        last = torch.empty(count, dtype=torch.int64, device=device)
        kernels.accept[count,](begins, held, following, tokens, errors, last)
        return _noted(Drawn(tokens, last, AsyncCopy(tokens, errors), by_place))

    def logprobs(self, logits: Tensor, targets: npt.NDArray[np.int64], top: int) -> LogprobTable:
        """As in SamplingKernel."""
        count, vocab = logits.shape
        if len(targets) != count or top > vocab or (count and not 0 <= targets.min() <= targets.max() < vocab):
            raise ValueError("a target is outside the vocabulary, or lengths differ.")
        if not count:
            none = np.zeros(0)
            return LogprobTable(
                none, none.astype(np.int64), np.zeros((0, top), np.int32), np.zeros((0, top)), none.astype(np.uint8)
            )
        return self.score(logits, upload(targets, logits.device), top).take()

    def score(self, logits: Tensor, targets: Tensor, top: int) -> Scored:
        """As `logprobs`, without waiting for them.

        Args:
            logits: [L, V], L at least 1.
            targets: [L] int64 on their device, inside the vocabulary.
            top: alternatives of each row.
        """
        parts = (slice(begin, begin + _ROWS) for begin in range(0, len(logits), _ROWS))
        return Scored(tuple(AsyncCopy(*_scored(logits[part].float(), targets[part], top)) for part in parts))


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Drafts that places are behind.

    Attributes:
        tokens: by place, those that are taken as generated before it.
        addresses: [L] int64, by place, where all drafts of its row lie on the device; 0 for none.
    """

    tokens: Sequence[tuple[int, ...]]
    addresses: npt.NDArray[np.int64]

    def part(self, places: slice) -> _Ahead:
        return _Ahead(self.tokens[places], self.addresses[places])


@dataclass(frozen=True, slots=True)
class _Places:
    """What is drawn in a call, by row: arguments of SamplingKernel.verify, and where each row's places begin."""

    logits: Tensor
    rows: Sequence[DeviceRow]
    drafts: Sequence[tuple[int, ...]]
    starts: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    masks: Words | None


def _draw_on_host(places: _Places, tokens: Tensor, errors: Tensor) -> None:
    """Draws those rows that have chains of samplers, in the place of what was drawn of them; waits for their logits."""
    for index, row in enumerate(places.rows):
        if row.chained is None:
            continue
        here = slice(int(places.starts[index]), int(places.starts[index + 1]))
        found, codes = _on_host().verify(
            np.ascontiguousarray(places.logits[here].float().cpu().numpy()),
            [row.chained],
            [places.drafts[index]],
            places.positions[index : index + 1],
            None if places.masks is None else np.ascontiguousarray(places.masks[here]),
        )
        tokens[here] = upload(found, tokens.device)
        errors[here] = upload(codes, errors.device)


def _on_host() -> SamplingKernel:
    """What draws rows that have chains."""
    return NativeSampling() if native.available() else ReferenceSampling()


def _noted(drawn: Drawn) -> Drawn:
    """A draw of which its rows are told."""
    for row in drawn.rows:
        row.drawn += 1
        row.before = drawn
    return drawn


def _drawn_at(
    logits: Tensor,
    rows: Sequence[DeviceRow],
    positions: npt.NDArray[np.int64],
    masks: Words | None,
    ahead: _Ahead | None = None,
) -> tuple[Tensor, Tensor]:
    """A token and a code for each place, some places at a time; rows and positions by place."""
    count, device = len(rows), logits.device
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    errors = torch.empty(count, dtype=torch.uint8, device=device)
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    for begin in range(0, count, _ROWS):
        part = slice(begin, begin + _ROWS)
        table, words = _table(
            rows[part],
            positions[part],
            None if masks is None else masks[part],
            None if ahead is None else ahead.part(part),
        )
        _sample(logits[part], table, words, tokens[part], errors[part])
    return tokens, errors


def _masks(
    rows: Sequence[DeviceRow], masks: Words | None, ahead: _Ahead | None
) -> tuple[Words | None, npt.NDArray[np.int64]]:
    """The words of places where not everything may be drawn, and which of them each place has, -1 for none."""
    which = np.full(len(rows), -1, np.int64)
    found: list[Words] = []
    for at, row in enumerate(rows):
        bans = row.bans() if ahead is None else row.bans(ahead.tokens[at])
        if masks is not None:
            bans = masks[at] if bans is None else bans & masks[at]
        if bans is not None:
            which[at] = len(found)
            found.append(bans)
    return (np.stack(found) if found else None), which


def _table(
    rows: Sequence[DeviceRow], positions: npt.NDArray[np.int64], masks: Words | None, ahead: _Ahead | None
) -> tuple[npt.NDArray[np.int64], Words | None]:
    """The kernels' settings of places, and the masks that they name."""
    words, which = _masks(rows, masks, ahead)
    table = np.stack([row.fields for row in rows])
    table[:, kernels.POSITION.value], table[:, kernels.MASK.value] = positions, which
    if ahead is not None:
        table[:, kernels.DRAFTS.value] = ahead.addresses
        table[:, kernels.AHEAD.value] = [len(tokens) for tokens in ahead.tokens]
    return table, words


def _sample(logits: Tensor, table: npt.NDArray[np.int64], words: Words | None, tokens: Tensor, errors: Tensor) -> None:
    """Launches the chain for up to _ROWS places."""
    (count, vocab), device = logits.shape, logits.device
    ints = upload(table, device)
    floats, chunks = ints.view(torch.float64), triton.cdiv(vocab, kernels.CHUNK.value)
    space = triton.next_power_of_2(chunks)
    allowed = ints if words is None else upload(words.view(np.int32), device)
    changed = torch.empty(count, vocab, device=device)
    largest = torch.empty(count, chunks, device=device)
    firsts = torch.empty_like(largest, dtype=torch.int32)  # each by itself, and so aligned: for one kernel
    wrong, numbers = torch.empty_like(firsts), torch.empty_like(firsts)
    kernels.prepare[count, chunks](
        logits, ints, floats, allowed, changed, largest, firsts, wrong, vocab, logits.stride(0), allowed.shape[1],
        chunks, words is not None,
    )  # fmt: skip
    sums = floats
    winners = keys = ints
    if (table.view(np.float64)[:, kernels.SCALE.value] > 0).any():
        sums, cuts = (torch.empty(size, dtype=torch.float64, device=device) for size in ((count, chunks), (count,)))
        winners = torch.empty_like(sums, dtype=torch.int64)
        kernels.weigh[count, chunks](changed, ints, floats, largest, sums, numbers, winners, cuts, vocab, chunks, space)
        if table[:, kernels.FILTERED.value].any():
            keys = torch.empty(count, vocab, dtype=torch.int64, device=device)
            kernels.gather[count, chunks](changed, ints, floats, largest, numbers, cuts, keys, vocab, chunks, space)
    kernels.choose[count,](
        ints, floats, largest, firsts, wrong, sums, numbers, winners, keys, tokens, errors, vocab, chunks, space,
        _BLOCK,
    )  # fmt: skip


def _mass(logits: Tensor, largest: Tensor) -> Tensor:
    """Σ exp(logit - largest) of rows, [L, 1] float64; torch's sums would depend on how many rows there are."""
    count, vocab = logits.shape
    chunks = triton.cdiv(vocab, kernels.CHUNK.value)
    logits = logits.contiguous()
    sums = torch.empty(count, chunks, dtype=torch.float64, device=logits.device)
    found = torch.empty(count, 1, dtype=torch.float64, device=logits.device)
    kernels.mass[count, chunks](logits, largest, sums, vocab, chunks)
    kernels.total[count,](sums, found, chunks, triton.next_power_of_2(chunks))
    return found


def _scored(logits: Tensor, targets: Tensor, top: int) -> tuple[Tensor, ...]:
    """The arrays of a LogprobTable."""
    target = targets.unsqueeze(1)
    most = logits.amax(dim=1, keepdim=True)
    failed = ~(logits < math.inf).all(dim=1) | (most.squeeze(1) == -math.inf)
    shifted = logits.double() - most.double()
    logarithm = _mass(logits, most).log()
    own = logits.gather(1, target)
    lower = torch.arange(logits.shape[1], device=logits.device) < target
    ranks = 1 + (logits > own).sum(dim=1) + ((logits == own) & lower).sum(dim=1)
    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    ids = torch.arange(logits.shape[1], device=logits.device)
    best = (order + (0x7FFFFFFF - ids)).topk(top, dim=1).indices
    scores = shifted - logarithm
    chosen, codes = scores.gather(1, target).squeeze(1).masked_fill(failed, 0.0), torch.where(failed, NOT_FINITE, 0)
    return chosen, ranks, best.int(), scores.gather(1, best), codes.to(torch.uint8)
