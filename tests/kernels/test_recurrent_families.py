"""Recurrent layers put together from the ops, in three steps, against transformers' modules over a whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.cache import StateRows
from penstock.kernels.cpu import native, recurrent
from penstock.kernels.reference import recurrent as reference

HIDDEN, TOKENS, CUTS = 48, 21, ((0, 13), (13, 14), (14, 21))
Layer = Callable[[ModuleType, Tensor, Callable[..., Tensor], StateRows], Tensor]

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")


def randomise(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    module.eval()


def linear(module: torch.nn.Linear, x: Tensor) -> Tensor:
    return functional.linear(x, module.weight, module.bias).contiguous()


def taps(module: torch.nn.Conv1d) -> Tensor:
    return module.weight[:, 0].t().contiguous()


def mamba2(groups: int, limit: tuple[float, float]) -> tuple[torch.nn.Module, Layer]:
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=HIDDEN, num_heads=6, head_dim=16, state_size=20, n_groups=groups, chunk_size=8,
        time_step_limit=limit, num_hidden_layers=1, vocab_size=32,
    )  # fmt: skip
    mixer = Mamba2Mixer(config, 0)
    randomise(mixer)
    inner, bc = mixer.intermediate_size, groups * 20

    def layer(ops, x, state, rows):
        gate, mixed, dt = ops.split(linear(mixer.in_proj, x), (inner, inner + 2 * bc, 6))
        conv = state(mixer.conv1d.kernel_size[0] - 1, inner + 2 * bc)
        mixed = ops.short_conv(mixed, taps(mixer.conv1d), mixer.conv1d.bias, conv, rows, "silu")
        inputs, b, c = ops.split(mixed, (inner, bc, bc))
        a, memory = -mixer.A_log.exp(), state(6, 20, 16)
        out = ops.selective_scan(inputs, dt, a, b, c, memory, rows, mixer.dt_bias, mixer.D, None, limit)
        out = ops.gated_rms_norm(out, gate, mixer.norm.weight, config.layer_norm_epsilon, inner // groups, True)
        return linear(mixer.out_proj, out)

    return mixer, layer


def jamba() -> tuple[torch.nn.Module, Layer]:
    from transformers import JambaConfig
    from transformers.models.jamba.modeling_jamba import JambaMambaMixer

    config = JambaConfig(
        hidden_size=HIDDEN, mamba_d_state=12, mamba_dt_rank=10, num_hidden_layers=2, attn_layer_offset=1,
        attn_layer_period=2, vocab_size=32, num_attention_heads=4, num_key_value_heads=2, use_mamba_kernels=False,
    )  # fmt: skip
    mixer = JambaMambaMixer(config, 0)
    randomise(mixer)
    width = mixer.intermediate_size

    def layer(ops, x, state, rows):
        inputs, gate = ops.split(linear(mixer.in_proj, x), (width, width))
        conv = state(mixer.conv1d.kernel_size[0] - 1, width)
        inputs = ops.short_conv(inputs, taps(mixer.conv1d), mixer.conv1d.bias, conv, rows, "silu")
        norms = mixer.dt_layernorm, mixer.b_layernorm, mixer.c_layernorm
        parts = ops.split(linear(mixer.x_proj, inputs), (10, 12, 12))
        low, b, c = (
            ops.gated_rms_norm(part, None, norm.weight, config.rms_norm_eps)
            for part, norm in zip(parts, norms, strict=True)
        )
        dt = functional.linear(low, mixer.dt_proj.weight).contiguous()
        a, memory = -mixer.A_log.exp().t().contiguous(), state(1, 12, width)
        out = ops.selective_scan(inputs, dt, a, b, c, memory, rows, mixer.dt_proj.bias, mixer.D, gate)
        return linear(mixer.out_proj, out)

    return mixer, layer


def lfm2() -> tuple[torch.nn.Module, Layer]:
    from transformers import Lfm2Config
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    config = Lfm2Config(hidden_size=HIDDEN, num_hidden_layers=1, layer_types=["conv"], conv_bias=True, vocab_size=32)
    mixer = Lfm2ShortConv(config, 0)
    randomise(mixer)

    def layer(ops, x, state, rows):
        before, after, inputs = ops.split(linear(mixer.in_proj, x), (HIDDEN,) * 3)
        memory = state(config.conv_L_cache - 1, HIDDEN)
        out = ops.short_conv(inputs, taps(mixer.conv), mixer.conv.bias, memory, rows, None, before, after)
        return linear(mixer.out_proj, out)

    return mixer, layer


def qwen3_next() -> tuple[torch.nn.Module, Layer]:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(
        hidden_size=HIDDEN, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=24,
        linear_value_head_dim=16, num_hidden_layers=1, layer_types=["linear_attention"], vocab_size=32,
    )  # fmt: skip
    mixer = Qwen3NextGatedDeltaNet(config, 0)
    randomise(mixer)

    def layer(ops, x, state, rows):
        qkvz, ba = linear(mixer.in_proj_qkvz, x), linear(mixer.in_proj_ba, x)
        q, k, v, z, b, a = mixer.fix_query_key_value_ordering(qkvz.unsqueeze(0), ba.unsqueeze(0))
        mixed = torch.cat([part.reshape(len(x), -1) for part in (q, k, v)], dim=1)
        mixed = ops.short_conv(mixed, taps(mixer.conv1d), None, state(3, 160), rows, "silu")
        steps, betas = a[0].contiguous(), b[0].contiguous()
        decay = -mixer.A_log.exp()
        memory = state(4, 24, 16)
        q, k, v = ops.split(mixed, (48, 48, 64))
        out = ops.gated_delta_rule(q, k, v, steps, betas, decay, memory, rows, mixer.dt_bias)
        gate = z.reshape(len(x), 64)
        out = ops.gated_rms_norm(out, gate, mixer.norm.weight.repeat(4), config.rms_norm_eps, 16)
        return linear(mixer.out_proj, out)

    return mixer, layer


FAMILIES: dict[str, Callable[[], tuple[torch.nn.Module, Layer]]] = {
    "Mamba-2": lambda: mamba2(1, (0.0, float("inf"))),
    "Mamba-2, groups and limits": lambda: mamba2(3, (0.2, 1.5)),
    "Jamba": jamba,
    "LFM2": lfm2,
    "Qwen3-Next": qwen3_next,
}


@pytest.mark.parametrize("ops", [recurrent, reference], ids=["native", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_equals_transformers(family: str, ops: ModuleType):
    module, layer = FAMILIES[family]()
    hidden = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3))
    expected = module(hidden.unsqueeze(0))
    expected = (expected[0] if isinstance(expected, tuple) else expected)[0]
    states: dict[tuple[int, ...], Tensor] = {}

    def state(*shape: int) -> Tensor:
        return states.setdefault(shape, torch.full((2, *shape), float("nan")))

    parts = []
    for begin, end in CUTS:
        counts = torch.tensor([0, end - begin]).int(), torch.tensor([end]).int()
        parts.append(layer(ops, hidden[begin:end].contiguous(), state, StateRows(torch.ones(1).long(), *counts)))
    errors = torch.cat(parts) - expected
    assert errors.norm() < 1e-5 * expected.norm()
    assert errors.abs().max() < 1e-4 * expected.abs().max()
