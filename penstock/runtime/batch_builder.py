"""Builds the ragged batch of a step from its plan, with work proportional to the step's tokens, not to contexts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.config.adapters import MOST_ADAPTERS
from penstock.core.protocol import NewSequence, ScheduledTokens
from penstock.layers.batch import Batch, GroupTables, Injection, MaskKind
from penstock.runtime.places import place_of

if TYPE_CHECKING:
    import torch

Numbers = npt.NDArray[np.int64]


class PlacesOfSlots:
    """Positions of tokens on several axes, for slots that have media among them.

    A medium's placeholders have positions of their own; text counts on, on all axes alike, from the largest of them.
    """

    def __init__(self, max_rows: int, axes: int) -> None:
        self._axes = axes
        self._prompts: dict[int, Numbers] = {}  # [P, tokens of the prompt], for slots that have media
        self._ahead = np.zeros(max_rows, np.int64)  # positions of generated tokens less their numbers

    def set(self, slot: int, places: Numbers | None) -> None:
        """A slot starts; None where positions count tokens."""
        self._prompts.pop(slot, None)
        self._ahead[slot] = 0
        if places is not None:
            self._prompts[slot] = places
            self._ahead[slot] = int(places.max()) + 1 - places.shape[1]

    def of(self, slots: Numbers, tokens: Numbers) -> Numbers:
        """[P, T] positions of each slot's token of that number."""
        found = np.tile(tokens + self._ahead[slots], (self._axes, 1))
        for slot in self._prompts.keys() & set(np.unique(slots).tolist()) if self._prompts else ():
            prompt = self._prompts[slot]
            inside = np.flatnonzero((slots == slot) & (tokens < prompt.shape[1]))
            found[:, inside] = prompt[:, tokens[inside]]
        return found


class SpanColumns(NamedTuple):
    """The spans of a step, each field [R] int64."""

    slots: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    prompt_tokens: npt.NDArray[np.int64]
    draft_tokens: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchTraits:
    """What a model wants to be told of a step, besides tokens and blocks.

    Attributes:
        mask: of all rows.
        types: token types of the model, of which a pair's second text has the second.
        axes: of positions.
        cross: cache groups that hold an encoder's output.
    """

    mask: MaskKind = MaskKind.CAUSAL
    types: int = 0
    axes: int = 1
    cross: tuple[int, ...] = ()


PLAIN = BatchTraits()


class BatchBuilder:
    """Keeps the block tables of every request slot, its adapters and the last token it sampled.

    A recurrent state lies at the number of its request slot, so none is handed out; the places behind those of the
    slots are free for checkpoints.

    Attributes:
        tables: per group [max_rows, max_blocks] int32, block ids by row and logical block.
        used: per group [max_rows] int64, how many entries of a row's table there are.
        block_size: tokens in a block.
        device: of the batches; None for arrays.
        place: where that is.
    """

    def __init__(
        self,
        num_groups: int,
        max_rows: int,
        max_blocks: int,
        block_size: int,
        device: torch.device | None,
        traits: BatchTraits = PLAIN,
    ) -> None:
        self._mask = traits.mask
        self._second: npt.NDArray[np.int64] | None = np.zeros(max_rows, np.int64) if traits.types else None
        self._one_type = traits.types == 1
        self._encoded = {group: np.zeros(max_rows, np.int64) for group in traits.cross}
        self._places = PlacesOfSlots(max_rows, traits.axes) if traits.axes > 1 else None
        self.block_size = block_size
        self.device = device
        self.place = place_of(device)
        self._tensor = self.place.put
        self.tables = [np.zeros((max_rows, max_blocks), np.int32) for _ in range(num_groups)]
        self.used = [np.zeros(max_rows, np.int64) for _ in range(num_groups)]
        self._seen = [[0] * max_rows for _ in range(num_groups)]  # leading entries that `changes` has returned
        self._adapters = np.zeros((max_rows, MOST_ADAPTERS), np.int64)
        self._weights = np.zeros((max_rows, MOST_ADAPTERS), np.float32)
        self._firsts = np.zeros((max_rows, MOST_ADAPTERS), np.int64)  # tokens from which they count
        self._last = [0] * max_rows
        self._samples: torch.Tensor | None = None  # as `_last`, where samples stay on the device; then a 0
        self._counts: npt.NDArray[np.int32] = np.arange(max_rows + 1, dtype=np.int32)

    @property
    def plain(self) -> bool:
        """Whether tokens, positions and blocks are all that a batch without adapters and media tells."""
        told = self._second is None and self._places is None and not self._encoded
        return told and self._mask is MaskKind.CAUSAL

    def add_row(self, new: NewSequence, places: Numbers | None = None) -> None:
        """Starts a slot's tables with the blocks it was admitted with.

        `places`: positions [P, tokens of the prompt] where media have their own, None where they count tokens.
        """
        if self._places is not None:
            self._places.set(new.slot, places)
        for encoded in self._encoded.values():
            encoded[new.slot] = 0 if new.encoder is None else new.encoder.length
        self._adapters[new.slot] = 0
        for place, (slot, use) in enumerate(new.adapters):
            self._adapters[new.slot, place], self._weights[new.slot, place] = slot, use.weight
            self._firsts[new.slot, place] = use.first
        if self._second is not None and not self._one_type:
            self._second[new.slot] = new.pooling.second if new.pooling else 0
        for g, blocks in enumerate(new.blocks):
            self.tables[g][new.slot, : len(blocks)] = blocks
            self.used[g][new.slot], self._seen[g][new.slot] = len(blocks), 0

    def note_sample(self, row: int, token: int) -> None:
        """Remembers what `last_sample(slot)` stands for in later plans."""
        self._last[row] = token

    def keep_samples(self, rows: Sequence[int], tokens: torch.Tensor) -> None:
        """As `note_sample`, for tokens [L] int64 that stay on the device; those below 0 are errors, never looked up."""
        self.samples[self._tensor(np.array(rows, np.int64))] = tokens.clamp(min=0)

    @property
    def samples(self) -> torch.Tensor:
        """[max_rows + 1] int64 on the device: each slot's last sample, then a 0. Once used, samples stay there."""
        if self._samples is None:
            self._samples = self._tensor(np.zeros(len(self._last) + 1, np.int64))
        return self._samples

    def sources(self, tokens: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Each token as a place in `samples` and a number to add to it; known tokens take the place that holds 0."""
        given = np.array(tokens, np.int64)
        return np.where(given < 0, -1 - given, len(self._last)), np.maximum(given, 0)

    def columns(self, spans: Sequence[ScheduledTokens]) -> SpanColumns:
        """Enters the spans' new blocks into the tables; returns the rest of the spans as columns."""
        for span in spans:
            for group, blocks in enumerate(span.new_blocks):
                if blocks:
                    self._append_blocks(group, span.slot, blocks)
        said = [(span.slot, span.start, len(span.tokens), span.prompt_tokens, span.draft_tokens) for span in spans]
        return SpanColumns._make(np.ascontiguousarray(np.array(said, np.int64).T))

    def adapted(self, spans: Sequence[ScheduledTokens]) -> bool:
        """Whether a row among these has an adapter."""
        return any(self._adapters[span.slot, 0] for span in spans)

    def changes(self, group: int, rows: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """What entered a group's table for these slots since the last call: places in the flat table, and blocks."""
        seen = self._seen[group]
        used = self.used[group].tolist()
        table = self.tables[group]
        parts = [np.arange(seen[row], used[row]) + row * table.shape[1] for row in rows if seen[row] < used[row]]
        for row in rows:
            seen[row] = used[row]
        places = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return places, table.reshape(-1)[places]

    def build(
        self, spans: Sequence[ScheduledTokens], logit_rows: Sequence[int], injected: Injection | None = None
    ) -> Batch:
        """The batch of these spans, in their order, with what media put in the place of tokens."""
        count = len(spans)
        columns = self.columns(spans)
        rows, starts = columns.slots, columns.starts
        lens = columns.lengths
        tokens = self._tokens(spans)
        contexts = starts + lens
        if len(tokens) == count:  # one token a row
            query_start = self._counts[: count + 1]
            token_rows = rows
            positions = starts
        else:
            ends: npt.NDArray[np.int64] = lens.cumsum()
            query_start = np.zeros(count + 1, np.int32)
            query_start[1:] = ends
            token_rows = rows.repeat(lens)
            positions = np.arange(len(tokens)) + (starts - (ends - lens)).repeat(lens)
        context_lens = contexts.tolist()
        widest = -(-max(context_lens) // self.block_size)
        logical, offset = np.divmod(positions, self.block_size)
        groups = tuple(
            self._crossed(group, rows, len(tokens))
            if group in self._encoded
            else GroupTables(
                self._tensor(table[rows, :widest]),
                self._tensor(table[token_rows, logical].astype(np.int64) * self.block_size + offset),
            )
            for group, table in enumerate(self.tables)
        )
        most = int((self._adapters[rows] > 0).sum(1).max(initial=0))  # adapters of a token
        return Batch(
            token_ids=self._token_ids(tokens),
            positions=self._tensor(self.places(token_rows, positions)),
            query_start=self._tensor(query_start),
            context_len=self._tensor(contexts.astype(np.int32)),
            groups=groups,
            prompt_tokens=self._tensor(columns.prompt_tokens.astype(np.int32)),
            draft_tokens=self._tensor(columns.draft_tokens.astype(np.int32)),
            logit_rows=self._tensor(np.asarray(logit_rows, np.int64)),
            query_lens=tuple(lens.tolist()),
            context_lens=tuple(context_lens),
            state_slot=self._tensor(rows),
            state_after=None if len(tokens) == count else self._states_after(spans),
            adapter_slot=self._tensor(self._counting(token_rows, positions, most)) if most else None,
            adapter_scale=self._tensor(self._weights[token_rows, :most]) if most else None,
            masks=() if self._mask is MaskKind.CAUSAL else (self._mask,) * count,
            token_types=None if self._second is None else self._types(self._second[token_rows], positions),
            injected=injected,
        )

    def _counting(self, slots: Numbers, tokens: Numbers, most: int) -> Numbers:
        """The adapters [T, most] of each slot's token of that number, 0 for those that count later."""
        return np.where(tokens[:, None] >= self._firsts[slots, :most], self._adapters[slots, :most], 0)

    def places(self, slots: Numbers, tokens: Numbers) -> Numbers:
        """Positions [P, T] of each slot's token of that number."""
        return tokens[None] if self._places is None else self._places.of(slots, tokens)

    def _crossed(self, group: int, rows: Numbers, tokens: int) -> GroupTables:
        """Where the rows' encoder output lies; a step's tokens write nothing there."""
        lengths = self._encoded[group][rows]
        widest = max(1, -(-int(lengths.max()) // self.block_size))
        return GroupTables(
            self._tensor(self.tables[group][rows, :widest]),
            self._tensor(np.zeros(tokens, np.int64)),
            self._tensor(lengths.astype(np.int32)),
            tuple(lengths.tolist()),
        )

    def _tokens(self, spans: Sequence[ScheduledTokens]) -> list[int]:
        """All tokens; samples that are on the device stay placeholders."""
        if self._samples is not None:
            return [token for span in spans for token in span.tokens]
        last = self._last
        return [token if token >= 0 else last[-1 - token] for span in spans for token in span.tokens]

    def _token_ids(self, tokens: list[int]) -> Any:
        if self._samples is None or min(tokens) >= 0:
            return self._tensor(np.array(tokens, np.int64))
        places, known = map(self._tensor, self.sources(tokens))
        return self._samples[places].add_(known)

    def _states_after(self, spans: Sequence[ScheduledTokens]) -> Any:
        """The slot that each token's state goes to, where spans have drafts.

        States behind tokens before the last known one are in the way of nobody where that one's is to be.
        """
        if not any(span.draft_states for span in spans):
            return None
        after: list[int] = []
        for span in spans:
            places = span.draft_states or (span.slot,)
            after += (places[0],) * (len(span.tokens) - len(places))
            after += places
        return self._tensor(np.array(after, np.int64))

    def _types(self, second: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> Any:
        """1 for tokens at or behind the position where their row's second text begins, if there is one."""
        return self._tensor(((second > 0) & (positions >= second)).astype(np.int64))

    def _append_blocks(self, group: int, slot: int, blocks: tuple[int, ...]) -> None:
        used = int(self.used[group][slot])
        self.tables[group][slot, used : used + len(blocks)] = blocks
        self.used[group][slot] = used + len(blocks)
