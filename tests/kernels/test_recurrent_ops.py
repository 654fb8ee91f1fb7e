"""Recurrent ops: native ones against the reference on every instruction set; the same bits for any cut of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from penstock.kernels.cache import StateRows
from penstock.kernels.cpu import native, recurrent
from penstock.kernels.cpu.recording import NotRecordableError, Recording
from penstock.kernels.reference import recurrent as reference

TOKENS = 23


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    yield native.set_num_threads
    native.set_num_threads(1)


@dataclass
class Case:
    """An op over the tokens of two sequences, whose `inputs` are [2, TOKENS, width].

    `run` takes a module of ops, the inputs of a step's tokens, the state and the rows.
    """

    inputs: list[Tensor]
    state: tuple[int, ...]
    run: Callable[..., Tensor]

    def step(
        self,
        ops: object,
        state: Tensor,
        spans: Sequence[tuple[int, int, int]],
        slots: Sequence[int],
        after: Tensor | None = None,
    ) -> Tensor:
        """One step: spans are (sequence, first token, last + 1)."""
        parts = [torch.cat([x[row, begin:end] for row, begin, end in spans]) for x in self.inputs]
        counts = torch.tensor([0, *(end - begin for _, begin, end in spans)])
        rows = StateRows(
            torch.tensor([slots[row] for row, _, _ in spans]),
            counts.cumsum(0).int(),
            torch.tensor([end for _, _, end in spans], dtype=torch.int32),
            after,
        )
        return self.run(ops, parts, state, rows)

    def memory(self) -> Tensor:
        """Four slots of NaN: what a starting row must not read."""
        return torch.full((4, *self.state), float("nan"))

    def whole(self, ops: object) -> tuple[Tensor, Tensor]:
        """Both sequences in one step: outputs and states."""
        state = self.memory()
        return self.step(ops, state, [(0, 0, TOKENS), (1, 0, TOKENS)], (2, 1)), state[[2, 1]]


def randoms(seed: int, *widths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, TOKENS, width, generator=generator) for width in widths]


def conv(channels: int, taps: int, *, bias: bool, activation: str | None, gated: bool) -> Case:
    weight, offsets = torch.randn(taps, channels), torch.randn(channels) if bias else None

    def run(ops, parts, state, rows):
        before, x, after = ops.split(parts[0], (channels,) * 3)
        return ops.short_conv(
            x, weight, offsets, state, rows, activation, before if gated else None, after if gated else None
        )

    return Case(randoms(1, 3 * channels), (taps - 1, channels), run)


def scan(heads: int, size: int, states: int, groups: int, *, gate: bool, limit=(0.0, float("inf"))) -> Case:
    """Mamba-2, its inputs parts of one activation."""
    width = heads * size
    a, skip, bias = -torch.rand(heads) * 3, torch.randn(heads), torch.randn(heads)
    sizes = (width, width, groups * states, groups * states, heads)

    def run(ops, parts, state, rows):
        z, x, b, c, dt = ops.split(parts[0], sizes)
        return ops.selective_scan(x, dt, a, b, c, state, rows, bias, skip, z if gate else None, limit)

    return Case(randoms(2, sum(sizes)), (heads, states, size), run)


def channel_scan(channels: int, states: int, *, full: bool) -> Case:
    """Mamba: every channel has steps and decays of its own."""
    a = -torch.rand(states, channels) * 4
    skip, bias = (torch.randn(channels), torch.randn(channels)) if full else (None, None)

    def run(ops, parts, state, rows):
        x, dt, b, c, z = parts
        return ops.selective_scan(x, dt, a, b, c, state, rows, bias, skip, z if full else None)

    return Case(randoms(3, channels, channels, states, states, channels), (1, states, channels), run)


def delta(heads: int, key_heads: int, dim: int, width: int, *, tiled: bool = False) -> Case:
    a, bias = -torch.rand(heads) * 2, torch.randn(heads)
    sizes = (key_heads * dim, key_heads * dim, heads * width)

    def run(ops, parts, state, rows):
        q, k, v = ops.split(parts[0], sizes)
        step, beta = ops.split(parts[1], (heads, heads))
        return ops.gated_delta_rule(q, k, v, step, beta, a, state, rows, bias, tiled=tiled)

    return Case(randoms(4, sum(sizes), 2 * heads), (heads, dim, width), run)


CASES: dict[str, Callable[[], Case]] = {
    "conv 4": lambda: conv(200, 4, bias=True, activation="silu", gated=False),
    "conv 3 gated": lambda: conv(96, 3, bias=False, activation=None, gated=True),
    "conv 2, few channels": lambda: conv(7, 2, bias=True, activation=None, gated=False),
    "scan": lambda: scan(6, 64, 48, 2, gate=False),
    "scan, uneven": lambda: scan(4, 90, 17, 1, gate=True),
    "scan, small heads": lambda: scan(8, 16, 16, 8, gate=False, limit=(0.3, 0.9)),
    "channels": lambda: channel_scan(150, 16, full=True),
    "channels, bare": lambda: channel_scan(64, 5, full=False),
    "delta": lambda: delta(4, 2, 32, 64),
    "delta, uneven": lambda: delta(3, 3, 20, 72),
    "delta, tiled": lambda: delta(6, 2, 16, 48, tiled=True),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(0)
    return CASES[request.param]()


def test_native_equals_the_reference(isa: str, case: Case):
    out, state = case.whole(recurrent)
    expected, expected_state = case.whole(reference)
    torch.testing.assert_close(out, expected, rtol=3e-5, atol=3e-5)
    torch.testing.assert_close(state, expected_state, rtol=3e-5, atol=3e-5)


def test_tiled_heads_are_the_others_in_another_order():
    """Value heads 0 … 5 read key heads 0, 1, 0, 1 …; put side by side they are 0, 2, 4, 1, 3, 5."""
    order = torch.tensor([0, 2, 4, 1, 3, 5])
    tokens, heads, keys, dim, width = 7, 6, 2, 8, 5
    generator = torch.Generator().manual_seed(0)
    q, k, v, step, beta = (
        torch.randn(tokens, size, generator=generator) for size in (keys * dim, keys * dim, heads * width, heads, heads)
    )
    a, rows = -torch.rand(heads, generator=generator), StateRows(*(torch.tensor(x) for x in ([0], [0, 7], [7])))
    states = torch.zeros(2, heads, dim, width).split(1)
    tiled = reference.gated_delta_rule(q, k, v, step, beta, a, states[0], rows, tiled=True)
    values = v.view(tokens, heads, width)[:, order].flatten(1)
    beside = reference.gated_delta_rule(q, k, values, step[:, order], beta[:, order], a[order], states[1], rows)
    torch.testing.assert_close(tiled.view(tokens, heads, width)[:, order].flatten(1), beside)
    torch.testing.assert_close(states[0][:, order], states[1])


def test_instruction_sets_give_the_same_bits(case: Case):
    results = {}
    for name in native.usable_isas():
        native.select_isa(name)
        results[name] = case.whole(recurrent)
    native.select_isa("auto")
    assert len(results) > 1
    first = next(iter(results.values()))
    assert all(torch.equal(out, first[0]) and torch.equal(state, first[1]) for out, state in results.values())


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("ops", "same"), [(recurrent, torch.equal), (reference, close)], ids=["native", "reference"])
def test_any_cut_into_steps_gives_the_same(case: Case, ops, same, threads: Callable[[int], None]):
    """The same bits natively; torch's functions are themselves not the same to the bit for any number of tokens."""
    out, state = case.whole(ops)
    whole = out.split(TOKENS)
    for index, chunks in enumerate(([TOKENS], [1] * TOKENS, [2, 1, 9, 1, 1, 6, 3])):
        threads(1 + index)
        memory, pieces, begin = case.memory(), [], 0
        for length in chunks:  # the second sequence alone, then in company of the first
            pieces.append(case.step(ops, memory, [(1, begin, begin + length)], (0, 3)))
            begin += length
        assert same(torch.cat(pieces), whole[1])
        assert same(memory[3], state[1])
        pair = case.step(ops, memory, [(1, 0, 5), (0, 0, TOKENS)], (0, 3))  # into slots that hold old states
        assert same(pair, torch.cat((whole[1][:5], whole[0])))
        rest = case.step(ops, memory, [(1, 5, TOKENS)], (0, 3))
        assert same(rest, whole[1][5:])
        assert same(memory[[0, 3]], state)
        assert memory[[1, 2]].isnan().all()


@pytest.mark.parametrize(("ops", "same"), [(recurrent, torch.equal), (reference, close)], ids=["native", "reference"])
@pytest.mark.parametrize("begin", [0, 1, 5])
def test_states_go_where_each_token_says(case: Case, ops, same, begin: int):
    """Behind drafts: a slot each; the slot that was read keeps what it had, and the row beside goes on in its own."""
    out, state = case.whole(ops)
    memory, drafts, places = torch.full((9, *case.state), float("nan")), 4, (5, 4, 7, 8)
    if begin:
        case.step(ops, memory, [(0, 0, begin), (1, 0, begin)], (1, 3))
    before = memory[1].clone()
    after = torch.tensor([*(3,) * (TOKENS - begin), places[0], *places])  # two known tokens and three drafts
    end = begin + 1 + drafts
    found = case.step(ops, memory, [(1, begin, TOKENS), (0, begin, end)], (1, 3), after)
    assert same(found, torch.cat((out[TOKENS + begin :], out[begin:end])))
    assert same(memory[3], state[1])
    assert torch.equal(memory[1], before) if begin else not memory[1].nan_to_num().any()
    for count, place in enumerate(places, begin + 2):
        alone = case.memory()
        case.step(ops, alone, [(0, 0, count)], (0, 0))
        assert same(memory[place], alone[0])
        memory[1] = memory[place]  # and the row goes on from there
        rest = case.step(ops, memory, [(0, count, TOKENS)], (1, 3))
        assert same(rest, out[count:TOKENS])
    assert memory[[0, 2, 6]].isnan().all()


@pytest.mark.parametrize(("size", "group"), [(64, None), (96, 24), (33, 11), (256, 128)])
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_gated_norm(isa: str, size: int, group: int | None, gate_first: bool, gated: bool):
    generator = torch.Generator().manual_seed(size)
    both, weight = torch.randn(9, 2 * size, generator=generator), torch.randn(size, generator=generator)
    x, gate = both.split(size, dim=1)
    arguments = x, gate if gated else None, weight, 1e-5, group, gate_first
    out = recurrent.gated_rms_norm(*arguments)
    torch.testing.assert_close(out, reference.gated_rms_norm(*arguments), rtol=1e-5, atol=1e-6)
    one = recurrent.gated_rms_norm(x[4:5], gate[4:5] if gated else None, *arguments[2:])
    assert torch.equal(out[4:5], one)


def test_steps_far_from_zero_are_exact_in_proportion():
    """ln(1 + e^x) where e^x is tiny, 1, and huge; h = dt · x, as everything else is 1 or 0."""
    dt = torch.tensor([-80.0, -30.0, -9.0, -1e-6, 0.0, 0.5, 20.0, 87.0]).unsqueeze(1)
    one, slots = torch.ones(1, 1), torch.arange(8)
    rows = StateRows(slots, torch.arange(9, dtype=torch.int32), torch.ones(8, dtype=torch.int32))
    state, ones = torch.zeros(8, 1, 1, 1), one.expand(8, 1).contiguous()
    out = recurrent.selective_scan(ones, dt, -one[0], ones, ones, state, rows)
    torch.testing.assert_close(out.double(), torch.nn.functional.softplus(dt.double()), rtol=1e-6, atol=0.0)


def test_a_step_that_is_no_number_stays_none():
    dt, one = torch.tensor([[float("nan")]]), torch.ones(1, 1)
    rows = StateRows(torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1]).int(), torch.ones(1).int())
    assert recurrent.selective_scan(one, dt, -one[0], one, one, torch.zeros(1, 1, 1, 1), rows).isnan().all()


def test_a_width_of_five_is_refused():
    case = conv(8, 5, bias=False, activation=None, gated=False)
    with pytest.raises(ValueError, match="5 tokens is not served: 2 to 4"):
        case.whole(recurrent)


def test_parts_go_only_to_ops_that_take_them():
    tape = Recording()
    part, _ = recurrent.split(tape.new(8), (4, 4))
    with pytest.raises(NotRecordableError, match="a part of an activation"):
        tape.index(part)
