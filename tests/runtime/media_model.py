"""A small model that takes media, attends to an encoder and turns pairs by three axes; its encoders and its engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.config.cache_spec import CacheKind, CacheSpec, group_layers
from penstock.config.media import EncoderInput, MediaSpan
from penstock.config.options import SchedulerOptions
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import TokenLogprobs
from penstock.core.request import EngineRequest
from penstock.core.scheduler import Scheduler
from penstock.engine.loop import Engine
from penstock.kernels.api import KernelSet, resolve_kernels
from penstock.kernels.registry import KernelContext
from penstock.layers.attention import Attention
from penstock.layers.attention_options import AttentionOptions
from penstock.layers.batch import LayerCache
from penstock.layers.decoder import DecoderBlock, DecoderModel, Heads, ModelTraits
from penstock.layers.embedding import Embedding, Head, table
from penstock.layers.linear import Linear
from penstock.layers.mlp import GatedMlp
from penstock.layers.norm import RmsNorm
from penstock.layers.rotary import RopeParameters, Rotary, section_axes
from penstock.layers.step import ForwardStep
from penstock.layers.weight import Layer
from penstock.runtime.batch_builder import BatchBuilder, BatchTraits
from penstock.runtime.executor import EagerExecutor, Executor, make_executor
from penstock.runtime.kv_memory import KVMemory
from penstock.runtime.media import Arrays, Encoders, MediaShape, MediaStore
from penstock.runtime.runner import Collaborators, ModelRunner
from penstock.runtime.sampler import Sampler

VOCAB, HIDDEN, HEADS, KV_HEADS, DIM, ROWS, BLOCK, LONGEST = 67, 32, 4, 2, 16, 6, 4, 96
LEVELS, AXES = 3, 3
CPU = torch.device("cpu")
SHAPE = MediaShape(LEVELS, AXES, HIDDEN, torch.float32)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.4


class CrossAttention(Layer):
    """Reads an encoder's entries, which the encoder has written."""

    def __init__(self, kernels: KernelSet, index: int) -> None:
        self._attend = kernels.paged_attention
        self.index = index
        self.spec = CacheSpec(CacheKind.CROSS, KV_HEADS, DIM, DIM)
        self.query = Linear(kernels, ((f"{index}.q", HEADS * DIM),), HIDDEN, bias=False)
        self.output = Linear(kernels, ((f"{index}.o", HIDDEN),), HEADS * DIM, bias=False)

    def __call__(self, hidden: Tensor, step: ForwardStep, residual: Tensor | None = None) -> Tensor:
        cache = step.caches[self.index]
        attended = self._attend(self.query(hidden, step), cache.kv, step.plan(cache, None), DIM**-0.5)
        return self.output(step.wanted(attended), step, None if residual is None else step.wanted(residual))


def build(mixers: Sequence[str] = ("self", "cross", "self"), *, reference: bool = False) -> DecoderModel:
    """A model of these layers with random weights."""
    kernels = resolve_kernels(KernelContext("cpu", "float32", "auto", prefer_reference=reference))
    rope = RopeParameters("default", 100.0, DIM, 128, axes=section_axes((2, 3, 3)))
    options = AttentionOptions(HIDDEN, HEADS, KV_HEADS, DIM, Rotary(rope, 128))

    def block(index: int, kind: str) -> DecoderBlock:
        mixer: Any = (
            Attention(kernels, f"{index}.a", index, options) if kind == "self" else CrossAttention(kernels, index)
        )
        norms = (RmsNorm(kernels, f"{index}.n{i}", HIDDEN, 1e-6) for i in range(2))
        return DecoderBlock(next(norms), mixer, next(norms), GatedMlp(kernels, f"{index}.m", HIDDEN, 48))

    blocks = [block(index, kind) for index, kind in enumerate(mixers)]
    traits = ModelTraits(128, torch.float32, position_axes=AXES, media_levels=LEVELS)
    embedding, head = (table(kernels, name, VOCAB, HIDDEN) for name in ("embed", "head"))
    norm = RmsNorm(kernels, "norm", HIDDEN, 1e-6)
    model = DecoderModel(kernels, Embedding(kernels, embedding), blocks, norm, Heads(Head(kernels, head)), traits)
    for seed, weight in enumerate(model.weights()):
        values = drawn(100 + seed, *weight.shape) + (1.0 if len(weight.shape) == 1 else 0.0)
        weight.fill(values.chunk(2) if weight.gate_up else (values,))
    return model


def states_of(seed: int, length: int) -> Tensor:
    """What an encoder's last layer would give."""
    return drawn(seed, length, HIDDEN)


def medium(seed: int, length: int, places: npt.NDArray[np.int64] | None = None) -> dict[str, Any]:
    """The arrays of a medium."""
    arrays: dict[str, Any] = {"pixels": states_of(seed, length).numpy()}
    return arrays if places is None else {**arrays, "places": places}


def grid(height: int, width: int) -> npt.NDArray[np.int64]:
    """Positions of an image's patches: one moment, rows, columns."""
    rows, columns = np.divmod(np.arange(height * width), width)
    return np.stack((np.zeros_like(rows), rows, columns))


@dataclass
class TinyEncoders:
    """Both encoders of the model.

    Attributes:
        encoded: lengths of what they were given.
        broken: makes them raise.
        bend: changes what the embeddings' encoder gives.
    """

    model: DecoderModel
    encoded: list[int] = field(default_factory=list)
    broken: bool = False
    bend: Callable[[Tensor], Tensor] = lambda found: found

    def embeddings(self, arrays: Arrays) -> Tensor:
        """[LEVELS, length, HIDDEN]"""
        pixels = self._pixels(arrays)
        return self.bend(torch.stack([pixels @ drawn(50 + level, HIDDEN, HIDDEN) for level in range(LEVELS)]))

    def keys_and_values(self, arrays: Arrays, slot: Tensor, caches: Sequence[LayerCache]) -> None:
        for cache in caches:
            qkv = torch.cat((torch.zeros(len(slot), HEADS * DIM), *projected(self._pixels(arrays))), dim=1)
            still = torch.ones(len(slot), 1, 2), torch.zeros(len(slot), 1, 2)
            self.model.kernels.rope_and_cache_write(qkv, still[0], still[1], slot, cache.kv)

    def _pixels(self, arrays: Arrays) -> Tensor:
        if self.broken:
            raise RuntimeError("it is no picture.")
        pixels = torch.from_numpy(np.asarray(arrays["pixels"], np.float32))
        self.encoded.append(len(pixels))
        return pixels


def projected(states: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [length, KV_HEADS · DIM] of encoder states."""
    return states @ drawn(60, HIDDEN, KV_HEADS * DIM), states @ drawn(61, HIDDEN, KV_HEADS * DIM)


@dataclass
class Setup:
    """An engine over the model."""

    engine: Engine
    media: MediaStore
    encoders: TinyEncoders


def make_engine(model: DecoderModel, *, recorded: bool = True, chunk: int = 64, depth: int = 0) -> Setup:
    groups = group_layers(model.cache_specs)
    counts = (80,) * len(groups)
    memory = KVMemory(model.kernels, model.cache_specs, counts, BLOCK)
    executor: Executor = EagerExecutor(model, memory.caches, "a test")
    if recorded:
        executor = make_executor(model, memory.caches, 64, ROWS)
        assert executor.describe.startswith("recorded: "), executor.describe
    cross = tuple(index for index, group in enumerate(groups) if group.kind is CacheKind.CROSS)
    traits = BatchTraits(axes=AXES, cross=cross)
    builder = BatchBuilder(len(groups), ROWS, LONGEST // BLOCK, BLOCK, CPU, traits)
    encoders = TinyEncoders(model)
    both = Encoders(encoders.embeddings, encoders.keys_and_values)
    media = MediaStore(both, SHAPE, BLOCK, memory.caches, CPU)
    sampler = Sampler(VOCAB, ROWS, model.kernels.sampling())
    runner = ModelRunner(executor, memory, sampler, builder, Collaborators(media=media))
    options = SchedulerOptions(ROWS, 64, LONGEST, BLOCK, counts, True, "fcfs", depth, chunk)
    return Setup(Engine(Scheduler(options, groups), runner), media, encoders)


def ask(
    name: str,
    prompt: Sequence[int],
    *media: MediaSpan,
    encoder: EncoderInput | None = None,
    tokens: int = 6,
) -> EngineRequest:
    params = SamplingParams(temperature=0.9, max_tokens=tokens, logprobs=2)
    return EngineRequest(name, tuple(prompt), params, seed=5, media=media, encoder=encoder)


Answers = dict[str, list[TokenLogprobs]]


def finish(engine: Engine) -> tuple[Answers, dict[str, str]]:
    """What every request got, and the errors of those that failed."""
    answers: Answers = {}
    errors: dict[str, str] = {}
    while engine.has_work:
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.logprobs)
            if output.error is not None:
                errors[output.request_id] = output.error
        engine.scheduler.check_integrity()
    return answers, errors
