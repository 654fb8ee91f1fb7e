"""Steps that nobody asked for, run so that kernels are compiled before requests need them.

Kernels differ by tiles of rows, by classes of queries and by what draws ask for; sizes of steps beyond that make none.
On a GPU's first start Triton compiles each for about a second, during which every stream would stand still; later
starts find them on disk. The first steps run before the engine is ready, the others while nothing else does.
"""

from __future__ import annotations

import logging
from collections import deque
from time import perf_counter
from typing import Final

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.api import KernelSet
from penstock.kernels.copies import check
from penstock.kernels.sampling import RowSettings
from penstock.runtime.kv_memory import KVMemory
from penstock.startup.engine_spec import EngineSpec
from penstock.startup.peak import StepShape, dummy_batch, largest_step, run_step

AHEAD: Final = 10.0  # seconds, before the engine is ready
_REACH: Final = 1024  # tokens of contexts, of which attention sums parts by themselves
log = logging.getLogger(__name__)


def steps(rows: int, tokens: int, longest: int, whole: bool = False, chunk: int | None = None) -> tuple[StepShape, ...]:
    """Every kind of step but the largest, which is measured: the most urgent first.

    Args:
        rows, tokens: most of a step.
        longest: most tokens of a sequence.
        whole: prompts are computed whole, so that nothing is in the caches before.
        chunk: most tokens of a row, None for no bound.
    """
    most = min(tokens, longest, chunk or tokens)
    shapes: list[tuple[int, ...]] = []
    shapes += ((queries,) for queries in (1, 16, 2, 4, 8) if queries <= most)  # decoding, prompts, their ends
    size = 32
    while size < tokens:
        shapes.append(largest_step(rows, size, longest, size, chunk, whole).queries)
        size *= 2
    reach = min(_REACH, longest)
    return tuple(StepShape(queries, queries if whole else tuple(max(reach, q) for q in queries)) for queries in shapes)


def draw(kernels: KernelSet, logits: Tensor) -> None:
    """Draws in each way that needs other kernels: greedy, with penalties and filters, with a mask."""
    sampling = kernels.sampling()
    count, vocab = logits.shape
    words = np.full((count, -(-vocab // 32)), 0xFFFFFFFF, np.uint32)
    filtered = {"presence_penalty": 0.5, "top_k": vocab // 2, "top_p": 0.9}
    for settings, masks in ({"temperature": 0.0}, None), (filtered, None), (filtered, words):
        rows = [sampling.row(RowSettings(vocab, row, **settings)) for row in range(count)]  # type: ignore[arg-type]
        sampling.sample(logits, rows, np.zeros(count, np.int64), masks)
    sampling.logprobs(logits, np.zeros(count, np.int64), 1)


class WarmUp:
    """The warm-up steps of a loaded model; they run on its own caches and write to the null block."""

    def __init__(self, spec: EngineSpec, memory: KVMemory) -> None:
        options = spec.options
        plan = spec.plan
        model = spec.model
        assert options.max_num_seqs and options.max_num_batched_tokens
        self._spec, self._memory = spec, memory
        self._left = deque(
            steps(
                options.max_num_seqs,
                options.max_num_batched_tokens,
                plan.max_model_len,
                model.whole_prompts,
                options.max_chunk_tokens,
            )
        )
        self._draws = spec.kernels.sampling().on_device

    def ahead(self, seconds: float = AHEAD) -> None:
        """Runs steps until that much time has gone by."""
        end = perf_counter() + seconds
        while self.run_next() and perf_counter() < end:
            pass

    @torch.inference_mode()
    def run_next(self) -> bool:
        """Runs a step; whether there are more. No slot may be in use, since recurrent states are overwritten."""
        if not self._left:
            return False
        started, shape = perf_counter(), self._left.popleft()
        try:
            self._run(shape)
        except Exception:
            check(self._spec.options.torch_device)
            log.warning("kernels cannot be compiled ahead; requests will wait for them", exc_info=True)
            self._left.clear()
        else:
            ms = 1e3 * (perf_counter() - started)
            log.info("kernels of steps of %d tokens are ready, in %.0f ms", sum(shape.queries), ms)
        return bool(self._left)

    def _run(self, shape: StepShape) -> None:
        spec, model = self._spec, self._spec.model
        options = spec.options
        batch = dummy_batch(shape, model, len(spec.groups), options.block_size, options.torch_device, block=0)
        logits = run_step(model, self._memory, batch)
        if logits is not None and self._draws:
            draw(spec.kernels, logits)
            self._draws = False
