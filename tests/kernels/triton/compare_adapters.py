"""Adapters of Triton against the reference."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from penstock.kernels.adapters import Adapted, AdapterSlots, ExpertAdapters, PlacedAdapters, TokenAdapters
from penstock.kernels.api import resolve_kernels
from penstock.kernels.registry import KernelContext
from tests.kernels.triton.compare import Sides, sides
from tests.kernels.triton.compare_linear import SPREAD, near

INPUTS, OUTPUTS, RANKS = 1100, 70, (3, 20, 16)
TOKENS = 9
SLOT = torch.tensor([[2, 0], [0, 0], [0, 3], [1, 4], [4, 0], [4, 1], [2, 2], [0, 1], [3, 0]])
SCALE = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.5, 0.5], [1.0, -0.25], [2.0, 1.0], *[[0.75, 1.5]] * 4])
WITHOUT = torch.tensor([1, 2, 8])  # tokens without an adapter that is there


def fill(
    slots: AdapterSlots, dtype: torch.dtype, move: torch.device | str = "cpu", *, columns: bool = False
) -> AdapterSlots:
    """Slots 1, 2 and 4; 3 is emptied again."""
    generator = torch.Generator().manual_seed(1)
    first = () if slots.experts == 1 else (slots.experts,)
    for slot, rank in zip((1, 3, 2, 4), (*RANKS, 5), strict=True):
        down = torch.randn(*first, rank, slots.inputs, generator=generator) / 30
        up = torch.randn(*first, slots.outputs, rank, generator=generator)
        factors = torch.rand(*first, slots.outputs, generator=generator) + 0.5 if columns and slot != 4 else None
        here = None if factors is None else factors.to(move)
        slots.fill(slot, down.to(dtype).to(move), up.to(dtype).to(move), 0.5 * slot, here)
    slots.clear(3)
    return slots


def of_tokens(both: Sides | None, rows: Tensor | None = None) -> TokenAdapters:
    """What the tokens have, on Triton's device or, without sides, on the CPU."""
    some = torch.arange(0) if rows is None else rows
    if both is None:
        return TokenAdapters(SLOT, SCALE, some)
    return TokenAdapters(both.here(SLOT), both.here(SCALE), both.here(some))


def compare_adapter(
    device: str, dtype: torch.dtype, stored: torch.dtype, offset: int = 0, some: bool = False, columns: bool = False
) -> None:
    both = sides(device, dtype, "make_adapters", "adapter")
    torch.manual_seed(4)
    width = OUTPUTS + 40
    x, out = torch.randn(TOKENS, INPUTS).to(dtype), torch.randn(TOKENS, width).to(dtype)
    bias, residual = torch.randn(width), torch.randn(TOKENS, width).to(dtype)
    rows = torch.tensor([0, 3, 5, 8]) if some else None
    x, out, residual = (x, out, residual) if rows is None else (x[rows], out[rows], residual[rows])
    ours = fill(both.ours.make_adapters(5, INPUTS, OUTPUTS), stored, both.torch_device, columns=columns)
    theirs = fill(both.reference.make_adapters(5, INPUTS, OUTPUTS), torch.float32, columns=columns)
    here = both.here(out)
    has = Adapted((PlacedAdapters(ours, offset),), of_tokens(both, rows))
    found = both.ours.adapter(both.here(x), here, has, both.here(bias), both.here(residual))
    assert found is here
    known = Adapted((PlacedAdapters(theirs, offset),), of_tokens(None, rows))
    expected = both.reference.adapter(x.float(), out.float(), known, bias, residual.float())
    near(both, found, expected, 8 * SPREAD[dtype])
    untouched = torch.isin(torch.arange(TOKENS) if rows is None else rows, WITHOUT)
    assert torch.equal(found.cpu()[untouched], out[untouched])
    assert torch.equal(found.cpu()[:, :offset], out[:, :offset])
    assert torch.equal(found.cpu()[:, offset + OUTPUTS :], out[:, offset + OUTPUTS :])


def compare_company(device: str) -> None:
    """The same bits of a token alone and among others."""
    both = sides(device, torch.float32, "adapter")
    ours = fill(both.ours.make_adapters(5, INPUTS, OUTPUTS), torch.float32, both.torch_device)
    placed = (PlacedAdapters(ours),)
    x, out = both.here(torch.randn(TOKENS, INPUTS)), both.here(torch.zeros(TOKENS, OUTPUTS))
    every = both.ours.adapter(x, out, Adapted(placed, of_tokens(both)))
    one, alone = both.here(torch.zeros(1, OUTPUTS)), slice(5, 6)
    has = TokenAdapters(both.here(SLOT[alone]), both.here(SCALE[alone]), both.here(torch.arange(0)))
    both.ours.adapter(x[alone], one, Adapted(placed, has))
    assert torch.equal(one[0], every[5]) and one.any()


def compare_gated(device: str, dtype: torch.dtype, fixed: bool) -> None:
    """Gates and ups with adapters each; tokens without have the bits that they have without any.

    With `fixed` sums the activation is otherwise taken in the same pass.
    """
    both = sides(device, dtype, "make_adapters", "gated_linear", "pack_linear")
    if fixed:
        context = KernelContext(device, str(dtype).removeprefix("torch."), batch_invariant=True)
        both = replace(both, ours=resolve_kernels(context))
    torch.manual_seed(5)
    size = 40
    weight, x = torch.randn(2 * size, INPUTS) / 30, torch.randn(TOKENS, INPUTS).to(dtype)
    bias = torch.randn(2 * size)

    def placed(ops: object, move: torch.device | str) -> tuple[PlacedAdapters, ...]:
        make = ops.make_adapters  # type: ignore[attr-defined]
        return tuple(PlacedAdapters(fill(make(5, INPUTS, size), torch.float32, move), at) for at in (0, size))

    ours = both.ours.pack_linear([both.here(weight.to(dtype))])
    given = both.here(x), ours, "silu", both.here(bias.to(dtype))
    has = Adapted(placed(both.ours, both.torch_device), of_tokens(both))
    found = both.ours.gated_linear(given[0], given[1], given[2], given[3], adapters=has)
    known = Adapted(placed(both.reference, "cpu"), of_tokens(None))
    theirs = both.reference.pack_linear([weight.to(dtype).float()])
    expected = both.reference.gated_linear(x.float(), theirs, "silu", bias.to(dtype).float(), adapters=known)
    near(both, found, expected, 8 * SPREAD[dtype])
    plain = both.ours.gated_linear(given[0], given[1], given[2], given[3])
    assert torch.equal(found[WITHOUT], plain[WITHOUT]) and not torch.equal(found[0], plain[0])


def compare_expert_adapters(device: str, dtype: torch.dtype, columns: bool) -> None:
    both = sides(device, dtype, "make_adapters", "grouped_experts", "pack_experts")
    torch.manual_seed(6)
    experts, outer, inner = 4, 64, 48
    gate_up, down = torch.randn(experts * 2 * inner, outer) / 8, torch.randn(experts * outer, inner) / 7
    biases = torch.randn(experts, 2 * inner), torch.randn(experts, outer)
    x = torch.randn(TOKENS, outer).to(dtype)
    ids = torch.stack([torch.randperm(experts)[:2] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, 2)

    def has(ops: object, move: torch.device | str, tokens: TokenAdapters) -> ExpertAdapters:
        make = ops.make_adapters  # type: ignore[attr-defined]

        def filled(inputs: int, outputs: int) -> AdapterSlots:
            slots: AdapterSlots = make(5, inputs, outputs, 32, experts)
            return fill(slots, torch.float32, move, columns=columns)

        of_gates = tuple(PlacedAdapters(filled(outer, inner), at) for at in (0, inner))
        return ExpertAdapters(of_gates, (PlacedAdapters(filled(inner, outer)),), tokens)

    def run(ops: object, move: object, adapters: ExpertAdapters | None, kind: torch.dtype) -> Tensor:
        here = (lambda part: part) if move is None else both.here
        packed = [
            ops.pack_experts([here(part.to(dtype).to(kind))], experts)  # type: ignore[attr-defined]
            for part in (gate_up, down)
        ]
        out: Tensor = ops.grouped_experts(  # type: ignore[attr-defined]
            here(x.to(kind)), here(weights), here(ids), packed[0], packed[1], "silu", here(biases[0]), here(biases[1]),
            adapters=adapters,
        )  # fmt: skip
        return out

    found = run(both.ours, device, has(both.ours, both.torch_device, of_tokens(both)), dtype)
    expected = run(both.reference, None, has(both.reference, "cpu", of_tokens(None)), torch.float32)
    near(both, found, expected, 16 * SPREAD[dtype])
    plain = run(both.ours, device, None, dtype)
    assert torch.equal(found[WITHOUT], plain[WITHOUT]) and not torch.equal(found[0], plain[0])


def compare_head_adapters(device: str, dtype: torch.dtype) -> None:
    both = sides(device, dtype, "make_adapters", "head_linear", "pack_heads")
    torch.manual_seed(7)
    heads, outputs, inputs, turned = 3, 48, 32, 8
    weight, x = torch.randn(heads * outputs, inputs) / 6, torch.randn(TOKENS, heads * (inputs + turned)).to(dtype)
    angles = torch.randn(TOKENS, 1, turned // 2)
    cos, sin = torch.cat((angles.cos(),) * 2, dim=2), torch.cat((-angles.sin(), angles.sin()), dim=2)
    ours = fill(both.ours.make_adapters(5, inputs, outputs, 32, heads), torch.float32, both.torch_device)
    theirs = fill(both.reference.make_adapters(5, inputs, outputs, 32, heads), torch.float32)
    packed = both.ours.pack_heads([both.here(weight.to(dtype))], heads)
    tables = both.here(cos), both.here(sin)
    has = Adapted((PlacedAdapters(ours),), of_tokens(both))
    found = both.ours.head_linear(both.here(x), packed, tables[0], tables[1], adapters=has)
    known = Adapted((PlacedAdapters(theirs),), of_tokens(None))
    stack = both.reference.pack_heads([weight.to(dtype).float()], heads)
    near(both, found, both.reference.head_linear(x.float(), stack, cos, sin, adapters=known), 8 * SPREAD[dtype])
    plain = both.ours.head_linear(both.here(x), packed, tables[0], tables[1])
    assert torch.equal(found[WITHOUT], plain[WITHOUT]) and not torch.equal(found[0], plain[0])


def compare_table_adapter(device: str, dtype: torch.dtype, stored: torch.dtype, columns: bool = False) -> None:
    both = sides(device, dtype, "make_adapters", "table_adapter")
    torch.manual_seed(4)
    numbers, out = torch.randint(INPUTS, (TOKENS,)), torch.randn(TOKENS, OUTPUTS).to(dtype)
    ours = fill(both.ours.make_adapters(5, INPUTS, OUTPUTS), stored, both.torch_device, columns=columns)
    theirs = fill(both.reference.make_adapters(5, INPUTS, OUTPUTS), torch.float32, columns=columns)
    has = Adapted((PlacedAdapters(ours),), of_tokens(both))
    found = both.ours.table_adapter(both.here(numbers), both.here(out), has, 1.5)
    expected = both.reference.table_adapter(
        numbers, out.float(), Adapted((PlacedAdapters(theirs),), of_tokens(None)), 1.5
    )
    near(both, found, expected, 8 * SPREAD[dtype])
    assert torch.equal(found.cpu()[WITHOUT], out[WITHOUT])
