"""Models with recurrent states and adapters in whole steps: recorded, in chunks, in company, preempted, row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config.adapters import AdapterUse
from penstock.config.cache_spec import CacheGroup, CacheKind, CacheSpec, group_layers
from penstock.config.options import SchedulerOptions
from penstock.config.sampling import SamplingParams
from penstock.core.policies.adapters import AdapterGate
from penstock.core.policies.order import default_gates
from penstock.core.protocol import CacheOp, CacheOpKind, TokenLogprobs
from penstock.core.request import EngineRequest
from penstock.core.scheduler import Scheduler
from penstock.engine.loop import Engine
from penstock.kernels.api import KernelSet, resolve_kernels
from penstock.kernels.cpu import native
from penstock.kernels.registry import KernelContext
from penstock.layers.attention import Attention
from penstock.layers.attention_options import AttentionOptions
from penstock.layers.decoder import DecoderBlock, DecoderModel, Heads, ModelTraits
from penstock.layers.embedding import Embedding, Head, table
from penstock.layers.linear import Linear
from penstock.layers.mlp import GatedMlp
from penstock.layers.norm import RmsNorm
from penstock.layers.rotary import RopeParameters, Rotary
from penstock.layers.step import ForwardStep
from penstock.layers.weight import Layer
from penstock.runtime.adapters import AdapterRoom, Loaded
from penstock.runtime.batch_builder import BatchBuilder
from penstock.runtime.executor import EagerExecutor, make_executor
from penstock.runtime.kv_memory import KVMemory
from penstock.runtime.runner import Collaborators, ModelRunner
from penstock.runtime.sampler import Sampler
from tests.models import tiny

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
VOCAB, HIDDEN, HEADS, SIZE, STATES, ROWS, BLOCK = 101, 32, 3, 16, 12, 6, 4
INNER, MIXED = HEADS * SIZE, HEADS * SIZE + 2 * STATES


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.3


class Mixer(Layer):
    """A Mamba-2 layer or one with the gated delta rule, its output projection with adapters."""

    def __init__(self, kernels: KernelSet, index: int, rule: str) -> None:
        self.kernels, self.index, self.rule = kernels, index, rule
        widths = (INNER, MIXED, HEADS) if rule == "scan" else (INNER, 3 * INNER, HEADS, HEADS)
        self.widths = widths
        self.conv_width = widths[1]
        memory = (HEADS, STATES, SIZE) if rule == "scan" else (HEADS, SIZE, SIZE)
        self.spec = CacheSpec(CacheKind.STATE, state=((3, self.conv_width), memory))
        self.input = Linear(kernels, ((f"{index}.in", sum(widths)),), HIDDEN, bias=False)
        self.output = Linear(kernels, ((f"{index}.out", HIDDEN),), INNER, bias=False)
        self.taps, self.bias = drawn(11, 4, self.conv_width) * 3, drawn(12, self.conv_width)
        self.a, self.dt_bias = -drawn(13, HEADS).exp(), drawn(14, HEADS)
        self.scale = torch.ones(INNER)
        (self.adapters,) = dict(self.output.make_adapters(kernels, 3, 8)).values()

    def adapter(self, number: int) -> Loaded:
        """The first or the second adapter, for a slot."""
        return self.adapters.entries(drawn(20 + number, 4 * number, INNER), drawn(30 + number, HIDDEN, 4 * number), 2.0)

    def __call__(self, hidden: Tensor, step: ForwardStep, residual: Tensor | None = None) -> Tensor:
        ops, (tail, memory), rows = self.kernels, step.caches[self.index].state, step.state_rows
        gate, mixed, *rest = ops.split(self.input(hidden, step), self.widths)
        mixed = ops.short_conv(mixed, self.taps, self.bias, tail, rows, "silu")
        if self.rule == "scan":
            x, b, c = ops.split(mixed, (INNER, STATES, STATES))
            mixed = ops.selective_scan(x, rest[0], self.a, b, c, memory, rows, self.dt_bias)
        else:
            q, k, v = ops.split(mixed, (INNER,) * 3)
            mixed = ops.gated_delta_rule(q, k, v, *rest, self.a, memory, rows, self.dt_bias)
        mixed = ops.gated_rms_norm(mixed, gate, self.scale, 1e-6, SIZE, self.rule == "scan")
        mixed, residual = step.wanted(mixed), None if residual is None else step.wanted(residual)
        return self.output(mixed, step, residual)


def build(mixers: tuple[str, ...], reference: bool = False) -> DecoderModel:
    """A model of these layers with random weights."""
    kernels = resolve_kernels(KernelContext("cpu", "float32", "auto", prefer_reference=reference))
    rope = Rotary(RopeParameters("default", 100.0, 16, 128), 128)
    attention = AttentionOptions(HIDDEN, 2, 1, 16, rope)

    def block(index: int, kind: str) -> DecoderBlock:
        mixer: Any = (
            Attention(kernels, f"{index}.a", index, attention) if kind == "full" else Mixer(kernels, index, kind)
        )
        norms = (RmsNorm(kernels, f"{index}.n{i}", HIDDEN, 1e-6) for i in range(2))
        return DecoderBlock(next(norms), mixer, next(norms), GatedMlp(kernels, f"{index}.m", HIDDEN, 48))

    embedding = Embedding(kernels, table(kernels, "embed", VOCAB, HIDDEN))
    blocks = [block(index, kind) for index, kind in enumerate(mixers)]
    head = Head(kernels, table(kernels, "head", VOCAB, HIDDEN))
    norm = RmsNorm(kernels, "norm", HIDDEN, 1e-6)
    model = DecoderModel(kernels, embedding, blocks, norm, Heads(head), ModelTraits(128, torch.float32))
    for seed, weight in enumerate(model.weights()):
        values = drawn(100 + seed, *weight.shape) + (1.0 if len(weight.shape) == 1 else 0.0)
        weight.fill(values.chunk(2) if weight.gate_up else (values,))
    return model


MODELS = {"hybrid": ("scan", "full", "delta"), "recurrent alone": ("delta", "scan")}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> DecoderModel:
    return build(MODELS[request.param])


def make_engine(
    model: DecoderModel,
    chunk: int = 64,
    depth: int = 0,
    blocks: int = 60,
    *,
    recorded: bool = True,
    checkpoints: int = 0,
) -> tuple[Engine, KVMemory]:
    groups = group_layers(model.cache_specs)
    counts = (blocks,) * len(groups)
    memory = KVMemory(model.kernels, model.cache_specs, counts, BLOCK, state_slots=ROWS + checkpoints)
    for cache in memory.caches:
        for array in cache.state:
            array.fill_(float("nan"))  # a row that starts must not read what an earlier one left
    executor: Any = EagerExecutor(model, memory.caches, "a test")
    if recorded:
        executor = make_executor(model, memory.caches, 64, ROWS)
        assert executor.describe.startswith("recorded: "), executor.describe
    builder = BatchBuilder(len(groups), ROWS, 128 // BLOCK, BLOCK, torch.device("cpu"))
    mixers = [block.attention for block in model.blocks if isinstance(block.attention, Mixer)]
    room = AdapterRoom(
        lambda use: tuple(entry for mixer in mixers for entry in mixer.adapter(len(use.digest))), 2, 2**20
    )
    sampler = Sampler(VOCAB, ROWS, model.kernels.sampling())
    runner = ModelRunner(executor, memory, sampler, builder, Collaborators(adapters=room))
    options = SchedulerOptions(
        ROWS, 64, 128, BLOCK, counts, True, "fcfs", depth, chunk, recurrent=True, checkpoints=checkpoints
    )
    scheduler = Scheduler(options, groups, gates=(*default_gates(), AdapterGate(2, room)))
    return Engine(scheduler, runner, adapters=room), memory


def ask(name: str, prompt: tuple[int, ...], adapter: int = 0, tokens: int = 12, n: int = 1) -> EngineRequest:
    params = SamplingParams(temperature=0.9, max_tokens=tokens, logprobs=3, n=n)
    adapters = (AdapterUse("d" * adapter, "nowhere"),) if adapter else ()
    return EngineRequest(name, prompt, params, seed=5, adapters=adapters)


Answers = dict[tuple[str, int], list[TokenLogprobs]]


def finish(engine: Engine, between: Callable[[], None] = lambda: None) -> Answers:
    answers: Answers = {}
    while engine.has_work:
        for request, refused in engine.adapters.ready():
            assert refused is None and engine.add(request)
        for output in engine.step():
            assert output.error is None
            answers.setdefault((output.request_id, output.sequence), []).extend(output.logprobs)
        between()
        engine.scheduler.check_integrity()
    return answers


@dataclass
class Watch:
    """Called after every step: preempts request "it1" so many times."""

    engine: Engine
    wanted: int
    forced: int = 0

    def __call__(self) -> None:
        running = [b for b in self.engine.scheduler.running if b.request.request_id == "it1"]
        if self.forced < self.wanted and running and running[0].known - running[0].num_prompt > 3 * self.forced:
            self.engine.scheduler.preempt("it1")
            self.forced += 1


PROMPT = tuple(tiny.prompt(27, 1))


@pytest.fixture(scope="module")
def truth(model: DecoderModel) -> Answers:
    """Answers without adapter and with either, each asked for alone and computed layer by layer."""
    engine, _ = make_engine(model, recorded=False)
    found: Answers = {}
    for adapter in range(3):
        engine.add(ask(f"it{adapter}", PROMPT, adapter))
        found |= finish(engine)
    assert all(len(answer) == 12 for answer in found.values())
    assert len({tuple(answer) for answer in found.values()}) == 3  # adapters change what is said
    return found


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_answers_are_identical_on_every_axis(model: DecoderModel, truth: Answers, chunk: int, depth: int) -> None:
    engine, _ = make_engine(model, chunk, depth)
    for preemptions, company in product((0, 2), (False, True)):
        watch = Watch(engine, preemptions)
        for adapter in range(3) if company else (1,):
            engine.add(ask(f"it{adapter}", PROMPT, adapter))
        if company:
            engine.add(ask("other", PROMPT[:9]))
        answers = finish(engine, watch)
        assert watch.forced == preemptions
        answers.pop(("other", 0), None)
        assert answers == {key: truth[key] for key in answers} and len(answers) == (3 if company else 1)
    assert engine.stats().prefix_hits == 0
    engine.close()


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(("chunk", "depth"), [(5, 0), (64, 0), (64, 1)])
def test_prefix_hits_change_no_answer(
    model: DecoderModel, truth: Answers, chunk: int, depth: int, recorded: bool
) -> None:
    """The same prompt again, alone, in company and preempted, and the next turn of a conversation."""
    engine, _ = make_engine(model, chunk, depth, recorded=recorded, checkpoints=5)
    for turn in range(4):
        engine.add(ask("it1", PROMPT, 1))
        if turn == 2:
            engine.add(ask("it2", PROMPT, 2))
        answers = finish(engine, Watch(engine, 2 if turn == 3 else 0))
        assert answers == {key: truth[key] for key in answers}
        assert engine.stats().prefix_hits >= 24 * turn
    said = tuple(entry.token for entry in truth["it1", 0])
    known = (*PROMPT, *said, 3, 1, 4)
    before = engine.stats().prefix_hits
    engine.add(ask("next", known, 1))
    answer = finish(engine)
    assert engine.stats().prefix_hits - before == len(PROMPT) + len(said) - 1
    fresh, _ = make_engine(model)
    fresh.add(ask("next", known, 1))
    assert answer == finish(fresh) and fresh.stats().prefix_hits == 0


def test_running_out_of_blocks_changes_no_answer(model: DecoderModel, truth: Answers) -> None:
    engine, _ = make_engine(model, blocks=17)
    for adapter in range(3):
        engine.add(ask(f"it{adapter}", PROMPT, adapter))
    assert finish(engine) == truth
    assert engine.stats().preemptions > 0


def test_without_checkpoints_sequences_of_one_request_do_not_share_blocks(model: DecoderModel, truth: Answers) -> None:
    engine, _ = make_engine(model)
    engine.add(ask("it0", PROMPT, n=3))
    answers = finish(engine)
    assert answers["it0", 0] == truth["it0", 0]
    assert len({tuple(answer) for answer in answers.values()}) == 3
    assert engine.stats().prefix_hits == 0


@pytest.mark.parametrize("isa", native.usable_isas())
def test_threads_and_instruction_sets_change_no_answer(model: DecoderModel, truth: Answers, isa: str) -> None:
    native.select_isa(isa)
    native.set_num_threads(3)
    try:
        engine, _ = make_engine(model)
        for adapter in range(3):
            engine.add(ask(f"it{adapter}", PROMPT, adapter))
        assert finish(engine) == truth
    finally:
        native.select_isa("auto")
        native.set_num_threads(1)


def test_the_reference_says_the_same_up_to_rounding(truth: Answers, model: DecoderModel) -> None:
    kinds = tuple(getattr(block.attention, "rule", "full") for block in model.blocks)
    engine, _ = make_engine(build(kinds, reference=True), 5, recorded=False)
    for adapter in range(3):
        engine.add(ask(f"it{adapter}", PROMPT, adapter))
    answers = finish(engine)
    for key, answer in answers.items():
        for ours, theirs in zip(answer, truth[key], strict=True):
            assert ours.token == theirs.token
            assert ours.logprob == pytest.approx(theirs.logprob, abs=2e-2)  # native products round inputs to 8 bits


def test_a_checkpoint_brings_a_row_back(model: DecoderModel) -> None:
    """Row 0's state is kept, overwritten by more tokens, and put back: the next tokens are computed as if never."""
    _, memory = make_engine(model)
    states = len(group_layers(model.cache_specs))
    for number, cache in enumerate(memory.caches):
        for array in cache.state:
            array.copy_(drawn(number, *array.shape))
    before = [array.clone() for cache in memory.caches for array in cache.state]
    memory.apply(CacheOp(CacheOpKind.CHECKPOINT, states, 0, 4, 0))
    for cache in memory.caches:
        for array in cache.state:
            array[0].fill_(float("nan"))
    memory.apply(CacheOp(CacheOpKind.COPY, states, 4, 0, 0))
    for array, old in zip((a for cache in memory.caches for a in cache.state), before, strict=True):
        assert torch.equal(array[0], old[0]) and torch.equal(array[4], old[0]) and torch.equal(array[1:4], old[1:4])


def test_declarations() -> None:
    spec = CacheSpec(CacheKind.STATE, state=((3, 40), (2, 5, 7)))
    assert spec.elements_per_token == 0
    full = CacheSpec(CacheKind.FULL, 1, 4, 4)
    assert group_layers([spec, full, spec]) == (CacheGroup(CacheKind.FULL, None, (1,), 8),)
    assert group_layers([spec]) == (CacheGroup(CacheKind.FULL, None, (), 0),)
    with pytest.raises(ValueError, match="only recurrent ones have shapes"):
        CacheSpec(CacheKind.FULL, 1, 4, 4, state=((1, 2),))
    with pytest.raises(ValueError, match="only recurrent ones have shapes"):
        CacheSpec(CacheKind.STATE, 0, 0, 0)
