"""Low-rank adapters: native against the reference and plain arithmetic, tokens with adapters of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.config.adapters import MOST_ADAPTERS
from penstock.config.errors import ConfigError
from penstock.kernels.adapters import (
    Adapted,
    AdapterSlots,
    ExpertAdapters,
    PlacedAdapters,
    TokenAdapters,
    column_factors,
)
from penstock.kernels.api import resolve_kernels
from penstock.kernels.cpu import low_rank, native
from penstock.kernels.reference import low_rank as reference
from penstock.kernels.registry import KernelContext
from penstock.layers.batch import Batch

INPUTS, OUTPUTS, TOKENS = 72, 300, 30
SLOT = torch.tensor([[1, 0]] + [[2, 0]] * 7 + [[0, 0]] + [[3, 2]] * 4 + [[1, 4]] * 5 + [[0, 4]] * 12)
SCALE = torch.linspace(0.5, 1.5, 2 * TOKENS).view(TOKENS, 2)
WITHOUT = 8
RANKS = {1: 8, 2: 3, 3: 17, 4: 64}
OPS = {"native": low_rank, "reference": reference}


def filled(
    ops: Any,
    dtype: torch.dtype = torch.float32,
    *,
    sizes: tuple[int, int] = (INPUTS, OUTPUTS),
    experts: int = 1,
    columns: bool = False,
) -> AdapterSlots:
    generator = torch.Generator().manual_seed(5)
    inputs, outputs = sizes
    first = () if experts == 1 else (experts,)
    slots: AdapterSlots = ops.make_adapters(6, inputs, outputs, 64, experts)
    for slot, rank in RANKS.items():
        down = torch.randn(*first, rank, inputs, generator=generator) * inputs**-0.5
        up = torch.randn(*first, outputs, rank, generator=generator)
        factors = torch.rand(*first, outputs, generator=generator) + 0.5 if columns and slot != 2 else None
        slots.fill(slot, down.to(dtype), up.to(dtype), 0.1 * slot, factors)
    return slots


def has(slots: AdapterSlots, offset: int = 0, rows: Tensor | None = None) -> Adapted:
    return Adapted(
        (PlacedAdapters(slots, offset),), TokenAdapters(SLOT, SCALE, torch.arange(0) if rows is None else rows)
    )


def activations(width: int = OUTPUTS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(TOKENS, INPUTS, generator=generator), torch.randn(TOKENS, width, generator=generator)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
def test_every_token_gets_its_own_adapters(ops, dtype, columns):
    adapters = filled(ops, dtype, columns=columns)
    x, out = activations()
    bias, residual = torch.linspace(-1, 1, OUTPUTS), torch.ones(TOKENS, OUTPUTS)
    found = ops.adapter(x, out.clone(), has(adapters), bias, residual)
    product = (out - bias - residual).double()
    for token in range(TOKENS):
        expected = out[token].double()
        for slot, weight in zip(SLOT[token].tolist(), SCALE[token].tolist(), strict=True):
            if slot:
                entry = adapters.entries[slot]
                change = entry.scale * (x[token].double() @ entry.down.double().T) @ entry.up.double()
                factors = 1.0 if entry.columns is None else entry.columns.double()
                expected = expected + weight * (factors * change + (factors - 1.0) * product[token])
        torch.testing.assert_close(found[token].double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[WITHOUT], out[WITHOUT])


def test_instruction_sets_threads_and_company_give_the_same_bits():
    x, out = activations()
    results = []
    for threads, isa in enumerate(native.usable_isas(), start=1):
        native.select_isa(isa)
        native.set_num_threads(threads)
        results.append(low_rank.adapter(x, out.clone(), has(filled(low_rank, columns=True))))
    native.select_isa("auto")
    native.set_num_threads(1)
    assert len(results) > 1 and all(torch.equal(result, results[0]) for result in results)
    placed = (PlacedAdapters(filled(low_rank, columns=True)),)
    for token in range(TOKENS):
        one = slice(token, token + 1)
        own = TokenAdapters(SLOT[one], SCALE[one], torch.arange(0))
        assert torch.equal(low_rank.adapter(x[one], out[one].clone(), Adapted(placed, own)), results[0][one])


@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
def test_a_part_of_a_merged_projection(ops):
    x, out = activations(OUTPUTS + 50)
    found = ops.adapter(x, out.clone(), has(filled(ops), 20))
    alone = ops.adapter(x, out[:, 20 : 20 + OUTPUTS].clone(), has(filled(ops)))
    assert torch.equal(found[:, 20 : 20 + OUTPUTS], alone)
    assert torch.equal(found[:, :20], out[:, :20]) and torch.equal(found[:, 20 + OUTPUTS :], out[:, 20 + OUTPUTS :])


@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
def test_some_tokens_of_a_step(ops):
    x, out = activations()
    every = ops.adapter(x, out.clone(), has(filled(ops)))
    rows = torch.tensor([29, 0, 8, 12, 7])
    some = ops.adapter(x[rows], out[rows], has(filled(ops), rows=rows))
    torch.testing.assert_close(some, every[rows], rtol=1e-5, atol=1e-5)
    assert ops is reference or torch.equal(some, every[rows])


@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
def test_an_emptied_slot_changes_nothing(ops):
    adapters = filled(ops, columns=True)
    for slot in RANKS:
        adapters.clear(slot)
    x, out = activations()
    assert torch.equal(ops.adapter(x, out.clone(), has(adapters)), out)
    absent = TokenAdapters(torch.full((TOKENS, 1), 99), torch.ones(TOKENS, 1), torch.arange(0))
    assert torch.equal(ops.adapter(x, out.clone(), Adapted((PlacedAdapters(filled(ops)),), absent)), out)


@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
def test_an_adapter_with_a_magnitude_is_the_weight_it_was_trained_as(ops):
    """DoRA: m · (W + scale · B · A) / its norms by rows."""
    generator = torch.Generator().manual_seed(9)
    weight, magnitude = torch.randn(OUTPUTS, INPUTS, generator=generator), torch.rand(OUTPUTS, generator=generator) + 1
    down, up = torch.randn(4, INPUTS, generator=generator), torch.randn(OUTPUTS, 4, generator=generator)
    slots = ops.make_adapters(2, INPUTS, OUTPUTS)
    slots.fill(1, down, up, 0.5, column_factors(weight.split(5), down, up, 0.5, magnitude))
    merged = weight.double() + 0.5 * up.double() @ down.double()
    merged = magnitude.double().unsqueeze(1) * merged / merged.norm(dim=1, keepdim=True)
    x, residual = activations()
    bias = torch.randn(OUTPUTS, generator=generator)
    one = TokenAdapters(torch.ones(TOKENS, 1, dtype=torch.int64), torch.ones(TOKENS, 1), torch.arange(0))
    out = ops.adapter(x, x @ weight.T + bias + residual, Adapted((PlacedAdapters(slots),), one), bias, residual)
    torch.testing.assert_close(out.double(), x.double() @ merged.T + bias + residual, rtol=1e-4, atol=1e-4)


def both_sides() -> dict[str, Any]:
    native_ops = resolve_kernels(KernelContext("cpu", "float32"))
    return {"native": native_ops, "reference": resolve_kernels(KernelContext("cpu", "float32", prefer_reference=True))}


@pytest.mark.parametrize("merged", [True, False])
def test_gates_and_ups_are_changed_before_their_activation(merged, isa):
    sides = both_sides()
    generator = torch.Generator().manual_seed(7)
    size = 144 if merged else 140  # halves of one matrix begin with a panel
    weight, bias = torch.randn(2 * size, INPUTS, generator=generator) / 8, torch.randn(2 * size, generator=generator)
    x, _ = activations()
    found = {}
    for name, ops in sides.items():
        parts = [weight] if merged else list(weight.chunk(2))
        packed = ops.pack_linear(parts)
        placed = tuple(PlacedAdapters(filled(ops, sizes=(INPUTS, size), columns=True), at) for at in (0, size))
        adapters = Adapted(placed, TokenAdapters(SLOT, SCALE, torch.arange(0)))
        found[name] = ops.gated_linear(x, packed, "silu", bias, adapters=adapters)
        plain = ops.gated_linear(x, packed, "silu", bias)
        assert torch.equal(found[name][WITHOUT], plain[WITHOUT])
        assert not torch.equal(found[name][0], plain[0])
    torch.testing.assert_close(found["native"], found["reference"], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("gated", [True, False])
def test_experts_have_adapters_each(gated, isa):
    sides = both_sides()
    generator = torch.Generator().manual_seed(8)
    experts, top_k, inner = 5, 2, 88
    width = 2 * inner if gated else inner
    gate_up = torch.randn(experts * width, INPUTS, generator=generator) / 8
    down = torch.randn(experts * INPUTS, inner, generator=generator) / 9
    biases = torch.randn(experts, width, generator=generator), torch.randn(experts, INPUTS, generator=generator)
    x, _ = activations()
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, top_k, generator=generator)
    found = {}
    for name, ops in sides.items():
        stacked = gate_up.view(experts, -1, INPUTS)
        halves = [part.reshape(-1, INPUTS) for part in stacked.chunk(2, dim=1)] if gated else [gate_up]
        packed = ops.pack_experts(halves, experts), ops.pack_experts([down], experts)
        of_gates = tuple(
            PlacedAdapters(filled(ops, sizes=(INPUTS, inner), experts=experts, columns=True), at)
            for at in range(0, width, inner)
        )
        of_down = (PlacedAdapters(filled(ops, sizes=(inner, INPUTS), experts=experts, columns=True)),)
        adapters = ExpertAdapters(of_gates, of_down, TokenAdapters(SLOT, SCALE, torch.arange(0)))

        def run(given, ops=ops, packed=packed):
            return ops.grouped_experts(
                x,
                weights,
                ids,
                packed[0],
                packed[1],
                "silu",
                biases[0],
                biases[1],
                residual=x,
                gated=gated,
                adapters=given,
            )

        found[name], plain = run(adapters), run(None)
        assert torch.equal(found[name][WITHOUT], plain[WITHOUT])
        assert not torch.equal(found[name][0], plain[0])
        if name == "native":
            for token in (0, 10, 29):
                one = slice(token, token + 1)
                own = ExpertAdapters(of_gates, of_down, TokenAdapters(SLOT[one], SCALE[one], torch.arange(0)))
                alone = ops.grouped_experts(
                    x[one].clone(), weights[one].clone(), ids[one].clone(), packed[0], packed[1], "silu", biases[0],
                    biases[1], residual=x[one].clone(), gated=gated, adapters=own,
                )  # fmt: skip
                assert torch.equal(alone[0], found[name][token])
    torch.testing.assert_close(found["native"], found["reference"], rtol=5e-4, atol=5e-4)


@pytest.mark.parametrize("turned", [0, 8])
def test_heads_have_adapters_each(turned, isa):
    sides = both_sides()
    generator = torch.Generator().manual_seed(8)
    heads, outputs, inputs = 3, 40, 24
    weight = torch.randn(heads * outputs, inputs, generator=generator) / 5
    x = torch.randn(TOKENS, heads * (inputs + turned), generator=generator)
    angles = torch.randn(TOKENS, 1, turned // 2, generator=generator)
    cos, sin = torch.cat((angles.cos(),) * 2, dim=2), torch.cat((-angles.sin(), angles.sin()), dim=2)
    tables = (cos, sin) if turned else (None, None)
    found = {}
    for name, ops in sides.items():
        packed = ops.pack_heads([weight], heads)
        adapters = has(filled(ops, sizes=(inputs, outputs), experts=heads, columns=True))
        found[name] = ops.head_linear(x, packed, tables[0], tables[1], adapters=adapters)
        plain = ops.head_linear(x, packed, tables[0], tables[1])
        assert torch.equal(found[name][WITHOUT], plain[WITHOUT])
        assert not torch.equal(found[name][0], plain[0])
    torch.testing.assert_close(found["native"], found["reference"], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("slot", "down", "up", "message"),
    [
        (6, (4, INPUTS), (OUTPUTS, 4), "slot 6 is not one of 1 to 5"),
        (0, (4, INPUTS), (OUTPUTS, 4), "slot 0 is not one of 1 to 5"),
        (1, (4, INPUTS + 1), (OUTPUTS, 4), "needs \\(rank, 72\\)"),
        (1, (4, INPUTS), (OUTPUTS, 5), "needs \\(rank, 72\\)"),
        (1, (65, INPUTS), (OUTPUTS, 65), "rank 65; at most 64"),
    ],
)
def test_what_does_not_fit_is_refused(slot, down, up, message):
    with pytest.raises(ConfigError, match=message):
        low_rank.make_adapters(6, INPUTS, OUTPUTS, 64).fill(slot, torch.zeros(down), torch.zeros(up), 1.0)


def test_adapters_of_experts_have_one_for_each():
    slots = low_rank.make_adapters(2, 4, 4, 8, 3)
    with pytest.raises(ConfigError, match="for each of 3 experts"):
        slots.fill(1, torch.zeros(2, 4), torch.zeros(4, 2), 1.0)
    with pytest.raises(ConfigError, match=r"factors of \(3,\) for 4 outputs"):
        slots.fill(1, torch.zeros(3, 2, 4), torch.zeros(3, 4, 2), 1.0, torch.zeros(3))


def test_types_must_agree():
    with pytest.raises(ConfigError, match=r"torch\.float64"):
        low_rank.make_adapters(2, 4, 4).fill(1, torch.zeros(2, 4).double(), torch.zeros(4, 2).double(), 1.0)


@pytest.mark.parametrize(
    ("slot", "scale", "message"),
    [
        (torch.ones(3, 5, dtype=torch.int64), torch.ones(3, 5), r"5 adapters; allowed are at most 4"),
        (torch.ones(3, 4, dtype=torch.int64), torch.ones(3, 3), r"int64 \(3, 4\) and their scales float32 \(3, 3\)"),
        (torch.ones(3, dtype=torch.int64), torch.ones(3), r"int64 \(3,\)"),
        (torch.ones(3, 1, dtype=torch.int32), torch.ones(3, 1), r"int32 \(3, 1\) .*; allowed are int64 and float32"),
        (torch.ones(3, 1, dtype=torch.int64), torch.ones(3, 1).double(), r"float64 \(3, 1\)"),
    ],
)
def test_what_tokens_may_have_of_adapters(slot, scale, message):
    """Before any implementation sees it, and before a step that is recorded."""
    with pytest.raises(ValueError, match=message):
        TokenAdapters(slot, scale, torch.arange(0))
    some = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        Batch(some, some[None], some, some, (), some, some, some, (3,), (3,), adapter_slot=slot, adapter_scale=scale)


def test_the_native_library_has_the_same_limit():
    step = native.library().StepInputs()
    step.set_adapters(0, 0, MOST_ADAPTERS)
    with pytest.raises(ValueError, match=f"up to {MOST_ADAPTERS} adapters, not {MOST_ADAPTERS + 1}"):
        step.set_adapters(0, 0, MOST_ADAPTERS + 1)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ops", OPS.values(), ids=OPS)
def test_a_table_is_a_projection_of_tokens(ops: Any, dtype: torch.dtype, columns: bool) -> None:
    adapters = filled(ops, dtype, columns=columns)
    numbers = torch.randint(INPUTS, (TOKENS,), generator=torch.Generator().manual_seed(8))
    _, out = activations()
    found = ops.table_adapter(numbers, out.clone(), has(adapters), 1.5)
    one_hot = 1.5 * torch.nn.functional.one_hot(numbers, INPUTS).float()
    torch.testing.assert_close(found, reference.adapter(one_hot, out.clone(), has(adapters)), rtol=1e-5, atol=1e-5)
    assert torch.equal(found[WITHOUT], out[WITHOUT])
    for token in range(TOKENS):
        one = slice(token, token + 1)
        own = Adapted((PlacedAdapters(adapters),), TokenAdapters(SLOT[one], SCALE[one], torch.arange(0)))
        assert torch.equal(ops.table_adapter(numbers[one], out[one].clone(), own, 1.5), found[one]) or ops is reference
