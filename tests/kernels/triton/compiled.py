"""Compiles the kernels of ops for a Hopper GPU, without one: run as a script, in a process that does not interpret.

Every launch is compiled as its arguments ask for, to machine code, and not run. Prints a line a kernel; with the word
"all" behind it more sizes and types, which takes a minute.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from penstock.kernels.api import KernelSet, resolve_kernels
from penstock.kernels.registry import KernelContext

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64", torch.int32: "*i32",
    torch.int16: "*i16", torch.uint8: "*u8", torch.int8: "*i8", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
DIVISIBLE = [["tt.divisibility", 16]]
MOST_SHARED = 227 * 1024  # bytes of shared memory that a block may have


def catch_launches(done: set[str]) -> None:
    """From now on launches compile, each kernel once for the same kinds of arguments; their names go to `done`."""
    seen: set[str] = set()

    def run(self: Any, *values: Any, grid: Any = None, warmup: bool = False, **named: Any) -> None:
        names = [parameter.name for parameter in self.params]
        given = dict(zip(names, values, strict=False)) | {key: named[key] for key in named if key in names}
        options = {key: value for key, value in named.items() if key not in names}
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(self.params):
            value = given[parameter.name]
            kind = "constexpr" if parameter.is_constexpr or value is None else kind_of(value)
            signature[parameter.name] = kind
            if kind == "constexpr":
                constants[(index,)] = value
            elif isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[(index,)] = DIVISIBLE
        key = str((self.__name__, signature, constants, attributes, options))
        if key in seen:
            return
        seen.add(key)
        done.add(self.__name__)
        source = ASTSource(fn=self, signature=signature, constexprs=constants, attrs=attributes)
        made = compile_kernel(source, target=TARGET, options=options)
        assert made.metadata.shared <= MOST_SHARED, (self.__name__, made.metadata.shared)
        ptx = made.asm["ptx"]
        print(self.__name__, made.metadata.shared, "wgmma" if "wgmma" in ptx else "mma" if "mma.sync" in ptx else "")

    JITFunction.run = run


def kind_of(value: Any) -> str:
    """The type of an argument, as a signature has it."""
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "constexpr" if value == 1 else "i32" if abs(value) < 2**31 else "i64"


def ops_for(kv_type: str = "bfloat16") -> KernelSet:
    return resolve_kernels(KernelContext("cuda", "bfloat16", kv_type=kv_type))


def attention(ops: KernelSet, kv_type: str, heads: tuple[int, int], dims: tuple[int, int], **changes: Any) -> None:
    """A step with a decoding row of several parts and a prompt; a latent cache where there is one KV head."""
    rows, block, (key_dim, value_dim) = ((1, 900), (100, 100)), changes.pop("block_size", 64), dims
    window, latent = changes.pop("window", None), key_dim == 576
    cache = ops.make_cache(kv_type, 4, block, heads[1], key_dim, value_dim, "cpu", latent)
    lens, contexts = zip(*rows, strict=True)
    starts = torch.tensor([0, 1, 101], dtype=torch.int32)
    tables = starts, torch.tensor(contexts, dtype=torch.int32), torch.zeros(2, 64, dtype=torch.int32)
    plan = ops.plan_attention(cache, *tables, lens, contexts, window)
    ops.paged_attention(bf16(101, heads[0] * key_dim), cache, plan, 0.1, **changes)


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def rotation(ops: KernelSet, kv_type: str) -> None:
    cache = ops.make_cache(kv_type, 4, 64, 8, 128, 128, "cpu")
    slot, norm = torch.zeros(4, dtype=torch.int64), torch.zeros(40, 128)
    tables = ops.rope_tables(slot, torch.zeros(64))
    ops.rope_and_cache_write(bf16(4, 56 * 128), *tables, slot, cache, norm, 1e-6)
    ops.rotate_heads(bf16(4, 4096), *tables, 32)
    latent = ops.make_cache(kv_type, 4, 64, 1, 576, 512, "cpu", True)
    ops.latent_cache_write(bf16(4, 576), torch.zeros(512), 1e-6, *ops.rope_tables(slot, torch.zeros(32)), slot, latent)


def small(ops: KernelSet) -> None:
    x, weight = bf16(4, 4096), torch.zeros(4096)
    ops.rms_norm(x, weight, 1e-6, x)
    ops.layer_norm(x, weight, weight, 1e-6)
    for op in (ops.add, ops.multiply, ops.sigmoid_gate):
        op(x, x)
    ops.soft_cap(x.float(), 30.0)
    ops.scale_rows(x, torch.zeros(4, 1))
    ops.take_rows(x, torch.zeros(3, dtype=torch.int64))


def main(more: bool) -> None:
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    done: set[str] = set()
    catch_launches(done)
    brain, eight = ops_for(), ops_for("fp8")
    rotation(brain, "bfloat16")
    attention(brain, "bfloat16", (32, 8), (128, 128))
    attention(eight, "fp8", (16, 1), (576, 512))
    small(brain)
    if more:
        rotation(eight, "fp8")
        attention(eight, "fp8", (32, 8), (128, 128))
        attention(brain, "bfloat16", (16, 1), (576, 512))
        attention(brain, "bfloat16", (32, 32), (96, 96), block_size=16)
        attention(brain, "bfloat16", (8, 4), (256, 256), window=512, soft_cap=50.0)
        attention(brain, "bfloat16", (64, 8), (64, 64), window=128, sinks=torch.zeros(64))
    assert {"_attend", "_join", "_rope", "_rope_tables", "_latent_write", "_rms_norm", "_pointwise"} <= done


if __name__ == "__main__":
    main("all" in sys.argv[1:])
