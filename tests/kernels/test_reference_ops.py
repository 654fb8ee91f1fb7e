"""Reference ops against formulas written out element by element, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from penstock.kernels.api import KernelSet, resolve_kernels
from penstock.kernels.cache import KvTensors
from penstock.kernels.reference import dense
from penstock.kernels.registry import KernelContext

DTYPES = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def ops() -> KernelSet:
    kernels = resolve_kernels(KernelContext("cpu", "float32", prefer_reference=True))
    assert all("reference" in choice.chosen.name for choice in kernels.choices)
    return kernels


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), exact.double(), rtol=DTYPES[dtype], atol=DTYPES[dtype] * 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (1, 7), (5, 64), (33, 129)])
def test_norms(ops: KernelSet, dtype: torch.dtype, tokens: int, width: int):
    x, residual = rand(tokens, width, dtype=dtype), rand(tokens, width, dtype=dtype, seed=1)
    weight, bias = rand(width, seed=2), rand(width, seed=3)
    total = (x + residual).double()
    exact = total / (total.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight
    normed, summed = ops.rms_norm(x, weight, 1e-5, residual)
    close(normed, exact, dtype)
    assert torch.equal(summed, x + residual)
    assert torch.equal(ops.rms_norm(x + residual, weight, 1e-5)[0], normed)
    centred = x.double() - x.double().mean(1, keepdim=True)
    exact = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight
    close(ops.layer_norm(x, weight, bias, 1e-5), exact + bias, dtype)
    close(ops.layer_norm(x, weight, None, 1e-5), exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prefer_reference", [True, False])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 8, 3), (1, 2048, 65), (4, 33, 17), (70, 64, 96)])
def test_linear(dtype: torch.dtype, prefer_reference: bool, tokens: int, inputs: int, outputs: int):
    context = KernelContext("cpu", str(dtype).removeprefix("torch."), prefer_reference=prefer_reference)
    ops = resolve_kernels(context)
    x, weight = rand(tokens, inputs, dtype=dtype), rand(outputs, inputs, dtype=dtype, seed=1) / inputs**0.5
    bias, residual = rand(outputs, dtype=dtype, seed=2), rand(tokens, outputs, dtype=dtype, seed=3)
    exact = x.double() @ weight.double().t()
    kept = residual.clone()
    for stored in (ops.pack_linear([weight]), ops.pack_table([weight])):
        close(ops.linear(x, stored), exact, dtype)
        close(ops.linear(x, stored, bias), exact + bias.double(), dtype)
        close(ops.linear(x, stored, None, residual), exact + residual.double(), dtype)
        close(ops.linear(x, stored, bias, residual), exact + bias.double() + residual.double(), dtype)
    assert torch.equal(residual, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_linear_rows_do_not_depend_on_the_batch(dtype: torch.dtype):
    ops = resolve_kernels(KernelContext("cpu", str(dtype).removeprefix("torch.")))
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no products of bfloat16")
    assert "reference" not in next(choice for choice in ops.choices if choice.op == "linear").chosen.name
    for inputs, outputs in ((64, 200), (512, 64), (2048, 256)):
        x, weight = rand(65, inputs, dtype=dtype), ops.pack_linear([rand(outputs, inputs, dtype=dtype, seed=1)])
        whole = ops.linear(x, weight)
        for rows in (1, 2, 3, 8, 17, 64):
            assert torch.equal(ops.linear(x[:rows], weight), whole[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_up(dtype: torch.dtype):
    x = rand(5, 14, dtype=dtype) * 6
    gate, up = x.double().chunk(2, dim=1)
    close(dense.gate_up(x, "silu"), gate / (1 + (-gate).exp()) * up, dtype)
    close(dense.gate_up(x, "gelu"), gate * 0.5 * (1 + (gate / math.sqrt(2)).erf()) * up, dtype)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    close(dense.gate_up(x, "gelu_tanh"), 0.5 * gate * (1 + inner.tanh()) * up, dtype)
    g, u = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
    close(dense.gate_up(x, "swigluoai", 1.5, 2.0), g / (1 + (-1.5 * g).exp()) * (u + 1), dtype)
    with pytest.raises(ValueError, match="mish"):
        dense.gate_up(x, "mish")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sigmoid_gate(ops: KernelSet, dtype: torch.dtype):
    x, gate = rand(5, 33, dtype=dtype), rand(5, 33, dtype=dtype, seed=1) * 6
    close(ops.sigmoid_gate(x, gate), x.double() / (1 + (-gate.double()).exp()), dtype)


def test_embedding(ops: KernelSet):
    table = rand(9, 4, dtype=torch.bfloat16)
    ids = torch.tensor([8, 0, 8])
    assert torch.equal(ops.embedding(ids, table), table[ids])
    scale = torch.tensor(36.0**0.5, dtype=torch.bfloat16)
    assert torch.equal(ops.embedding(ids, table, 36.0**0.5), table[ids] * scale)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "value_dim"), [(4, 2, 8, 8, 8), (3, 3, 6, 4, 5), (6, 1, 2, 2, 2)]
)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_cache_write(ops: KernelSet, heads, kv_heads, dim, rotary, value_dim, normed):
    tokens, block_size = 5, 4
    qkv = rand(tokens, (heads + kv_heads) * dim + kv_heads * value_dim)
    angle = rand(tokens, rotary // 2, seed=1) * 10
    cos = torch.cat((angle.cos(), angle.cos()), 1).unsqueeze(1)
    sin = torch.cat((-angle.sin(), angle.sin()), 1).unsqueeze(1)
    slot = torch.tensor([13, 2, 7, 20, 4])
    key_cache, value_cache = (
        torch.full((6, block_size, kv_heads, dim), 9.0),
        torch.full((6, block_size, kv_heads, value_dim), 9.0),
    )
    scales = rand(heads + kv_heads, dim, seed=2) if normed else None
    query = ops.rope_and_cache_write(qkv, cos, sin, slot, KvTensors(key_cache, value_cache), scales, 1e-6)
    assert query.shape == (tokens, heads, dim)
    written = set()
    for token in range(tokens):
        block, offset = divmod(int(slot[token]), block_size)
        written.add((block, offset))
        for head in range(heads + kv_heads):
            x = qkv[token, head * dim : (head + 1) * dim].double()
            if scales is not None:
                x = x / (x.square().mean() + 1e-6).sqrt() * scales[head]
            exact = x.clone()
            for pair in range(rotary // 2):
                a, b, turn = x[pair], x[pair + rotary // 2], angle[token, pair].double()
                exact[pair] = a * turn.cos() - b * turn.sin()
                exact[pair + rotary // 2] = b * turn.cos() + a * turn.sin()
            ours = query[token, head] if head < heads else key_cache[block, offset, head - heads]
            close(ours, exact, torch.float32)
        value = qkv[token, (heads + kv_heads) * dim :].view(kv_heads, value_dim)
        assert torch.equal(value_cache[block, offset], value)
    untouched = [(b, o) for b in range(6) for o in range(block_size) if (b, o) not in written]
    assert all((key_cache[place] == 9.0).all() and (value_cache[place] == 9.0).all() for place in untouched)


@pytest.mark.parametrize("routing", ["softmax_topk", "topk_softmax"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_routing(ops: KernelSet, routing, renormalize):
    logits = rand(7, 5)
    weights, ids = ops.route_experts(logits, 3, routing, renormalize)
    assert weights.dtype == torch.float32
    for token in range(7):
        order = sorted(range(5), key=lambda expert: -float(logits[token, expert]))[:3]
        assert ids[token].tolist() == order
        mass = [math.exp(float(logits[token, expert])) for expert in range(5)]
        whole = routing == "softmax_topk" and not renormalize
        divisor = sum(mass) if whole else sum(mass[expert] for expert in order)
        assert weights[token].tolist() == pytest.approx([mass[expert] / divisor for expert in order], rel=1e-5)
    with pytest.raises(ValueError, match="sigmoid"):
        ops.route_experts(logits, 3, "sigmoid", renormalize)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("prefer_reference", [True, False])
def test_grouped_experts(dtype: torch.dtype, bias: bool, tokens: int, prefer_reference: bool):
    context = KernelContext("cpu", str(dtype).removeprefix("torch."), prefer_reference=prefer_reference)
    ops = resolve_kernels(context)
    experts, width, inner, top_k = 6, 10, 4, 2
    x = rand(tokens, width, dtype=dtype)
    gate_up, down = (
        rand(experts, 2 * inner, width, dtype=dtype, seed=1),
        rand(experts, width, inner, dtype=dtype, seed=2),
    )
    gate_up_bias = rand(experts, 2 * inner, dtype=dtype, seed=3) if bias else None
    down_bias = rand(experts, width, dtype=dtype, seed=4) if bias else None
    weights, ids = ops.route_experts(rand(tokens, experts - 1, seed=5), top_k, "softmax_topk", True)  # one is never hit
    gates, ups = (half.reshape(-1, width) for half in gate_up.chunk(2, dim=1))
    packed = ops.pack_experts([gates, ups], experts), ops.pack_experts([down.reshape(-1, inner)], experts)
    out = ops.grouped_experts(x, weights, ids, *packed, "silu", gate_up_bias, down_bias)
    exact = torch.zeros(tokens, width, dtype=torch.float64)
    for token in range(tokens):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            hidden = gate_up[expert].double() @ x[token].double()
            hidden += gate_up_bias[expert].double() if gate_up_bias is not None else 0
            hidden = hidden[:inner] / (1 + (-hidden[:inner]).exp()) * hidden[inner:]
            result = down[expert].double() @ hidden
            exact[token] += weight * (result + (down_bias[expert].double() if down_bias is not None else 0))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=DTYPES[dtype] * 4, atol=DTYPES[dtype] * 40)


def test_every_op_has_a_reason():
    chosen = {choice.op: choice for choice in resolve_kernels(KernelContext("cpu", "float32")).choices}
    assert {"linear", "paged_attention", "sampling"} <= set(chosen)
    refused = {choice.op: dict(choice.refused) for choice in resolve_kernels(KernelContext("cuda", "float32")).choices}
    assert any("cuda" in reason for reason in refused["linear"].values())
    assert chosen["pack_linear"].chosen.name == chosen["linear"].chosen.name
