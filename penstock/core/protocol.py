"""The step protocol: one StepPlan of integers goes down to the runner, one StepResult comes back.

Both are made of ints, floats, strings and tuples, so that they can be encoded and cross a process or a network; what
every step makes anew is a named tuple, which takes half the time of a frozen dataclass to make. A runner keeps, per
slot, what `NewSequence` told it; every later step sends differences only.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

from penstock.config.adapters import AdapterUse
from penstock.config.media import EncoderInput, MediaSpan
from penstock.config.pooling import PoolingParams
from penstock.config.sampling import SamplingParams

NULL_BLOCK = 0  # block 0 of every group is never handed out: padding and dropped sliding blocks point at it


def last_sample(slot: int) -> int:
    """Placeholder token id for "the token slot `slot` samples in the step before this one", not yet known here."""
    return -1 - slot


def chain_length(drafts: int, parents: tuple[int, ...]) -> int:
    """How many of so many drafts form a chain from the first on: those that are verified. `parents` as in Proposal."""
    return next((index for index, parent in enumerate(parents) if parent != index - 1), drafts)


class CacheOpKind(str, Enum):
    """What a cache operation does; all run before the step's forward pass, in order."""

    COPY = "copy"  # first num_tokens slots of block source → block target, in every layer of the group
    LOAD = "load"  # from a lower tier into block target
    SAVE = "save"  # block source into a lower tier
    CANCEL = "cancel"  # `transfer` is not wanted any more: it may end without being done; 0: none is, nor told of
    FORGET = "forget"  # what lies at `place` of a lower tier is not wanted any more
    CHECKPOINT = (
        "checkpoint"  # recurrent state in state slot source, which is the request slot's number, into state slot target
    )


@dataclass(frozen=True, slots=True)
class CacheOp:
    """One cache operation on blocks of one group.

    Attributes:
        kind, group: what, and in which cache group; recurrent states count as one behind all groups of blocks.
        source, target: block ids (or state slots); a lower tier's place is named by `transfer`.
        num_tokens: leading slots it concerns.
        transfer: number under which a load or save is reported finished; 0 where it is over within the step.
        place: where a load reads, and a save writes, in the lower tier.
        digest: names what lies there by content, where other processes are told; b"" else.
    """

    kind: CacheOpKind
    group: int
    source: int
    target: int
    num_tokens: int
    transfer: int = 0
    place: int = 0
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class EncoderWork:
    """What an encoder computes before the step's forward pass.

    Attributes:
        slot: the request slot that is served first.
        digest: of what is encoded, which the runner was given beforehand (`MediaStore.put_media`).
        start, length: absolute positions of the placeholders that the output replaces; or, of an encoder whose output
            is attended to, 0 and how many entries it has.
        group: the cross group whose blocks get the entries; None where placeholders are replaced.
        blocks: those blocks.
    """

    slot: int
    digest: str
    start: int
    length: int
    group: int | None = None
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence enters the batch (first admission or resumption after preemption).

    Attributes:
        slot: number of the request slot, below max_num_seqs; free until released.
        request_id, sequence: whose tokens these are.
        prompt_ids: the prompt's token ids.
        generated_ids: tokens already generated (non-empty when resumed).
        computed: leading tokens whose cache entries the given blocks already hold.
        blocks: per cache group, block ids from logical block 0 (NULL_BLOCK where a sliding window dropped one).
        sampling: the request's parameters.
        stop_ids: token ids that end the sequence; the sampler masks them before min_tokens.
        seed: 64-bit key of the sequence's random stream (with sequence and position).
        adapters: what its tokens have of them: slot, and what is to be in it.
        pooling: what is computed instead of samples, None to sample.
        encoder: what it attends to besides, whose entries the table of the cross group holds.
        media: placeholders in the prompt.
        speculate: most drafts that may be proposed for it at a time, 0 for none.
        valid_from: per cache group, the first position before `computed` whose entries are there; more than what is
            needed is missing in optional groups alone.
        sampler_state: what the sampler had learned with the generated tokens, as `SlotResult` told last.
        follows: whether it takes the tokens of another sequence of the same number (`StepPlan.guidance`).
        namespace: who may find again what it was answered; None for nobody.
    """

    slot: int
    request_id: str
    sequence: int
    prompt_ids: tuple[int, ...]
    generated_ids: tuple[int, ...]
    computed: int
    blocks: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    adapters: tuple[tuple[int, AdapterUse], ...] = ()
    pooling: PoolingParams | None = None
    encoder: EncoderInput | None = None
    media: tuple[MediaSpan, ...] = ()
    speculate: int = 0
    valid_from: tuple[int, ...] = ()
    sampler_state: tuple[float, ...] = ()
    follows: bool = False
    namespace: Hashable = None


class ScheduledTokens(NamedTuple):
    """The tokens one slot computes in this step.

    Attributes:
        slot: the request slot.
        start: absolute position of the first token (= tokens computed before this step).
        tokens: token ids, or `last_sample(slot)` for one not yet known.
        prompt_tokens: how many leading tokens are of kind prompt; the rest are generated (or draft).
        draft_tokens: how many trailing tokens are drafts to be verified.
        sample: whether the last token's logits are sampled (they reach the last known token).
        new_blocks: per cache group, block ids appended to the slot's block table in this step.
        parents: by draft, its parent: a draft's number, or -1 for the last known token; () for a chain.
        draft_states: slots that get the recurrent state after the last known token and after each draft; () where there
            are no such states, or no drafts: then the slot's own gets the state after the last token.
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    prompt_tokens: int
    draft_tokens: int
    sample: bool
    new_blocks: tuple[tuple[int, ...], ...]
    parents: tuple[int, ...] = ()
    draft_states: tuple[int, ...] = ()

    @property
    def drafts(self) -> tuple[int, ...]:
        """The drafts that are verified: of a tree, its first chain."""
        first = len(self.tokens) - self.draft_tokens
        return self.tokens[first : first + chain_length(self.draft_tokens, self.parents)]


class StepPlan(NamedTuple):
    """One step, applied in this order: released slots, new sequences, cache operations, encoder work, tokens.

    Attributes:
        guidance: (slot, other slot, weight) of slots that share one draw: the first draws from 1 + weight times its
            logits less weight times the other's (Sanchez et al. 2023, 2306.17806), and both take the tokens, log-
            probabilities the first alone. Drafts count as far as both have them. () where all draw for themselves.
    """

    step: int
    released_slots: tuple[int, ...] = ()
    new_sequences: tuple[NewSequence, ...] = ()
    cache_ops: tuple[CacheOp, ...] = ()
    encoder_work: tuple[EncoderWork, ...] = ()
    scheduled: tuple[ScheduledTokens, ...] = ()
    guidance: tuple[tuple[int, int, float], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(span.tokens) for span in self.scheduled)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, natural logarithm, of the model's unmodified distribution.

    Attributes:
        token: the token taken (or, in a prompt, present).
        logprob: its log-probability.
        rank: 1 for the most probable token.
        top: (token, logprob) of the most probable tokens, descending.
        packed: the same in `config.logprobs.packed`, where they are many; `top` is () then.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    packed: bytes = b""


class SlotResult(NamedTuple):
    """What one slot produced.

    Attributes:
        slot: the request slot.
        tokens: accepted drafts, then the token drawn behind them (empty where they did not reach the last known
            token). A draft is accepted while it is the token that would have been drawn in its place.
        logprobs: one entry a token where the request asked, else empty.
        prompt_logprobs: entries for prompt positions whose *next* prompt token was scored in this step, in order.
        path: numbers of the accepted drafts where they were no chain; () stands for the first ones.
        pooled: the result of a slot that pools, float32 in the machine's byte order, once its prompt is computed.
        error: a sentence if this slot alone failed (for example logits that are not finite); it then ends.
        again: no token could be chosen yet: the sequence goes back to the queue, and the step is done again once its
            gates let it in.
        sampler_state: what its sampler has learned with these tokens, or with those that stay; () where none learns.
        back: how many generated tokens stay; those behind, and what the step sampled, are taken back. None for all.
    """

    slot: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    pooled: bytes | None = None
    again: bool = False
    path: tuple[int, ...] = ()
    sampler_state: tuple[float, ...] = ()
    back: int | None = None


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens for a slot's next step, from the drafter.

    Attributes:
        slot: the request slot.
        tokens: the drafts.
        parents: as in ScheduledTokens.
    """

    slot: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...] = ()


class StepTimings(NamedTuple):
    """Seconds the host spent in the parts of one step; waiting for a device counts to `sample`.

    Attributes:
        stages: since the step before, if there was one in the stages, or since this one was begun.
        stages_computed: what the stages have computed of the step meanwhile, on an average of them.
        ranks: of `forward` and `sample`, in which this process waited for other ranks or took what they gave.
    """

    build: float = 0.0
    forward: float = 0.0
    sample: float = 0.0
    stages: float = 0.0
    stages_computed: float = 0.0
    ranks: float = 0.0


class StepResult(NamedTuple):
    """The answer to the StepPlan of the same number.

    Attributes:
        step: its number.
        results: one entry a slot that has something to tell.
        proposals: what the drafter would try next.
        finished_transfers: loads and saves that have ended since the last result.
        failed_transfers: those of them that did not do what they should.
        timings: where the time went.
    """

    step: int
    results: tuple[SlotResult, ...] = ()
    proposals: tuple[Proposal, ...] = ()
    finished_transfers: tuple[int, ...] = ()
    failed_transfers: tuple[int, ...] = ()
    timings: StepTimings = StepTimings()


class Runner(Protocol):
    """Executes plans in order. `submit` may return before the work is done; `sample` waits for it.

    At most `depth` + 1 plans are outstanding between submit and sample. What is raised fails the outstanding steps;
    EngineDeadError says that there can be no others.
    """

    def submit(self, plan: StepPlan, masks: Any = None) -> None:
        """Starts the step: applies slots and cache operations, runs the model, and draws, under `masks` if given.

        `masks.of(slots)` waits for those of these slots: [len(slots), ceil(V / 32)] words, as the sampler takes them.
        A slot is named once for each of its draws: behind its last known token and behind each of its drafts.
        """

    def sample(self, step: int) -> StepResult:
        """The result of step number `step`, the oldest outstanding, which is waited for."""

    def prepare(self) -> bool:
        """Does a bounded piece of what makes later steps faster; whether there is more. Called while nothing runs."""

    def abort(self) -> None:
        """Forgets outstanding plans after one of them failed; slots they introduced may be released or overwritten.

        Transfers in flight are ended as well, and none of them is reported afterwards.
        """

    def close(self) -> None:
        """Frees what the runner holds."""
