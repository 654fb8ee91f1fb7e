"""The ragged batch of one step, as layers see it: no padding of tokens, one block table a cache group."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.kernels.adapters import TokenAdapters
    from penstock.kernels.cache import KvTensors


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Where one cache group's entries lie.

    Attributes:
        block_table: [R, B] int32, block id of each row's logical blocks (0 where dropped or unused).
        slot: [T] int64, flat cache slot (block id × block size + offset) each token of the step writes.
        context_len: [R] int32, of a group that holds an encoder's output how many entries each row attends to, all of
            them seen by each of its queries (0: it gets zeros); None where a row's entries are its own tokens.
        context_lens: context_len as Python ints.
    """

    block_table: Tensor
    slot: Tensor
    context_len: Tensor | None = None
    context_lens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Injection:
    """Hidden states of media, in the place of placeholder tokens'.

    Attributes:
        rows: [M] int64, indices into T of the placeholders, all different.
        values: [levels, M, hidden_size]: [0] replaces what the embedding gives, [n] is added to what layer n - 1 gives.
    """

    rows: Tensor
    values: Tensor


class MaskKind(Enum):
    """Which tokens of its context a row's queries see."""

    CAUSAL = "causal"  # their own position and those before it
    BIDIRECTIONAL = "bidirectional"  # every token of the row; in a sliding group, half the window on either side
    CROSS = "cross"  # the encoder's output
    SPANS = "spans"  # causal, and both ways inside marked spans


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of R rows. Row r owns tokens query_start[r] … query_start[r + 1] - 1.

    Attributes:
        token_ids: [T] int64.
        positions: [P, T] int64 absolute positions (P > 1 for multi-axis rotary, where placeholders of media have other
            positions than their places in the cache).
        query_start: [R + 1] int32.
        context_len: [R] int32, tokens of the row in the cache once this step has written its own.
        groups: one GroupTables a cache group.
        prompt_tokens, draft_tokens: [R] int32, how many leading tokens of a row's span are of kind prompt, and how many
            trailing ones are drafts; those between were generated.
        logit_rows: [L] int64, indices into T of the tokens whose logits are wanted.
        query_lens, context_lens: query_start's differences and context_len as Python ints, for planning without a read
            from the device.
        state_slot: [R] int64, each row's slot of recurrent state; None for models without.
        state_after: [T] int64, the slot that a row's recurrent state goes to after each token, as in `StateRows`; None
            where no row has drafts.
        adapter_slot: [T, A] int64, each token's adapters, 0 for none; None where no token has one.
        adapter_scale: [T, A] float32, how much each of them counts; None with adapter_slot.
        masks: one kind a row; () where all rows are causal.
        spans: [T, 2] int32, first position and end of the span each token lies in, its own and the next where in none;
            None where no row is of kind SPANS.
        token_types: [T] int64, which of a pair's texts each token belongs to; None for models that do not tell.
        injected: what media put in the place of their placeholders; None in a step without.
        plans: attention plans that outlive the step, by group; layers keep theirs here too. None for plans of its own.
    """

    token_ids: Tensor
    positions: Tensor
    query_start: Tensor
    context_len: Tensor
    groups: tuple[GroupTables, ...]
    prompt_tokens: Tensor
    draft_tokens: Tensor
    logit_rows: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    state_slot: Tensor | None = None
    state_after: Tensor | None = None
    adapter_slot: Tensor | None = None
    adapter_scale: Tensor | None = None
    masks: tuple[MaskKind, ...] = ()
    spans: Tensor | None = None
    token_types: Tensor | None = None
    injected: Injection | None = None
    plans: dict[int, Any] | None = None

    def __post_init__(self) -> None:
        if self.adapter_slot is not None:
            from penstock.kernels.adapters import check_adapters  # and torch with it

            check_adapters(self.adapter_slot, self.adapter_scale)

    @property
    def adapters(self) -> TokenAdapters | None:
        """Which adapters the tokens have; None where no token has one."""
        if self.adapter_slot is None or self.adapter_scale is None:
            return None
        from penstock.kernels.adapters import TokenAdapters  # and torch with it

        return TokenAdapters(self.adapter_slot, self.adapter_scale, self.logit_rows)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's memory.

    Attributes:
        group: index of its cache group; recurrent layers have that behind the last.
        kv: keys and values; of a recurrent layer, nothing.
        state: a recurrent layer's arrays, [slots, …] float32 each, in the order of its `CacheSpec.state`.
    """

    group: int
    kv: KvTensors
    state: tuple[Tensor, ...] = ()
