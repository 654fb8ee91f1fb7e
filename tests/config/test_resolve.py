"""Option resolution: every derived value has a reason, every bad one names flag, value and what is allowed."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from penstock.config.errors import ConfigError
from penstock.config.machine import Accelerator, Machine
from penstock.config.options import EngineOptions
from penstock.config.resolve import LayerFacts, ModelFacts, resolve

GIB = 2**30
HOPPER = Accelerator("cuda", 0, "H", 80 * GIB, 79 * GIB, (9, 0), 132)
MACHINE = Machine(cores=6, memory_total=32 * GIB, memory_available=24 * GIB, isas=("avx512", "avx2", "generic"))
SMALL = ModelFacts(
    name="tiny",
    parameters=7_000_000,
    file_bytes=14_000_000,
    checkpoint_dtype="bfloat16",
    context_length=2048,
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=1024,
    attention_size=256,
    layers=(LayerFacts(256),) * 6,
)
LARGE = replace(SMALL, name="large", parameters=8_000_000_000, context_length=131_072, layers=(LayerFacts(2048),) * 32)


def reasons(
    options: EngineOptions, model: ModelFacts = SMALL, machine: Machine = MACHINE
) -> dict[str, tuple[Any, str]]:
    return {name: (value, reason) for name, value, reason in resolve(options, model, machine).reasons}


def test_everything_becomes_concrete_and_nothing_given_is_touched() -> None:
    resolved = resolve(EngineOptions(), SMALL, MACHINE)
    open_names = {f.name for f in fields(resolved.options) if getattr(resolved.options, f.name) in (None, "auto")}
    own = {
        *("memory", "kv_blocks", "max_users", "max_chunk_tokens", "pack_cache", "pack_cache_size", "load_format"),
        *("kv_ram", "kv_disk", "kv_disk_path", "kv_events_config", "kv_store", "kv_store_seconds"),
        *("quantize", "max_cpu_loras", "max_lora_bytes", "control_vector_layers", "workers_address"),
    }
    own |= {
        "pipeline_layer_split",
        "tool_call_parser",
        "reasoning_parser",
        "hf_overrides",
        "pooler_config",
        "speculative_config",
    }
    assert open_names <= own  # None is their own "no limit", or what the chat template tells
    for name, value, reason in resolved.reasons:
        assert getattr(resolved.options, name) == value
        assert len(reason) > 10
    given = replace(resolved.options, threads=3, max_num_seqs=5)
    again = resolve(given, SMALL, MACHINE)
    assert again.options == given
    assert again.reasons == ()


def test_defaults_on_a_cpu() -> None:
    options = resolve(EngineOptions(), SMALL, MACHINE).options
    assert (options.device, options.dtype, options.isa, options.threads) == ("cpu", "float32", "avx512", 6)
    without_library = replace(MACHINE, isas=())
    assert resolve(EngineOptions(), SMALL, without_library).options.threads == 1
    assert resolve(EngineOptions(), LARGE, without_library).options.threads == 6
    assert (options.max_num_seqs, options.max_num_batched_tokens, options.max_model_len) == (64, 2048, 2048)
    assert options.served_model_name == "tiny"
    assert resolve(EngineOptions(), LARGE, MACHINE).options.max_num_batched_tokens == 512


@pytest.mark.parametrize(
    ("model", "has_bf16", "device", "dtype", "why"),
    [
        (SMALL, True, "auto", "float32", "exact"),
        (LARGE, True, "auto", "bfloat16", "would take 124%"),
        (LARGE, False, "auto", "float32", "no bfloat16 instructions"),
        (replace(LARGE, checkpoint_dtype="float32"), True, "auto", "float32", "exact"),
        (SMALL, False, "cuda", "bfloat16", "what the checkpoint holds"),
    ],
)
def test_dtype_without_the_native_library(model: ModelFacts, has_bf16: bool, device: str, dtype: str, why: str) -> None:
    machine = replace(MACHINE, isas=(), has_bf16=has_bf16, accelerators=(HOPPER,))
    device = "cpu" if device == "auto" else device
    value, reason = reasons(EngineOptions(device=device), model, machine)["dtype"]
    assert value == dtype
    assert why in reason


@pytest.mark.parametrize(
    ("stored", "isas", "kv_type", "why"),
    [
        ("float32", ("avx512_bf16", "avx512"), "float32", "what the checkpoint holds"),
        ("bfloat16", ("avx512", "avx2"), "float16", "half of float32"),
        ("bfloat16", ("avx512_bf16", "avx512"), "bfloat16", "avx512_bf16 multiplies it as it is"),
        ("bfloat16", ("amx", "avx512"), "float16", "half of float32, and finer"),
    ],
)
def test_types_with_the_native_library(stored: str, isas: tuple[str, ...], kv_type: str, why: str) -> None:
    chosen = reasons(EngineOptions(), replace(LARGE, checkpoint_dtype=stored), replace(MACHINE, isas=isas))
    assert chosen["dtype"] == ("float32", "activations; weights stay in memory as they are stored")
    assert chosen["kv_cache_dtype"][0] == kv_type
    forced = reasons(EngineOptions(isa=isas[1]), replace(LARGE, checkpoint_dtype=stored), replace(MACHINE, isas=isas))
    assert forced["kv_cache_dtype"][0] == ("float32" if stored == "float32" else "float16")
    assert why in chosen["kv_cache_dtype"][1]


def test_a_gpu_with_kernels_is_taken_and_others_only_when_asked_for() -> None:
    machine = replace(MACHINE, accelerators=(HOPPER, replace(HOPPER, index=1)))
    assert reasons(EngineOptions(), SMALL, machine)["device"] == ("cuda", "H, the first GPU that torch sees")
    assert reasons(EngineOptions(), SMALL)["device"] == ("cpu", "torch sees no GPU")
    apple = replace(HOPPER, kind="mps", no_kernels="Triton does not compile for mps")
    value, reason = reasons(EngineOptions(), SMALL, replace(MACHINE, accelerators=(apple,)))["device"]
    assert (value, reason) == ("cpu", "--device mps would run the reference on H: Triton does not compile for mps")
    assert resolve(EngineOptions(device="mps"), SMALL, replace(MACHINE, accelerators=(apple,))).options.on_gpu
    amd = replace(MACHINE, accelerators=(replace(HOPPER, kind="rocm"),))
    value, reason = reasons(EngineOptions(), SMALL, amd)["device"]
    assert (value, "untested" in reason) == ("rocm", True)
    assert resolve(EngineOptions(device="rocm"), SMALL, amd).options.torch_device == "cuda"
    assert resolve(EngineOptions(device="cuda:1"), SMALL, machine).options.torch_device == "cuda:1"


def test_steps_are_prepared_ahead_and_recorded_on_a_gpu() -> None:
    machine = replace(MACHINE, accelerators=(HOPPER,))
    for given, depth, eager in ((EngineOptions(), 1, False), (EngineOptions(device="cpu"), 0, True)):
        found = resolve(given, SMALL, machine).options
        assert (found.depth, found.enforce_eager) == (depth, eager)
    asked = resolve(EngineOptions(depth=0, enforce_eager=True), SMALL, machine).options
    assert (asked.depth, asked.enforce_eager) == (0, True)


def test_a_gpu_that_is_not_there_is_refused_and_those_that_are_named() -> None:
    with pytest.raises(ConfigError, match="--device is 'cuda', but torch sees no GPU here; allowed: auto, cpu"):
        resolve(EngineOptions(device="cuda"), SMALL, MACHINE)
    machine = replace(MACHINE, accelerators=(HOPPER,))
    for device in ("cuda:1", "xpu"):
        message = rf"--device is '{device}', but torch sees no such GPU here; allowed: auto, cpu, cuda:0 \(H\)"
        with pytest.raises(ConfigError, match=message):
            resolve(EngineOptions(device=device), SMALL, machine)


def test_on_a_gpu_the_cache_gets_the_rest_and_steps_are_large() -> None:
    machine = replace(MACHINE, accelerators=(HOPPER,))
    chosen = reasons(EngineOptions(gpu_memory_utilization=0.75), LARGE, machine)
    assert chosen["kv_cache_memory"] == ("the rest", "what weights and the largest step leave of 75% of its memory")
    assert (chosen["max_num_seqs"][0], chosen["max_num_batched_tokens"][0]) == (256, 8192)
    assert resolve(EngineOptions(), LARGE, machine).options.kv_cache_memory is None
    assert resolve(EngineOptions(kv_cache_memory=99), LARGE, machine).options.kv_cache_memory == 99


def test_types_that_a_gpu_lacks_are_replaced_or_refused() -> None:
    turing = replace(HOPPER, no_bfloat16="this GPU, of compute capability 7.5, has no bfloat16", no_fp8="it has no FP8")
    machine = replace(MACHINE, accelerators=(turing,))
    value, reason = reasons(EngineOptions(), LARGE, machine)["dtype"]
    assert (value, reason) == (
        "float16",
        "the checkpoint holds bfloat16, but this GPU, of compute capability 7.5, has no bfloat16",
    )
    for asked, message in (
        ({"dtype": "bfloat16"}, "--dtype is 'bfloat16'; allowed: auto, float16, float32. This GPU, of compute"),
        ({"kv_cache_dtype": "fp8"}, "allowed: auto, float32, bfloat16, float16 on this device. It has no FP8."),
        ({"kv_cache_dtype": "int8"}, "allowed: auto, float32, bfloat16, float16 on this device. GPUs have no kernels"),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve(replace(EngineOptions(), **asked), LARGE, machine)
        assert message in str(caught.value)
    for device in ("cuda", "interpreter"):
        new = replace(MACHINE, accelerators=(HOPPER,))
        assert resolve(EngineOptions(device=device, kv_cache_dtype="fp8"), LARGE, new).options.kv_cache_dtype == "fp8"
        with pytest.raises(ConfigError, match=r"int4.*allowed: auto, float32, bfloat16, float16, fp8 on this device"):
            resolve(EngineOptions(device=device, kv_cache_dtype="int4"), LARGE, new)


def test_kv_cache_size_rules() -> None:
    value, reason = reasons(EngineOptions())["kv_cache_memory"]
    assert "64 sequences of a quarter of 2048 tokens" in reason
    assert 64 * 512 * 256 * 6 * 2 <= value < 1.1 * 64 * 512 * 256 * 6 * 2
    medium = replace(LARGE, context_length=32_768)
    value, reason = reasons(EngineOptions(dtype="bfloat16"), medium)["kv_cache_memory"]
    assert (value, reason) == (6 * GIB, "a quarter of the available memory")
    value, reason = reasons(EngineOptions(dtype="bfloat16"), LARGE)["kv_cache_memory"]
    assert value > 131_072 * 2048 * 32 * 2
    assert "one sequence of the full 131072 tokens" in reason
    assert "kv_cache_memory" not in reasons(EngineOptions(kv_cache_memory=10_000))


def test_sliding_layers_count_their_window_only() -> None:
    sliding = replace(SMALL, layers=(LayerFacts(256, 100), LayerFacts(256)))
    assert sliding.cache_bytes(50, 2) == 2 * 256 * 100
    assert sliding.cache_bytes(1000, 2) == 2 * 256 * 1100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "tpu"}, "--device is 'tpu'; allowed: auto, cpu, cuda, rocm, xpu, mps, a GPU's with a number"),
        ({"device": "cpu:1"}, "--device is 'cpu:1'; allowed"),
        ({"device": "cuda:x"}, "--device is 'cuda:x'; allowed"),
        ({"gpu_memory_utilization": 0}, "--gpu-memory-utilization is 0; allowed: a number above 0, at most 1"),
        ({"gpu_memory_utilization": 1.1}, "--gpu-memory-utilization is 1.1"),
        ({"dtype": "int8"}, "--dtype is 'int8'; allowed: auto, float32, bfloat16, float16"),
        ({"isa": "sse9"}, "--isa is 'sse9'; allowed: auto, generic, avx2, avx512, avx512_bf16, amx, amx_emulated"),
        ({"arithmetic": "exact"}, "--arithmetic is 'exact'; allowed: strict, fast"),
        ({"isa": "amx"}, "--isa is 'amx'; allowed: auto, avx512, avx2, generic on this machine"),
        ({"policy": "lifo"}, "--policy is 'lifo'; allowed: fcfs, priority"),
        ({"threads": 0}, "--threads is 0; allowed: an integer from 1 to 1024"),
        ({"threads": True}, "--threads is True"),
        ({"max_num_seqs": -1}, "--max-num-seqs is -1"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens is 0"),
        ({"max_model_len": 2.5}, "--max-model-len is 2.5"),
        ({"max_model_len": 2049}, "--max-model-len is 2049; allowed: at most 2048, the context length of tiny"),
        ({"block_size": None}, "--block-size is None"),
        ({"block_size": 2048}, "--block-size is 2048; allowed: an integer from 1 to 1024"),
        ({"kv_cache_memory": 2**63}, "--kv-cache-memory is"),
        ({"kv_blocks": 1}, "--kv-blocks is 1; allowed: an integer from 2"),
        ({"depth": 2}, "--depth is 2; allowed: an integer from 0 to 1"),
        ({"seed": 2**64}, "--seed is"),
        ({"model": ""}, "--model is ''"),
        ({"served_model_name": ""}, "--served-model-name is ''"),
        ({"enable_prefix_caching": "yes"}, "--enable-prefix-caching is 'yes'; allowed: true, false"),
    ],
)
def test_bad_options_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(replace(EngineOptions(), **change), SMALL, MACHINE)
    assert message in str(caught.value)


def test_only_floats_can_be_quantised() -> None:
    with pytest.raises(ConfigError, match=r"--quantize is 'q4_k_m'; allowed: nothing: the weights of .* are quantised"):
        resolve(EngineOptions(quantize="q4_k_m"), SMALL, MACHINE)
    floats = replace(SMALL, float_values=SMALL.parameters, float_bytes=4 * SMALL.parameters)
    assert resolve(EngineOptions(quantize="q4_k_m"), floats, MACHINE).options.quantize == "q4_k_m"


def test_types_have_short_names() -> None:
    options = EngineOptions(dtype="bf16", kv_cache_dtype="fp16")
    assert (options.dtype, options.kv_cache_dtype) == ("bfloat16", "float16")
