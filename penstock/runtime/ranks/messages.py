"""What crosses between the process that leads and the others: tagged msgpack, arrays as raw bytes, never pickle.

What is asked of an executor and of its KV memory goes down, in the order in which the one that leads does it itself;
nothing comes up while all is well, but for the ends of transfers to and from a lower tier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from penstock.config.adapters import AdapterUse
from penstock.config.options import EngineOptions
from penstock.core.protocol import CacheOp, ScheduledTokens
from penstock.layers.batch import Batch, GroupTables, Injection, MaskKind
from penstock.runtime.ranks.step_sizes import StepSizes

if TYPE_CHECKING:
    from torch import Tensor

ARRAYS: Final = ("bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32")


class Array(msgspec.Struct, frozen=True, array_like=True):
    """A tensor or an array: the name of its type, one of ARRAYS, its shape, and its elements in order."""

    kind: str
    shape: tuple[int, ...]
    data: bytes


class Tables(msgspec.Struct, frozen=True, array_like=True):
    """As `layers.batch.GroupTables`."""

    block_table: Array
    slot: Array
    context_len: Array | None
    context_lens: tuple[int, ...]


class Forward(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Run a step: a `layers.batch.Batch`, field by field."""

    token_ids: Array
    positions: Array
    query_start: Array
    context_len: Array
    groups: tuple[Tables, ...]
    prompt_tokens: Array
    draft_tokens: Array
    logit_rows: Array
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    state_slot: Array | None
    state_after: Array | None
    adapter_slot: Array | None
    adapter_scale: Array | None
    masks: tuple[str, ...]
    spans: Array | None
    token_types: Array | None
    injected: tuple[Array, Array] | None


class Logits(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compute the logits of these of the last step's `logit_rows`, or of all."""

    rows: Array | None


class DraftForward(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Run a step of the layers that draft, of a model that drafts with its own first ones."""

    step: Forward


class DraftLogits(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """As Logits, of the last such step."""

    rows: Array | None


class Blocks(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Enter blocks into the table of a group: at places in the flat table, of which these slots use so many now."""

    group: int
    places: Array
    blocks: Array
    slots: tuple[int, ...]
    used: tuple[int, ...]


class Decode(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Run a step in which every row computes one token, and its logits; new blocks are appended to the tables."""

    spans: tuple[ScheduledTokens, ...]


class Apply(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Do what a cache operation says."""

    op: CacheOp


class Read(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Begin to read adapters, which are going to be placed."""

    uses: tuple[AdapterUse, ...]


class Place(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Have a slot hold an adapter from the next step on."""

    slot: int
    use: AdapterUse


class PassExperts(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Bring bytes [begin, end) of a piece of experts' weights to where these moves say, beside what is there.

    Attributes:
        layer: which of those whose experts change places.
        piece: which of an expert's matrices and biases there.
        begin, end: bytes of it.
        moves: as `parallel.experts.Move`.
    """

    layer: int
    piece: int
    begin: int
    end: int
    moves: tuple[tuple[int, int, int, int], ...]


class PutExperts(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From the next step on, what has come by these moves is in its places."""

    layer: int
    moves: tuple[tuple[int, int, int, int], ...]


class Launch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Load a rank's part of a model; the answer is Loaded.

    Attributes:
        options: concrete.
        rank, count: whose part.
        layers: the first layer that it has, and the one behind the last; None where that is the model's last.
        head: whether it has the model's head.
        max_model_len: of the plan.
        threads: of this rank.
        log_level: from which on the log is written.
        model_bytes: of the model's tensors, by which one that lies elsewhere is known to be the same.
    """

    options: EngineOptions
    rank: int
    count: int
    layers: tuple[int, int | None]
    head: bool
    max_model_len: int
    threads: int
    log_level: int
    model_bytes: int


class KeepShare(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Keep this rank's share of the copies of blocks that lie below the device; the answer is Kept.

    Attributes:
        places: of each cache group.
        ram: bytes of copies in memory, before others or, without those, of all.
        disk: the name of the folder that the one that leads has; "" for no disk.
        stem: what names in a shared store begin with; "" for no such store.
        queued: bytes that may wait to be sent there.
        essential: groups without which a block is of no use.
        key_id: of the key that copies are encrypted with; "" for none.
    """

    places: tuple[int, ...]
    ram: int
    disk: str
    stem: str
    queued: int
    essential: tuple[int, ...]
    key_id: str


class Make(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Make memory and executor, as the one that leads does; the answer is Ready."""

    sizes: StepSizes


Command = (
    Launch
    | Make
    | KeepShare
    | Forward
    | Logits
    | DraftForward
    | DraftLogits
    | Blocks
    | Decode
    | Apply
    | Read
    | Place
    | PassExperts
    | PutExperts
)


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """So many bytes of weights have been read, of so many."""

    done: int
    total: int


class Joined(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A worker of another machine is there, which has so much memory and speed: see startup.rooms.Room."""

    memory: int
    speed: float


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The weights are there: bytes of them, and seconds it took."""

    weights_bytes: int
    seconds: float


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Steps can be run, as this says; `kv_sizes` are the bytes that the rank keeps of a block, by cache group."""

    describe: str
    kv_sizes: tuple[int, ...] = ()


class Kept(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """There is room for the rank's share of copies."""


class Moved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A transfer has ended in this rank, and has failed or not."""

    transfer: int
    failed: bool


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The rank ends: the class of the error, and its message."""

    kind: str
    message: str


Report = Progress | Joined | Loaded | Ready | Kept | Moved | Failed

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode(message: Command | Report) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def command(frame: bytes) -> Command:
    """Raises msgspec.DecodeError where it is none."""
    return _commands.decode(frame)


def report(frame: bytes) -> Report:
    """Raises msgspec.DecodeError where it is none."""
    return _reports.decode(frame)


def array(value: Any) -> Array:
    """Of a tensor on the CPU or an array."""
    if isinstance(value, np.ndarray):
        return Array(value.dtype.name, value.shape, value.tobytes())
    import torch

    kind, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
    if value.dtype is torch.bfloat16:  # which numpy lacks
        value = value.view(torch.int16)
    return Array(kind, shape, value.numpy().tobytes())


def tensor(sent: Array) -> Tensor:
    """The tensor that was sent, in memory of its own.

    Raises:
        ValueError: its bytes are not those of its shape, or of no known type.
    """
    import torch

    if sent.kind not in ARRAYS:
        raise ValueError(f"an array of {sent.kind!r}; known: {', '.join(ARRAYS)}")
    kind: torch.dtype = getattr(torch, sent.kind)
    made = torch.empty(sent.shape, dtype=kind)
    if made.nbytes != len(sent.data):
        raise ValueError(f"an array of shape {sent.shape} and type {sent.kind} has {len(sent.data)} bytes")
    if sent.data:
        made.reshape(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(sent.data), dtype=torch.uint8))
    return made


def forward(batch: Batch) -> Forward:
    """A step as it is sent."""
    groups = (
        Tables(array(group.block_table), array(group.slot), _optional(group.context_len), group.context_lens)
        for group in batch.groups
    )
    injected = batch.injected
    return Forward(
        token_ids=array(batch.token_ids),
        positions=array(batch.positions),
        query_start=array(batch.query_start),
        context_len=array(batch.context_len),
        groups=tuple(groups),
        prompt_tokens=array(batch.prompt_tokens),
        draft_tokens=array(batch.draft_tokens),
        logit_rows=array(batch.logit_rows),
        query_lens=batch.query_lens,
        context_lens=batch.context_lens,
        state_slot=_optional(batch.state_slot),
        state_after=_optional(batch.state_after),
        adapter_slot=_optional(batch.adapter_slot),
        adapter_scale=_optional(batch.adapter_scale),
        masks=tuple(mask.value for mask in batch.masks),
        spans=_optional(batch.spans),
        token_types=_optional(batch.token_types),
        injected=None if injected is None else (array(injected.rows), array(injected.values)),
    )


def batch_of(sent: Forward) -> Batch:
    """The step that was sent."""
    groups = (
        GroupTables(tensor(group.block_table), tensor(group.slot), _given(group.context_len), group.context_lens)
        for group in sent.groups
    )
    injected = sent.injected
    return Batch(
        token_ids=tensor(sent.token_ids),
        positions=tensor(sent.positions),
        query_start=tensor(sent.query_start),
        context_len=tensor(sent.context_len),
        groups=tuple(groups),
        prompt_tokens=tensor(sent.prompt_tokens),
        draft_tokens=tensor(sent.draft_tokens),
        logit_rows=tensor(sent.logit_rows),
        query_lens=sent.query_lens,
        context_lens=sent.context_lens,
        state_slot=_given(sent.state_slot),
        state_after=_given(sent.state_after),
        adapter_slot=_given(sent.adapter_slot),
        adapter_scale=_given(sent.adapter_scale),
        masks=tuple(map(MaskKind, sent.masks)),
        spans=_given(sent.spans),
        token_types=_given(sent.token_types),
        injected=None if injected is None else Injection(tensor(injected[0]), tensor(injected[1])),
    )


def _optional(value: Any) -> Array | None:
    return None if value is None else array(value)


def _given(sent: Array | None) -> Tensor | None:
    return None if sent is None else tensor(sent)
