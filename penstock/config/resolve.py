"""Options as given → options fully concrete, every derived value with its reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.config.cache_spec import RUN
from penstock.config.data_parallel import check_data_parallel
from penstock.config.errors import ConfigError
from penstock.config.kv_events import HASH_ALGORITHMS, kv_events
from penstock.config.kv_store import check_store
from penstock.config.limits import (
    MAX_CPU_LORAS,
    MAX_LORA_RANK,
    MAX_LORAS,
    MAX_THREADS,
    MAX_VOCABULARY,
    MAX_WATERMARK_KEY,
)
from penstock.config.logits_processors import registered
from penstock.config.logprobs import LOGPROBS_MODES
from penstock.config.machine import Accelerator, Machine
from penstock.config.model_settings import PoolerSettings
from penstock.config.options import GPUS, EngineOptions
from penstock.config.quantisation import QUANTIZE_FORMATS
from penstock.config.ranks import check_ranks, context_block, local_ranks, rank_count, rank_threads, several
from penstock.config.speculation import speculation

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DEVICES = ("auto", "cpu", *GPUS, "interpreter")
DTYPES = ("auto", *DTYPE_BYTES)
KV_CACHE_DTYPES = (*DTYPES, "fp8", "int8", "int4")
KV_ELEMENT_BYTES = {**DTYPE_BYTES, "fp8": 1.0, "int8": 1.0, "int4": 0.5}  # scales not counted
ISAS = ("auto", "generic", "avx2", "avx512", "avx512_bf16", "amx", "amx_emulated")
ARITHMETICS = ("strict", "fast")
BF16_ISAS = ("avx512_bf16",)  # they multiply a bfloat16 cache in pairs
LOAD_FORMATS = ("auto", "dummy")
POLICIES = ("fcfs", "priority")
GOALS = ("balanced", "latency", "throughput")
SMALL_MODEL_PARAMETERS = 50_000_000

Derived = tuple[Any, str]


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One attention layer's cache: elements a token, and the window it looks back (None for everything)."""

    elements_per_token: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of a model from its headers alone.

    Attributes:
        name: the folder's or file's name.
        parameters: values in all tensors.
        file_bytes: bytes of all tensors in the checkpoint.
        checkpoint_dtype: "float32", "bfloat16" or "float16": the type its weights were published in.
        context_length: longest sequence the model was made for.
        longest_context: what may be asked for instead, if longer ("dynamic" rope scaling).
        context_note: how the length that is served changes what is computed, if it does.
        vocab_size, hidden_size, intermediate_size, attention_size: widths (attention_size: heads × head size).
        layers: attention layers, in order.
        whole_prompts: a prompt is computed in one step: the model is an encoder.
        float_values, float_bytes: of matrices that are stored as floats, values and bytes.
        decoded: quantised matrices are decoded at load, because no kernel reads their format.
        stored: what most of its values are stored as, for people: "bf16", "q4_k", "gptq".
    """

    name: str
    parameters: int
    file_bytes: int
    checkpoint_dtype: str
    context_length: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention_size: int
    layers: tuple[LayerFacts, ...]
    whole_prompts: bool = False
    float_values: int = 0
    float_bytes: int = 0
    decoded: bool = False
    longest_context: int = 0
    context_note: str = ""
    stored: str = ""

    def cache_bytes(self, tokens: int, dtype_bytes: float) -> int:
        """Bytes of the cache entries of one sequence of that many tokens, without rounding to blocks."""
        kept = (layer.elements_per_token * min(tokens, layer.window or tokens) for layer in self.layers)
        return int(dtype_bytes * sum(kept))


@dataclass(frozen=True, slots=True)
class Decision:
    """A derived setting, or the implementation an op got, and why."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """Concrete options; `reasons` holds (name, value, reason) of every one that was derived."""

    options: EngineOptions
    reasons: tuple[tuple[str, Any, str], ...]


def _refuse(name: str, value: object, allowed: str, why: str = "") -> ConfigError:
    flag = "--" + name.replace("_", "-")
    return ConfigError(f"{flag} is {value!r}; allowed: {allowed}.{why and ' ' + why}")


def _integer(options: EngineOptions, name: str, low: int, high: int, *, optional: bool = True) -> None:
    value = getattr(options, name)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _refuse(name, value, f"an integer from {low} to {high}")


def _one_of(options: EngineOptions, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(options, name)
    if value not in allowed:
        raise _refuse(name, value, ", ".join(allowed))


def validate(options: EngineOptions) -> None:
    """Checks every option on its own.

    Raises:
        ConfigError: names the flag, its value and what is allowed.
    """
    if not isinstance(options.model, str) or not options.model:
        raise _refuse("model", options.model, "a folder, a .gguf file or penstock-concierge")
    if options.served_model_name is not None and not options.served_model_name:
        raise _refuse("served_model_name", options.served_model_name, "a name that is not empty")
    numbered = re.fullmatch(rf"(?:{'|'.join(GPUS)}):\d{{1,3}}", str(options.device))
    if not numbered and options.device not in DEVICES:
        raise _refuse("device", options.device, f"{', '.join(DEVICES[:-1])}, a GPU's with a number, such as cuda:1")
    choices = (("dtype", DTYPES), ("kv_cache_dtype", KV_CACHE_DTYPES), ("isa", ISAS))
    hashes = (("prefix_caching_hash_algo", HASH_ALGORITHMS),)
    lists = (("policy", POLICIES), ("goal", GOALS), ("logprobs_mode", LOGPROBS_MODES))
    for name, allowed in (*choices, ("arithmetic", ARITHMETICS), ("load_format", LOAD_FORMATS), *lists, *hashes):
        _one_of(options, name, allowed)
    PoolerSettings.of(options.pooler_config)
    kv_events(options.kv_events_config)
    if options.quantize is not None:
        _one_of(options, "quantize", QUANTIZE_FORMATS)
    check_ranks(options)
    check_data_parallel(options)
    _integer(options, "threads", 1, MAX_THREADS)
    _integer(options, "max_model_len", 1, 2**31 - 1)
    _integer(options, "max_users", 1, 65_536)
    _integer(options, "max_num_seqs", 1, 65_536)
    _integer(options, "max_num_batched_tokens", 1, 2**24)
    _integer(options, "max_chunk_tokens", 1, 2**24)
    _integer(options, "block_size", 1, 1024, optional=False)
    _integer(options, "watermark_key", 0, MAX_WATERMARK_KEY, optional=False)
    _integer(options, "max_loras", 1, MAX_LORAS, optional=False)
    _integer(options, "max_lora_rank", 1, MAX_LORA_RANK, optional=False)
    _integer(options, "max_cpu_loras", 1, MAX_CPU_LORAS)
    _integer(options, "max_lora_bytes", 1, 2**40)
    share = options.gpu_memory_utilization
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise _refuse("gpu_memory_utilization", share, "a number above 0, at most 1")
    _integer(options, "pack_cache_size", 0, 2**60)
    for name in ("memory", "kv_cache_memory", "kv_ram", "kv_disk"):
        _integer(options, name, 1, 2**60)
    _integer(options, "kv_blocks", 2, 2**31 - 1)
    _integer(options, "kv_store_seconds", 0, 2**31 - 1)
    check_store(options.kv_store, options.kv_store_seconds)
    _integer(options, "depth", 0, 1)
    _integer(options, "max_logprobs", -1, MAX_VOCABULARY, optional=False)
    speculation(options.speculative_config)
    registered(options.logits_processors)
    _integer(options, "seed", -(2**63), 2**64 - 1, optional=False)
    for name in ("enable_prefix_caching", "share_prefix_cache", "batch_invariant"):
        if not isinstance(getattr(options, name), bool):
            raise _refuse(name, getattr(options, name), "true, false")
    if not all(isinstance(text, str) and text for text in options.shared_prompts):
        raise _refuse("shared_prompts", options.shared_prompts, "texts that are not empty")
    if options.shared_prompts and not options.enable_prefix_caching:
        raise ConfigError("shared prompts need the prefix cache; leave out --no-enable-prefix-caching.")
    if options.enforce_eager not in (None, True, False):
        raise _refuse("enforce_eager", options.enforce_eager, "true, false")


def _name(options: EngineOptions, model: ModelFacts, machine: Machine) -> Derived:
    return model.name, "the model's file or folder name"


def _device(options: EngineOptions, model: ModelFacts, machine: Machine) -> Derived:
    if rank_count(options) > 1:
        return "cpu", f"{several(options)}: several processes compute on CPUs"
    return auto_device(machine)


def auto_device(machine: Machine) -> tuple[str, str]:
    """What --device auto takes, and why: the first GPU if there are kernels for it, else the CPU."""
    if not machine.accelerators:
        return "cpu", "torch sees no GPU"
    first = machine.accelerators[0]
    if first.no_kernels:
        return "cpu", f"--device {first.kind} would run the reference on {first.name}: {first.no_kernels}"
    untested = "" if first.kind == "cuda" else "; this kind of GPU is untested"
    return first.kind, f"{first.name}, the first GPU that torch sees{untested}"


def _dtype(options: EngineOptions, model: ModelFacts, machine: Machine) -> Derived:
    if (gpu := chosen_gpu(options, machine)) is not None:
        if model.checkpoint_dtype == "bfloat16" and gpu.no_bfloat16:
            return "float16", f"the checkpoint holds bfloat16, but {gpu.no_bfloat16}"
        return model.checkpoint_dtype, "what the checkpoint holds"
    if machine.isas:
        return "float32", "activations; weights stay in memory as they are stored"
    share = 4 * model.parameters / max(1, machine.memory_available)
    if share <= 0.25 or model.checkpoint_dtype == "float32":
        return "float32", f"exact, and its weights take {share:.0%} of the available memory"
    if machine.has_bf16:
        return model.checkpoint_dtype, f"float32 weights would take {share:.0%} of the available memory"
    return "float32", "this CPU has no bfloat16 instructions"


def _kv_cache_dtype(options: EngineOptions, model: ModelFacts, machine: Machine) -> Derived:
    if options.on_gpu or options.dtype != "float32":
        return options.dtype, "the compute type"
    if model.whole_prompts:
        return "float32", "an encoder keeps it for one step only"
    if model.checkpoint_dtype == "float32":
        return "float32", "what the checkpoint holds"
    if options.isa in BF16_ISAS:
        return "bfloat16", f"half of float32, and {options.isa} multiplies it as it is"
    return "float16", "half of float32, and finer than the bfloat16 or quantised weights that make the values"


def _isa(options: EngineOptions, model: ModelFacts, machine: Machine) -> Derived:
    if machine.isas:
        return machine.isas[0], "the best the processor and the native library have in common"
    return "generic", "the native library is not loaded"


def _threads(options: EngineOptions, model: ModelFacts, machine: Machine) -> Derived:
    if options.device == "cpu" and not machine.isas and model.parameters < SMALL_MODEL_PARAMETERS:
        return 1, "a model under 50M parameters gains little from more, and the other cores are free for its clients"
    cores = "cores this process may use (affinity and control-group quota)"
    if (count := local_ranks(options)) > 1:
        return rank_threads(machine.cores, 0, count), f"{cores}, dealt to {count} processes"
    return machine.cores, cores


def _max_model_len(options: EngineOptions, model: ModelFacts, machine: Machine) -> Derived:
    budget = options.max_num_batched_tokens
    if model.whole_prompts and budget is not None and budget < model.context_length:
        return budget, "an encoder's prompt is computed in one step, which has no more tokens"
    return model.context_length, f"the model's context length{model.context_note}"


def _max_num_seqs(options: EngineOptions, model: ModelFacts, machine: Machine) -> Derived:
    if options.max_users is not None:
        return options.max_users, f"--max-users {options.max_users}"
    if options.goal == "latency":
        return (64 if options.on_gpu else 8), "--goal latency: with few in a step each goes on quickly"
    if options.goal == "throughput":
        return (
            512 if options.on_gpu else 128
        ), "--goal throughput: what a step reads serves as many as there is room for"
    if options.on_gpu:
        return 256, "a GPU batches hundreds of sequences before it is busy"
    return 64, "a CPU is busy with fewer; more only adds to everybody's wait"


def _max_num_batched_tokens(options: EngineOptions, model: ModelFacts, machine: Machine) -> Derived:
    usual, why = _step_tokens(options, model)
    length = options.max_model_len or 1  # resolved before
    if model.whole_prompts and length > usual:
        return length, "an encoder's prompt is computed in one step"
    return usual, why


def _step_tokens(options: EngineOptions, model: ModelFacts) -> Derived:
    if options.goal == "latency":
        return (2048 if options.on_gpu else 256), "--goal latency: short chunks of prompts hold up no stream for long"
    if options.goal == "throughput":
        return (16384 if options.on_gpu else 2048), "--goal throughput: long chunks of prompts are computed faster"
    if options.on_gpu:
        return 8192, "keeps a GPU's matrix units busy"
    if model.parameters < SMALL_MODEL_PARAMETERS:
        return 2048, "a model under 50M parameters is fast enough that a long prompt chunk delays nobody noticeably"
    return 512, "a longer prompt chunk would make running sequences wait on a CPU"


def _depth(options: EngineOptions, model: ModelFacts, machine: Machine) -> Derived:
    if options.on_gpu:
        return 1, "a step is prepared while the GPU runs the one before"
    return 0, "a CPU that prepares steps does not compute them"


def _enforce_eager(options: EngineOptions, model: ModelFacts, machine: Machine) -> Derived:
    if options.device_kind == "cuda":
        return False, "recorded steps cost the host little"
    return True, "only steps of NVIDIA's GPUs are recorded as graphs"


def _kv_cache_memory(options: EngineOptions, model: ModelFacts, machine: Machine) -> Derived:
    length, seqs = options.max_model_len or 1, options.max_num_seqs or 1  # both resolved before
    size, block = KV_ELEMENT_BYTES[options.kv_cache_dtype], options.block_size
    if model.whole_prompts:  # layers take turns in one memory, those that slide in another
        tokens = 2 * (options.max_num_batched_tokens or 1) + seqs * block
        elements = sum(layer.elements_per_token for layer in model.layers[:2])
        return int(size * tokens * elements), "two steps' prompts, in turn for each layer"
    if options.on_gpu:
        return None, f"what weights and the largest step leave of {options.gpu_memory_utilization:.0%} of its memory"
    if options.memory is not None:
        return None, "what weights and the largest step leave of --memory"
    # One block more a layer and sequence than tokens need, because blocks are not shared while they are written.
    slack = int(size * block * sum(layer.elements_per_token for layer in model.layers))
    full = model.cache_bytes(length, size) + 2 * slack
    wanted = seqs * (model.cache_bytes(-(-length // 4), size) + slack)
    quarter = machine.memory_available // 4
    if options.max_users is not None:
        whole = min(seqs * full, 2 * quarter)
        return whole, f"--max-users {seqs}: {seqs} sequences of {length} tokens, within half of the available memory"
    if full >= min(wanted, quarter):
        return full, f"one sequence of the full {length} tokens, the least that is useful"
    if wanted <= quarter:
        return wanted, f"{seqs} sequences of a quarter of {length} tokens"
    return quarter, "a quarter of the available memory"


_RULES: tuple[tuple[str, Callable[[EngineOptions, ModelFacts, Machine], Derived]], ...] = (
    ("served_model_name", _name),
    ("device", _device),
    ("dtype", _dtype),
    ("isa", _isa),
    ("kv_cache_dtype", _kv_cache_dtype),
    ("threads", _threads),
    ("max_model_len", _max_model_len),
    ("max_num_seqs", _max_num_seqs),
    ("max_num_batched_tokens", _max_num_batched_tokens),
    ("depth", _depth),
    ("enforce_eager", _enforce_eager),
    ("kv_cache_memory", _kv_cache_memory),
)


def chosen_gpu(options: EngineOptions, machine: Machine) -> Accelerator | None:
    """The GPU that `options.device`, which is no "auto", names; None for a CPU.

    Raises:
        ConfigError: torch sees none such.
    """
    if not options.on_gpu:
        return None
    number = int(options.device.partition(":")[2] or 0)
    found = [gpu for gpu in machine.accelerators if gpu.kind == options.device_kind]
    if number >= len(found):
        seen = [f"{gpu.kind}:{gpu.index} ({gpu.name})" for gpu in machine.accelerators]
        allowed = ", ".join(("auto", "cpu", *seen))
        raise ConfigError(
            f"--device is {options.device!r}, but torch sees {'no GPU' if not seen else 'no such GPU'} here; "
            f"allowed: {allowed}."
        )
    return found[number]


def _check_types(options: EngineOptions, machine: Machine) -> None:
    """Whether the device computes with the types, all of which are concrete."""
    gpu = chosen_gpu(options, machine)
    if gpu is None and options.device != "interpreter":
        return
    if gpu is not None and gpu.no_bfloat16 and options.dtype == "bfloat16":
        raise _refuse("dtype", options.dtype, "auto, float16, float32", _sentence(gpu.no_bfloat16))
    why_not = {"int8": "GPUs have no kernels for it", "int4": "GPUs have no kernels for it"}
    if gpu is not None and (no_fp8 := gpu.no_kernels or gpu.no_fp8):
        why_not["fp8"] = no_fp8
    if options.kv_cache_dtype in why_not:
        allowed = ", ".join(kind for kind in KV_CACHE_DTYPES if kind not in why_not)
        why = _sentence(why_not[options.kv_cache_dtype])
        raise _refuse("kv_cache_dtype", options.kv_cache_dtype, f"{allowed} on this device", why)


def _sentence(clause: str) -> str:
    return f"{clause[:1].upper()}{clause[1:]}."


def _check_against_machine(options: EngineOptions, model: ModelFacts, machine: Machine) -> None:
    if options.device != "auto":
        chosen_gpu(options, machine)
    if machine.isas and options.isa not in ("auto", *machine.isas):
        why = dict(machine.refused_isas).get(options.isa, "")
        here = ", ".join(("auto", *machine.isas)) + " on this machine"
        raise _refuse("isa", options.isa, here, why[:1].upper() + why[1:])
    longest = max(model.context_length, model.longest_context)
    if options.max_model_len is not None and options.max_model_len > longest:
        raise _refuse(
            "max_model_len",
            options.max_model_len,
            f"at most {longest}, the context length of {model.name}",
        )
    if options.quantize is not None and not model.float_values:
        raise _refuse("quantize", options.quantize, f"nothing: the weights of {model.name} are quantised already")
    length, budget = options.max_model_len, options.max_num_batched_tokens
    if model.whole_prompts and length is not None and budget is not None and budget < length:
        allowed = f"at least --max-model-len, {length}: an encoder's prompt is computed in one step"
        raise _refuse("max_num_batched_tokens", budget, allowed)


def resolve(options: EngineOptions, model: ModelFacts, machine: Machine) -> Resolved:
    """Gives every option that is "auto" or None a value and a reason; the others stay as they are.

    kv_blocks may stay None: it overrides the KV cache's size, and without it kv_cache_memory rules; on a GPU that may,
    too, which gives the cache what is left once the largest step has been measured.

    Raises:
        ConfigError: an option is outside its range, or model or machine cannot honour it.
    """
    validate(options)
    _check_against_machine(options, model, machine)
    reasons: list[tuple[str, Any, str]] = []
    count = local_ranks(options)
    if count > 1 and options.threads is not None:
        own = rank_threads(options.threads, 0, count)
        reasons.append(("threads", own, f"--threads {options.threads}, dealt to {count} processes"))
        options = replace(options, threads=own)
    if (block := context_block(options)) != options.block_size:
        sharing = options.decode_context_parallel_size
        why = f"--decode-context-parallel-size {sharing}: each has whole runs of {RUN} tokens"
        reasons.append(("block_size", block, why))
        options = replace(options, block_size=block)
    for name, rule in _RULES:
        if getattr(options, name) in (None, "auto"):
            value, reason = rule(options, model, machine)
            reasons.append((name, "the rest" if value is None else value, reason))
            options = replace(options, **{name: value})
    _check_types(options, machine)
    return Resolved(options, tuple(reasons))
