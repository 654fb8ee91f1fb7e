"""Makes method_goldens.npz: small matrices quantised, and decoded again, by the libraries that define the formats.

Run by hand, in an environment that has auto-round 0.16.1, hqq 0.2.8.post1, bitsandbytes 0.50.2, mlx[cpu] 0.32.4,
compressed-tensors 0.20.0 and aqlm 1.1.7 beside torch and transformers. Every case keeps its stored tensors, its
quantization_config and the weights in float32.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

sys.modules.setdefault("datasets", MagicMock())  # auto-round imports it for calibration, which is not done here

Case = tuple[str, dict[str, Any], Mapping[str, torch.Tensor], torch.Tensor]  # name, config, tensors by suffix, weights
N, K = 8, 64


def weight(rows: int = N, columns: int = K, seed: int = 0) -> torch.Tensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return values * torch.linspace(0.02, 0.2, rows)[:, None] + 0.01


def linear(values: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(values.shape[1], values.shape[0], bias=False)
    layer.weight.data = values
    return layer


def grid(values: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points [N, G] of plain rounding."""
    grouped = values.reshape(values.shape[0], -1, group)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).half().float()
    return scale, torch.round(-low / scale).clamp(1, 2**bits - 1)


def auto_round() -> Iterator[Case]:
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    packings = (("auto_round", qlinear_torch, (4,)), ("auto_round:auto_gptq", qlinear_torch_zp, (2, 3, 4, 8)))
    for packing, module, widths in packings:
        for bits in widths:
            scale, zero = grid(weight(32), bits, 32)
            layer = module.QuantLinear(bits, 32, K, 32, False, g_idx=True)
            layer.device = "cpu"  # which pack() reads
            layer.pack(linear(weight(32)), scale, zero, device="cpu")
            stored = {f".{name}": value.clone() for name, value in layer.state_dict().items()}
            layer.scales = layer.scales.float()
            config = {"quant_method": "auto-round", "bits": bits, "group_size": 32, "packing_format": packing}
            yield f"{packing}-{bits}", config, stored, layer(torch.eye(K)).T
    scale, zero = grid(weight(), 4, 32)
    layer = WQLinear_GEMM.from_linear(linear(weight()), 4, 32, scales=scale.T, zeros=zero.T, device="cpu")
    stored = {f".{name}": value for name, value in layer.state_dict().items()}
    decoded = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, 32).T
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_awq"}
    yield "auto_round:auto_awq", config, stored, decoded
    yield "awq-gemm", {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, stored, decoded


def compressed_tensors() -> Iterator[Case]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams

    def case(name: str, kind: str, values: torch.Tensor, grouped: torch.Tensor, **args: Any) -> Case:
        """`grouped`: values with one scale a row of the last axis."""
        weights = QuantizationArgs(**args)
        scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=kind)
        scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), weights)
        state = {"weight": values, "weight_scale": scale, "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(kind)
        stored = compressor.compress(state, scheme)
        decoded = compressor.decompress(stored, scheme)["weight"]
        groups = {"group_0": {"weights": json.loads(weights.model_dump_json()), "targets": ["Linear"]}}
        config = {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}
        return name, config, {f".{key}": value for key, value in stored.items()}, decoded

    values = weight(16)
    rows, groups = values[:, None], values.reshape(16, -1, 32)
    integers = {"type": "int", "strategy": "group", "group_size": 32}
    channel = {"type": "int", "strategy": "channel", "num_bits": 8}
    yield case("ct-w4-sym", "pack-quantized", values, groups, num_bits=4, symmetric=True, **integers)
    yield case("ct-w4-asym", "pack-quantized", values, groups, num_bits=4, symmetric=False, **integers)
    yield case("ct-w3-asym", "pack-quantized", values, groups, num_bits=3, symmetric=False, **integers)
    yield case("ct-w8-channel", "pack-quantized", values, rows, symmetric=True, **channel)
    yield case("ct-w8-channel-asym", "pack-quantized", values, rows, symmetric=False, **channel)
    yield case("ct-int8", "int-quantized", values, rows, symmetric=True, **channel)
    yield case("ct-int8-asym", "int-quantized", values, rows, symmetric=False, **channel)
    floats = {"type": "float", "num_bits": 8, "symmetric": True}
    yield case("ct-fp8-channel", "float-quantized", values, rows, strategy="channel", **floats)
    yield case("ct-fp8-tensor", "float-quantized", values, values.reshape(1, -1), strategy="tensor", **floats)
    tiles = values.reshape(2, 8, 4, 16).swapaxes(1, 2).reshape(2, 4, 128)
    yield case("ct-fp8-block", "float-quantized", values, tiles, strategy="block", block_structure=[8, 16], **floats)

    weights = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    fine = values.reshape(16, -1, 16)
    whole = torch.exp2(torch.floor(torch.log2(6 * 448 / values.abs().max())))[None]  # its inverse is exact
    scale = (fine.abs().amax(-1) * whole / 6).to(torch.float8_e4m3fn).float()
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    state = {"weight": values, "weight_scale": scale, "weight_global_scale": whole}
    stored = compressor.compress(state, scheme)
    codes = unpack_fp4_from_uint8(stored["weight_packed"], 16, K, dtype=torch.float32)
    decoded = dequantize(codes, scale, args=weights, global_scale=whole, dtype=torch.float32)
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    yield "ct-nvfp4", config, {f".{key}": value for key, value in stored.items()}, decoded
    parts = {".weight": stored["weight_packed"], ".weight_scale": stored["weight_scale"]}
    algorithm = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    yield "modelopt-nvfp4", algorithm, parts | {".weight_scale_2": 1 / whole[0]}, decoded
    weights = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    scale = torch.exp2(torch.floor(torch.log2(groups.abs().amax(-1) / 4)))
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    stored = compressor.compress({"weight": values, "weight_scale": scale}, scheme)
    codes = unpack_fp4_from_uint8(stored["weight_packed"], 16, K, dtype=torch.float32)
    config = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    decoded = dequantize(codes, scale, args=weights, dtype=torch.float32)
    yield "ct-mxfp4", config, {f".{key}": value for key, value in stored.items()}, decoded


def bitsandbytes() -> Iterator[Case]:
    from bitsandbytes import functional

    for kind, nested in (("nf4", False), ("nf4", True), ("fp4", False)):
        packed, state = functional.quantize_4bit(weight(), blocksize=64, quant_type=kind, compress_statistics=nested)
        stored = {".weight": packed} | {f".weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        decoded = functional.dequantize_4bit(packed, state).float()
        yield f"bnb-{kind}{'-nested' * nested}", {"quant_method": "bitsandbytes", "load_in_4bit": True}, stored, decoded
    codes, rows, _ = functional.int8_vectorwise_quant(weight().half())
    decoded = functional.int8_vectorwise_dequant(codes, rows).float()
    stored = {".weight": codes, ".SCB": rows, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    yield "bnb-int8", {"quant_method": "bitsandbytes", "load_in_8bit": True}, stored, decoded


def hqq() -> Iterator[Case]:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    for bits, group, axis in ((8, 32, 1), (4, 64, 1), (3, 32, 1), (2, 16, 1), (1, 32, 1), (4, 32, 0), (3, 32, 0)):
        settings = BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis)
        layer = HQQLinear(linear(weight()), settings, compute_dtype=torch.float32, device="cpu", del_orig=False)
        stored = {f".{key}": value for key, value in layer.state_dict().items()}
        yield f"hqq-{bits}-axis{axis}", {"quant_method": "hqq", "quant_config": settings}, stored, layer.dequantize()


def mlx() -> Iterator[Case]:
    from mlx import core

    def tensor(values: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(values))

    settings = [("affine", bits, 32) for bits in (2, 3, 4, 5, 6, 8)] + [("affine", 4, 64), ("affine", 4, 128)]
    for mode, bits, group in [*settings, ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]:
        values = core.array(weight(4, 128).numpy())
        parts = core.quantize(values, group_size=group, bits=bits, mode=mode)
        decoded = core.dequantize(*parts, group_size=group, bits=bits, mode=mode, dtype=core.float32)
        stored = dict(zip((".weight", ".scales", ".biases"), map(tensor, parts), strict=False))
        yield f"mlx-{mode}-{bits}-{group}", {"bits": bits, "group_size": group, "mode": mode}, stored, tensor(decoded)


def aqlm() -> Iterator[Case]:
    from aqlm.utils import _dequantize_weight, pack_int_data, unpack_int_data

    generator = torch.Generator().manual_seed(0)
    for books, bits, out_group in ((1, 9, 1), (2, 5, 1), (2, 6, 2)):
        codes = torch.randint(0, 2**bits, (N // out_group, K // 8, books), generator=generator)
        stored = {
            ".codes": pack_int_data(codes.clone(), bits),
            ".codebooks": torch.randn(books, 2**bits, out_group, 8, generator=generator).half(),
            ".scales": torch.rand(N // out_group, 1, 1, 1, generator=generator).half(),
        }
        unpacked = unpack_int_data(stored[".codes"], bits)
        decoded = _dequantize_weight(unpacked, stored[".codebooks"].float(), stored[".scales"].float())
        yield f"aqlm-{books}x{bits}-{out_group}", {"quant_method": "aqlm"}, stored, decoded


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    formats = {torch.float8_e4m3fn: "f8_e4m3", torch.bfloat16: "bf16"}
    for family in (auto_round, compressed_tensors, bitsandbytes, hqq, mlx, aqlm):
        for name, config, tensors, decoded in family():
            for suffix, value in tensors.items():
                fmt = formats.get(value.dtype, "")
                value = value.detach().contiguous()
                arrays[f"{name}|{suffix}|{fmt}"] = (value.view(torch.uint8) if fmt else value).numpy()
            arrays[f"{name}|weights"] = decoded.detach().float().numpy()
            arrays[f"{name}|config"] = np.array(json.dumps(config))
    np.savez_compressed(Path(__file__).with_name("method_goldens.npz"), **arrays)


if __name__ == "__main__":
    with torch.no_grad():
        main()
