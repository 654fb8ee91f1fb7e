"""What memory a model needs and how the KV cache's share is cut into blocks. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from penstock.config.cache_spec import CacheGroup, CacheKind
from penstock.config.errors import MemoryPlanError
from penstock.config.resolve import ModelFacts

CHECKPOINTS_A_ROW = 4  # where there is room
PREFIX_SHARE = 0.5  # kept for cached prefixes in a sliding group, as a share of what running sequences need
NO_REMEDY = "take a smaller model, or a machine with more memory"
_WORK_BUFFERS = 4  # hidden-size buffers alive at once in a layer: residual, normed, output, and one in flight


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """What the plan must respect.

    Attributes:
        available_bytes: memory for everything.
        max_model_len: longest sequence wished for, tokens.
        max_model_len_fixed: whether the user set it; if not, it may shrink.
        max_num_seqs, max_num_batched_tokens, block_size: as in EngineOptions.
        kv_cache_memory: bytes for the KV cache; None takes all that is left.
        kv_cache_memory_fixed: whether the user set it; if not, it may shrink to what is left.
        kv_blocks: exact blocks of every group (block 0 included); overrides kv_cache_memory.
        enable_prefix_caching: whether sliding groups get blocks for prefixes nobody is using.
        state_bytes: one recurrent state, of all layers.
        draft_states: states that a row has besides its own while drafts are verified: behind its last known token and
            behind each draft. 0 where there is no drafter.
        drafter_bytes: what a draft model takes besides its share of the blocks.
        adapter_bytes: low-rank adapters in slots and in memory.
        most_sequences: where the KV cache takes all that is left, no more than so many of max_model_len need.
        activation_bytes: what the largest step was measured to take; None estimates it.
        attention_masks: attention writes masks or scores out, and the estimate has room for them.
        where: what the available bytes are of, for people; with it, a refusal shows what is needed as a table.
        remedies: other ways to start, tried in this order where the model does not fit.
    """

    available_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int = 16
    max_model_len_fixed: bool = True
    kv_cache_memory: int | None = None
    kv_cache_memory_fixed: bool = True
    kv_blocks: int | None = None
    enable_prefix_caching: bool = True
    state_bytes: int = 0
    draft_states: int = 0
    drafter_bytes: int = 0
    adapter_bytes: int = 0
    most_sequences: int | None = None
    activation_bytes: int | None = None
    attention_masks: bool = True
    where: str = ""
    remedies: tuple[Remedy, ...] = ()

    @property
    def states_of_row(self) -> int:
        """Bytes of the recurrent states of one row."""
        return self.state_bytes * (1 + self.draft_states)


@dataclass(frozen=True, slots=True)
class Remedy:
    """Another way to start: with these flags, under these limits, with weights of so many bytes."""

    flags: str
    limits: MemoryLimits
    weights_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the memory goes.

    Attributes:
        weights_bytes: weights in the compute dtype.
        weights_file_bytes: the same in the checkpoint.
        kv_bytes: all KV blocks.
        kv_blocks: per cache group, blocks in its pool (block 0, never handed out, included).
        kv_block_bytes: per cache group, bytes of one block over all its layers.
        activation_bytes: the largest step's intermediate results and logits, an upper estimate or measured.
        state_bytes: recurrent states of all rows, behind their drafts too, and room for copies of them.
        max_model_len: longest prompt plus output, tokens.
        max_concurrent_full_length: sequences of max_model_len that fit at once.
        available_bytes: what the plan was made for.
        notes: why a wish was changed, one sentence each.
        checkpoints: recurrent states there is room for beside those of the rows, which prefixes are shared by.
        draft_states: those that rows borrow while their drafts are verified.
        drafter_bytes: a draft model's weights, its step and its blocks for drafts.
        adapter_bytes: as of MemoryLimits.
        below_bytes: copies of blocks in this machine's memory, and names of all copies below the device.
        measured: the weights and the largest step were measured.
        where: what the available bytes are of, for people.
    """

    weights_bytes: int
    weights_file_bytes: int
    kv_bytes: int
    kv_blocks: tuple[int, ...]
    kv_block_bytes: tuple[int, ...]
    activation_bytes: int
    max_model_len: int
    max_concurrent_full_length: float
    available_bytes: int
    notes: tuple[str, ...] = ()
    state_bytes: int = 0
    checkpoints: int = 0
    draft_states: int = 0
    drafter_bytes: int = 0
    adapter_bytes: int = 0
    below_bytes: int = 0
    measured: bool = False
    where: str = ""

    @property
    def total_bytes(self) -> int:
        rest = self.activation_bytes + self.state_bytes + self.drafter_bytes + self.adapter_bytes + self.below_bytes
        return self.weights_bytes + self.kv_bytes + rest

    def table(self) -> tuple[tuple[str, str, str], ...]:
        """Rows (what, how much, remark) for printing."""
        blocks = " + ".join(f"{count:,}" for count in self.kv_blocks)
        states = f"of recurrent layers, {self.checkpoints} of them for shared prefixes"
        states += f", {self.draft_states} for drafts" if self.draft_states else ""
        fits = f"{self.max_concurrent_full_length:.1f} sequences of {self.max_model_len:,} tokens"
        drafter = ("draft model", format_bytes(self.drafter_bytes), "besides its KV cache")
        return (
            ("weights", format_bytes(self.weights_bytes), f"{format_bytes(self.weights_file_bytes)} in the checkpoint"),
            ("KV cache", format_bytes(self.kv_bytes), f"{blocks} blocks; {fits}"),
            *((("states", format_bytes(self.state_bytes), states),) if self.state_bytes else ()),
            ("activations", format_bytes(self.activation_bytes), self.step_remark),
            *((drafter,) if self.drafter_bytes else ()),
            *((("adapters", format_bytes(self.adapter_bytes), "at most"),) if self.adapter_bytes else ()),
            *((("below", format_bytes(self.below_bytes), "copies in memory, and names"),) if self.below_bytes else ()),
            ("total", format_bytes(self.total_bytes), f"of {format_bytes(self.available_bytes)} available{self.where}"),
            *(("note", "", note) for note in self.notes),
        )

    @property
    def step_remark(self) -> str:
        return f"largest step, {'measured' if self.measured else 'estimated'}"


def format_bytes(count: int) -> str:
    """1536 → "1.5 KiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _size_flag(most: int, least: int) -> str:
    """A size between two as a flag takes it, and short where it can be: 14 digits are read by nobody."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if most >= 100 << power and most >> power << power >= least:
            return f"{most >> power}{unit}"
    return str(most)


def _missing(count: int) -> str:
    return f"{format_bytes(count)} {'is' if count == 1 else 'are'} missing"


def activation_bytes(model: ModelFacts, limits: MemoryLimits, dtype_bytes: int) -> int:
    """What one step takes: as measured, or an upper estimate of the widest layer's buffers, attention masks, and

    float32 logits twice.
    """
    if limits.activation_bytes is not None:
        return limits.activation_bytes
    tokens = min(limits.max_num_batched_tokens, limits.max_num_seqs * limits.max_model_len)
    layer = _WORK_BUFFERS * model.hidden_size + 3 * model.intermediate_size + 4 * model.attention_size
    layer += limits.max_model_len if limits.attention_masks else 0
    rows = min(limits.max_num_seqs, tokens)
    return tokens * layer * dtype_bytes + 2 * rows * model.vocab_size * 4


def _ceil(value: int, by: int) -> int:
    return -(-value // by)


def _peak_blocks(group: CacheGroup, tokens: int, limits: MemoryLimits) -> int:
    """Most blocks one sequence of that many tokens holds at once: all, or the window and one step's tokens."""
    total = _ceil(tokens, limits.block_size)
    if group.kind is not CacheKind.SLIDING or group.window is None:
        return total
    return min(total, _ceil(group.window - 1 + limits.max_num_batched_tokens, limits.block_size) + 1)


def _useful_blocks(group: CacheGroup, tokens: int, limits: MemoryLimits) -> int:
    """Blocks a sliding group can ever use, block 0 included: every row's window, one step's tokens, cached prefixes."""
    window = group.window or tokens
    standing = min(_ceil(tokens, limits.block_size), _ceil(window, limits.block_size) + 1)
    rows = limits.max_num_seqs * standing + _ceil(limits.max_num_batched_tokens, limits.block_size)
    share = int(rows * PREFIX_SHARE) if limits.enable_prefix_caching else 0
    return 1 + max(rows, _peak_blocks(group, tokens, limits)) + share


def _least(groups: Sequence[CacheGroup], sizes: Sequence[int], tokens: int, limits: MemoryLimits) -> int:
    """Bytes one sequence of that many tokens needs, block 0 of every group included."""
    return sum(size * (1 + _peak_blocks(group, tokens, limits)) for group, size in zip(groups, sizes, strict=True))


def _fewest_bytes(groups: Sequence[CacheGroup], sizes: Sequence[int], limits: MemoryLimits) -> int:
    """Bytes of KV cache below which a shorter context is tried: with it a step is smaller and leaves more."""
    if limits.kv_blocks is not None:
        return limits.kv_blocks * sum(sizes)
    return _least(groups, sizes, limits.block_size, limits)


def _longest(groups: Sequence[CacheGroup], sizes: Sequence[int], budget: int, limits: MemoryLimits) -> int:
    """Most tokens, at most max_model_len, of a sequence that fits into the budget; 0 if not even one block does."""
    low, high = 0, _ceil(limits.max_model_len, limits.block_size)
    while low < high:
        middle = (low + high + 1) // 2
        if _least(groups, sizes, middle * limits.block_size, limits) <= budget:
            low = middle
        else:
            high = middle - 1
    return min(low * limits.block_size, limits.max_model_len)


def _share_blocks(
    groups: Sequence[CacheGroup], sizes: Sequence[int], budget: int, limits: MemoryLimits
) -> tuple[int, ...]:
    """Cuts the budget: each group gets one full sequence, sliding groups up to half of the rest, full ones the rest."""
    tokens = limits.max_model_len
    blocks = [1 + _peak_blocks(group, tokens, limits) for group in groups]
    spare = budget - sum(size * count for size, count in zip(sizes, blocks, strict=True))
    sliding = [i for i, group in enumerate(groups) if group.kind is CacheKind.SLIDING]
    full = [i for i in range(len(groups)) if i not in sliding]
    wanted = {i: max(0, _useful_blocks(groups[i], tokens, limits) - blocks[i]) for i in sliding}
    cost = sum(sizes[i] * count for i, count in wanted.items())
    part = min(1.0, (spare / 2 if full else spare) / cost) if cost else 0.0
    for i, count in wanted.items():
        blocks[i] += int(count * part)
        spare -= sizes[i] * int(count * part)
    if full:
        each = sum(sizes[i] for i in full)  # 0 where no layer keeps keys: then blocks cost nothing
        more = spare // each if each else limits.max_num_seqs * _ceil(tokens, limits.block_size)
        for i in full:
            blocks[i] += more
    return tuple(blocks)


def _concurrent(groups: Sequence[CacheGroup], blocks: Sequence[int], limits: MemoryLimits) -> float:
    return min(
        (count - 1) / _peak_blocks(group, limits.max_model_len, limits)
        for group, count in zip(groups, blocks, strict=True)
    )


def _no_room(
    model: ModelFacts,
    groups: Sequence[CacheGroup],
    dtype_bytes: int,
    limits: MemoryLimits,
    weights: int,
    step: int,
    least: int,
) -> MemoryPlanError:
    """Weights and one step alone are too much.

    `limits` are those asked for, before the context shrank: under them the next start is tried. The last three are
    bytes; `least` those of the least KV cache.
    """
    remedy = NO_REMEDY
    ways = [(dtype_bytes, Remedy("", limits, weights))] if limits.max_model_len_fixed else []
    if dtype_bytes == 4:
        ways.append((2, Remedy("--dtype bfloat16", limits, weights // 2)))
    for size, way in (*ways, *((dtype_bytes, way) for way in limits.remedies)):
        free = replace(way.limits, max_model_len_fixed=False, remedies=())
        with suppress(MemoryPlanError):
            plan = _made(model, groups, size, None, free, way.weights_bytes)
            flags = [way.flags] if way.flags else []
            if limits.max_model_len_fixed and plan.max_model_len < limits.max_model_len:
                flags.append(f"--max-model-len {plan.max_model_len}")
            remedy = f"start with {' '.join(flags)}"
            break
    weights += limits.drafter_bytes + limits.adapter_bytes
    return MemoryPlanError(
        f"the weights need {format_bytes(weights)}, a step {format_bytes(step)} and the KV cache of one sequence "
        f"{format_bytes(least)}, but only {format_bytes(limits.available_bytes)} are available: "
        f"{_missing(weights + step + least - limits.available_bytes)}; {remedy}."
    )


def _check_states(groups: Sequence[CacheGroup], sizes: Sequence[int], left: int, limits: MemoryLimits) -> None:
    """Raises MemoryPlanError if the recurrent states of the slots leave nothing for the rest."""
    needed = limits.states_of_row * limits.max_num_seqs
    if not needed or left > _least(groups, sizes, limits.block_size, limits) or left + needed <= 0:
        return
    left += needed
    wished = limits.max_model_len if limits.max_model_len_fixed else limits.block_size
    rows = max(0, left - _least(groups, sizes, wished, limits) - 1) // limits.states_of_row
    raise MemoryPlanError(
        f"the recurrent states of {limits.max_num_seqs} sequences need {format_bytes(needed)}, but beside weights and "
        f"activations only {format_bytes(left)} are available: {_missing(needed - left)}; "
        f"{f'start with --max-num-seqs {rows}' if rows else NO_REMEDY}."
    )


def _no_room_for_length(least: int, budget: int, longest: int, left: int, limits: MemoryLimits) -> MemoryPlanError:
    told = limits.kv_cache_memory is not None and limits.kv_cache_memory_fixed
    if told and least <= left:
        remedy = f"start with --kv-cache-memory {_size_flag(min(left, least + least // 64), least)}"
    elif longest:
        remedy = f"start with --max-model-len {longest}"
    else:
        remedy = NO_REMEDY
    return MemoryPlanError(
        f"a sequence of {limits.max_model_len} tokens needs {format_bytes(least)} of KV cache, but there are "
        f"{format_bytes(max(0, budget))}: {_missing(least - budget)}; {remedy}."
    )


def _shrunk(length: int, wished: int, missing: int, what: str) -> str:
    lacks = f"for which {what} lacks {format_bytes(missing)}"
    return f"the context is {length} tokens instead of the model's {wished}, {lacks}"


def _kv_budget(left: int, least: int, longest: int, limits: MemoryLimits, notes: list[str]) -> int:
    """Bytes for the KV cache.

    Args:
        left: bytes beside weights and activations.
        least: bytes of one sequence of max_model_len; a derived size is raised to it.
        longest: tokens of the longest sequence that fits into `left`.
        notes: takes a sentence if a derived size has to shrink.
    """
    asked = limits.kv_cache_memory
    if asked is None:
        return left if limits.most_sequences is None else min(left, max(1, limits.most_sequences) * least)
    if not limits.kv_cache_memory_fixed:
        asked = max(asked, min(least, left))
    if asked <= left:
        return asked
    if limits.kv_cache_memory_fixed:
        remedy = f"start with --kv-cache-memory {_size_flag(left, least if longest else left)}"
        if limits.max_model_len_fixed and longest < limits.max_model_len:
            remedy = f"start with --kv-cache-memory {left} --max-model-len {longest}"
        if not longest:
            remedy = NO_REMEDY
        raise MemoryPlanError(
            f"--kv-cache-memory asks for {format_bytes(asked)}, but beside weights and activations only "
            f"{format_bytes(left)} are available: {_missing(asked - left)}; {remedy}."
        )
    notes.append(f"the KV cache is {format_bytes(left)} instead of {format_bytes(asked)}: all that is left")
    return left


def _fixed_blocks(sizes: Sequence[int], left: int, count: int) -> tuple[int, ...]:
    needed = count * sum(sizes)
    if needed > left:
        most = left // sum(sizes)
        raise MemoryPlanError(
            f"--kv-blocks {count} needs {format_bytes(needed)}, but {format_bytes(left)} are available: "
            f"{_missing(needed - left)}; {f'start with --kv-blocks {most}' if most >= 2 else NO_REMEDY}."
        )
    return (count,) * len(sizes)


def _cut(
    groups: Sequence[CacheGroup], sizes: Sequence[int], left: int, limits: MemoryLimits
) -> tuple[tuple[int, ...], int, tuple[str, ...]]:
    """(blocks of every group, max_model_len, notes) out of the bytes beside weights and activations."""
    notes: list[str] = []
    length = limits.max_model_len
    if limits.kv_blocks is not None:
        blocks = _fixed_blocks(sizes, left, limits.kv_blocks)
        if _concurrent(groups, blocks, limits) < 1:
            notes.append(f"--kv-blocks {limits.kv_blocks} is less than one sequence of {length} tokens")
        return blocks, length, tuple(notes)
    least = _least(groups, sizes, length, limits)
    budget = _kv_budget(left, least, _longest(groups, sizes, left, limits), limits, notes)
    if least > budget:
        longest = _longest(groups, sizes, budget, limits)
        if limits.max_model_len_fixed or not longest:
            raise _no_room_for_length(least, budget, longest, left, limits)
        notes.append(_shrunk(longest, length, least - budget, "the KV cache"))
        length = longest
    return _share_blocks(groups, sizes, budget, replace(limits, max_model_len=length)), length, tuple(notes)


def _checkpoints(groups: Sequence[CacheGroup], sizes: Sequence[int], left: int, limits: MemoryLimits) -> int:
    """Checkpoints: up to four a slot, within a quarter of what the KV cache leaves."""
    if not (limits.state_bytes and limits.enable_prefix_caching):
        return 0
    needed = _least(groups, sizes, limits.max_model_len, limits)
    if limits.kv_blocks is not None:
        needed = limits.kv_blocks * sum(sizes)
    elif limits.kv_cache_memory is not None and limits.kv_cache_memory_fixed:
        needed = max(needed, limits.kv_cache_memory)
    return max(0, min(CHECKPOINTS_A_ROW * limits.max_num_seqs, (left - needed) // 4 // limits.state_bytes))


def plan_memory(
    *,
    model: ModelFacts,
    groups: Sequence[CacheGroup],
    dtype_bytes: int,
    block_bytes: Sequence[int] | None = None,
    limits: MemoryLimits,
    weights_bytes: int | None = None,
) -> MemoryPlan:
    """Makes the plan.

    Args:
        model, groups: sizes from the checkpoint's headers, and the model's cache groups, at least one.
        dtype_bytes: bytes of one value in the compute dtype.
        block_bytes: per group, bytes of one block over all its layers; None takes values of dtype_bytes.
        limits: what is available and wished for.
        weights_bytes: bytes of the weights once loaded; None takes parameters × dtype_bytes.

    Raises:
        MemoryPlanError: it does not fit; the message names the missing bytes and one remedy that works.
    """
    weights = model.parameters * dtype_bytes if weights_bytes is None else weights_bytes
    try:
        return _made(model, groups, dtype_bytes, block_bytes, limits, weights)
    except MemoryPlanError as error:
        if not limits.where:
            raise
        sizes = _sizes(groups, dtype_bytes, block_bytes, limits)
        needed = (
            ("weights", weights, f"{format_bytes(model.file_bytes)} in the checkpoint"),
            ("activations", activation_bytes(model, limits, dtype_bytes), "largest step"),
            ("states", limits.states_of_row * limits.max_num_seqs, "of recurrent layers"),
            ("draft model", limits.drafter_bytes, "besides its KV cache"),
            ("adapters", limits.adapter_bytes, "at most"),
            ("KV cache", _least(groups, sizes, limits.max_model_len, limits), f"{limits.max_model_len:,} tokens"),
            ("available", limits.available_bytes, limits.where.removeprefix(", ")),
        )
        rows = "\n".join(f"  {what:<12} {format_bytes(size):>10}  {remark}" for what, size, remark in needed if size)
        raise MemoryPlanError(f"the model does not fit:\n{rows}\n{error}") from None


def _sizes(
    groups: Sequence[CacheGroup], dtype_bytes: int, block_bytes: Sequence[int] | None, limits: MemoryLimits
) -> tuple[int, ...]:
    """Bytes of a block of each group."""
    return tuple(block_bytes or (dtype_bytes * limits.block_size * group.elements_per_token for group in groups))


def _made(
    model: ModelFacts,
    groups: Sequence[CacheGroup],
    dtype_bytes: int,
    block_bytes: Sequence[int] | None,
    limits: MemoryLimits,
    weights: int,
    asked: MemoryLimits | None = None,
) -> MemoryPlan:
    """The plan; `asked`: the limits, where the context shrank since."""
    activations = activation_bytes(model, limits, dtype_bytes)
    states = limits.states_of_row * limits.max_num_seqs
    left = limits.available_bytes - weights - activations - states - limits.drafter_bytes - limits.adapter_bytes
    sizes = _sizes(groups, dtype_bytes, block_bytes, limits)
    _check_states(groups, sizes, left, limits)
    may_shrink = not limits.max_model_len_fixed and limits.max_model_len > limits.block_size
    if left <= 0 or (may_shrink and left < _fewest_bytes(groups, sizes, limits)):
        least = _least(groups, sizes, limits.max_model_len, limits)
        if not may_shrink:
            raise _no_room(model, groups, dtype_bytes, asked or limits, weights, activations, least)
        half = replace(limits, max_model_len=max(limits.block_size, limits.max_model_len // 2))
        shorter = _made(model, groups, dtype_bytes, block_bytes, half, weights, asked or limits)
        note = _shrunk(shorter.max_model_len, limits.max_model_len, least - left, "a step with its KV cache")
        return replace(shorter, notes=(note,))
    checkpoints = _checkpoints(groups, sizes, left, limits)
    blocks, length, notes = _cut(groups, sizes, left - checkpoints * limits.state_bytes, limits)
    return MemoryPlan(
        weights_bytes=weights,
        weights_file_bytes=model.file_bytes,
        kv_bytes=sum(size * count for size, count in zip(sizes, blocks, strict=True)),
        kv_blocks=blocks,
        kv_block_bytes=sizes,
        activation_bytes=activations,
        max_model_len=length,
        max_concurrent_full_length=_concurrent(groups, blocks, replace(limits, max_model_len=length)),
        available_bytes=limits.available_bytes,
        notes=notes,
        state_bytes=states + checkpoints * limits.state_bytes,
        checkpoints=checkpoints,
        drafter_bytes=limits.drafter_bytes,
        adapter_bytes=limits.adapter_bytes,
        draft_states=limits.draft_states * limits.max_num_seqs if limits.state_bytes else 0,
        measured=limits.activation_bytes is not None,
        where=limits.where,
    )
