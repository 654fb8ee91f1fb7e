"""Measures what memory the largest step takes on a device, by running one on caches of a few blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.config.limits import PROMPT_LOGIT_ROWS
from penstock.kernels.api import KernelSet
from penstock.kernels.devices import MemoryMeter
from penstock.kernels.sampling import RowSettings
from penstock.layers.batch import Batch, GroupTables, MaskKind
from penstock.models.registry import Model
from penstock.runtime.kv_memory import KVMemory
from penstock.startup.engine_spec import EngineSpec
from penstock.startup.gpu_memory import Measured

TOP = 20  # log-probabilities asked for with each token


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step.

    Attributes:
        queries: tokens of each row.
        contexts: tokens of each row in the caches, the step's included.
    """

    queries: tuple[int, ...]
    contexts: tuple[int, ...]


def largest_step(
    rows: int,
    tokens: int,
    longest: int,
    pool: int,
    chunk: int | None = None,
    whole: bool = False,
    gathers: bool = False,
) -> StepShape:
    """The most rows there may be: one token each, and the rest of the step's tokens in the last rows.

    Args:
        rows, tokens: most of a step.
        longest: most tokens of a sequence.
        pool: tokens the caches have room for, which the rows share.
        chunk: most tokens of a row, None for no bound.
        whole: prompts are computed whole, so that nothing is in the caches before.
        gathers: attention copies a row's context, so that one should be as long as possible.
    """
    rows, most = min(rows, tokens), min(longest, chunk or longest)
    queries, left = [1] * rows, tokens - min(rows, tokens)
    for row in reversed(range(rows)):
        more = min(left, most - 1)
        queries[row] += more
        left -= more
    if whole:
        return StepShape(tuple(queries), tuple(queries))
    share = min(longest, max(1, pool // rows))
    contexts = [max(count, share) if count == 1 else count for count in queries]
    if gathers:
        contexts[-1] = max(contexts[-1], min(longest, pool))
    return StepShape(tuple(queries), tuple(contexts))


def dummy_batch(shape: StepShape, model: Model, groups: int, block_size: int, device: str, block: int = 1) -> Batch:
    """A step of random tokens that all use one block of each group, and whose logits are all wanted."""
    lens = np.array(shape.queries, np.int64)
    contexts = np.array(shape.contexts, np.int64)
    ends = lens.cumsum()
    position = np.arange(ends[-1]) + (contexts - ends).repeat(lens)
    ids = np.random.default_rng(0).integers(0, model.vocab_size, ends[-1])  # random, so that all experts are used

    def there(array: np.ndarray[tuple[int, ...], np.dtype[np.int64]], kind: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(array).to(device, kind)

    table = torch.full((len(lens), -(-max(shape.contexts) // block_size)), block, dtype=torch.int32, device=device)
    rows = len(lens)
    return Batch(
        token_ids=there(ids),
        positions=there(np.tile(position, (model.position_axes, 1))),
        query_start=there(np.concatenate(([0], ends)), torch.int32),
        context_len=there(contexts, torch.int32),
        groups=(GroupTables(table, there(block * block_size + position % block_size)),) * groups,
        prompt_tokens=there(np.where(lens > 1, lens, 0), torch.int32),
        draft_tokens=torch.zeros(rows, dtype=torch.int32, device=device),
        logit_rows=torch.arange(int(ends[-1]), device=device),
        query_lens=shape.queries,
        context_lens=shape.contexts,
        state_slot=torch.arange(rows, device=device),
        masks=() if model.mask is MaskKind.CAUSAL else (model.mask,) * rows,
        token_types=None if model.embedding.types is None else torch.zeros(len(ids), dtype=torch.int64, device=device),
    )


def _shape_of(spec: EngineSpec) -> StepShape:
    options, plan = spec.options, spec.plan
    assert options.max_num_seqs and options.max_num_batched_tokens
    attention = next(choice for choice in spec.kernels.choices if choice.op == "paged_attention")
    return largest_step(
        options.max_num_seqs,
        options.max_num_batched_tokens,
        plan.max_model_len,
        options.block_size * (max(plan.kv_blocks) - 1),
        options.max_chunk_tokens,
        spec.model.whole_prompts,
        attention.chosen.name == "reference",
    )


def _sample(kernels: KernelSet, logits: Tensor) -> None:
    """Draws, after penalties and filters, and scores what was drawn."""
    sampling = kernels.sampling()
    count, vocab = logits.shape
    settings = [RowSettings(vocab, row, presence_penalty=0.5, top_k=vocab // 2, top_p=0.9) for row in range(count)]
    values = logits if sampling.on_device else logits.to("cpu", torch.float32).contiguous().numpy()
    sampling.sample(values, [sampling.row(one) for one in settings], np.zeros(count, np.int64))
    sampling.logprobs(values, np.zeros(count, np.int64), min(TOP, vocab))


def run_step(model: Model, memory: KVMemory, batch: Batch) -> Tensor | None:
    """Runs it; logits of as many tokens as a step computes at most, None for a model without logits."""
    hidden = model.forward(batch, memory.caches)
    if model.head is None:
        return None
    count = min(len(hidden), max(len(batch.query_lens), PROMPT_LOGIT_ROWS))
    return model.logits(hidden, torch.arange(count, device=hidden.device))


@torch.inference_mode()
def run_largest_step(spec: EngineSpec, memory: KVMemory) -> None:
    """Runs the largest step on caches that have a block 1, with logits and draws."""
    options, model = spec.options, spec.model
    shape = _shape_of(spec)
    batch = dummy_batch(shape, model, len(spec.groups), options.block_size, options.torch_device)
    logits = run_step(model, memory, batch)
    if logits is not None:
        _sample(spec.kernels, logits)


def measure(
    spec: EngineSpec,
    kv_types: Sequence[str],
    meter: MemoryMeter,
    before: int = 0,
    dry_run: Callable[[KVMemory], None] = lambda memory: None,
) -> Measured:
    """Runs the largest step of a loaded model, then what will be captured, and returns the memory they took.

    Args:
        spec: with a plan whose blocks and context length the real ones will not exceed by much.
        kv_types: of every layer's cache.
        meter: of the model's device.
        before: bytes that were allocated there when the model was not loaded yet: other engines' in this process.
        dry_run: takes the memory that recorded steps will keep.
    """
    meter.reset()
    weights = meter.read().allocated - before
    memory = KVMemory(
        spec.kernels,
        spec.model.cache_specs,
        (2,) * len(spec.groups),
        spec.options.block_size,
        kv_types=kv_types,
        device=spec.options.torch_device,
        state_slots=(spec.options.max_num_seqs or 0) + 1,
        shared=spec.model.whole_prompts,
    )
    held = meter.read().allocated
    meter.reset()
    run_largest_step(spec, memory)
    peak = meter.read().peak
    meter.reset()
    with torch.inference_mode():
        dry_run(memory)
    recordings = meter.read().peak - held
    memory.close()
    meter.reset()
    after = meter.read()
    return Measured(weights, max(0, peak - held), after.others + before, after.total, max(0, recordings))
