"""GGUF tensors under their Hugging Face names and layouts.

Converters to GGUF rename tensors and, for some families, also change them: Llama's query and key rows are permuted for
interleaved rotary embedding, Gemma's norm weights have 1 added, experts are stacked, and GPT-OSS's joint gate and up
projection is split. Each is undone here when a tensor is read; what needs no change stays a view of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config.errors import CheckpointError
from penstock.quant.formats import decode_to_float32, mxfp4
from penstock.quant.formats.record import Bytes
from penstock.quant.tensor import TensorInfo
from penstock.weights.readers.files import quoted
from penstock.weights.readers.gguf_config import undecodable_reason
from penstock.weights.readers.gguf_decoders import DECODERS, GATED, NUMBERED, shared
from penstock.weights.readers.gguf_decoders import TOP_NAMES as DECODER_TOP_NAMES
from penstock.weights.readers.gguf_file import GgufTensor
from penstock.weights.readers.gguf_recurrent import NEMOTRON_H


@dataclass(frozen=True, slots=True)
class VirtualTensor:
    """A tensor as Hugging Face would store it; `load` makes its bytes from the file's."""

    info: TensorInfo
    load: Callable[[], Bytes]


TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
OWN_TOP_NAMES: Mapping[str, Mapping[str, str]] = {  # without the ending
    "bert": {
        "position_embd": "model.embed_positions",
        "token_types": "model.embed_types",
        "token_embd_norm": "model.embed_norm",
        "cls": "classifier.dense",
        "cls.output": "classifier.out_proj",
    },
    "nomic-bert": {"token_types": "model.embed_types", "token_embd_norm": "model.embed_norm"},
    "modern-bert": {
        "token_embd_norm": "embeddings.norm",
        "output_norm": "final_norm",
        "cls": "head.dense",
        "cls.norm": "head.norm",
        "cls.output": "classifier",
    },
    "gemma-embedding": {"dense_2": "2_Dense.linear", "dense_3": "3_Dense.linear"},
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _feed_forward(prefix: str) -> dict[str, str]:
    return {f"ffn_{part}": f"{prefix}.{part}_proj" for part in ("gate", "up", "down")}


def _mixer(prefix: str) -> dict[str, str]:
    parts = {"in": "in_proj", "conv1d": "conv1d", "x": "x_proj", "dt": "dt_proj", "out": "out_proj"}
    norms = {f"{part}_norm": f"{part}_layernorm" for part in ("dt", "b", "c")}
    return {f"ssm_{ours}": f"{prefix}.{theirs}" for ours, theirs in (parts | norms).items()}


_QWEN = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp": "mlp.gate",
    **shared("mlp.shared_expert"),
}
_LFM2 = {f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")}
_GEMMA3 = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BERT = {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "post_feedforward_layernorm",
}
OWN_NAMES: Mapping[str, Mapping[str, str]] = {
    "lfm2": _LFM2,
    "lfm2moe": _LFM2 | {"ffn_gate_inp": "mlp.gate"},
    "qwen3next": _QWEN,
    "qwen35": _QWEN,
    "qwen35moe": _QWEN,
    "mamba": _mixer("mixer") | {"attn_norm": "norm"},
    "mamba2": _mixer("mixer") | {"attn_norm": "norm"},
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _mixer("mixer") | NEMOTRON_H),
    "granitehybrid": {
        **_mixer("mamba"),
        **_feed_forward("shared_mlp"),
        "ffn_gate_inp": "block_sparse_moe.gate",
        **shared("shared_mlp"),
    },
    "falcon-h1": {**_mixer("mamba"), **_feed_forward("feed_forward"), "ffn_norm": "pre_ff_layernorm"},
    "jamba": {
        **_mixer("mamba"),
        **_feed_forward("feed_forward"),
        "ffn_norm": "pre_ff_layernorm",
        "ffn_gate_inp": "feed_forward.router",
    },
    "gemma3": _GEMMA3,
    "gemma-embedding": _GEMMA3,
    "bert": _BERT,
    "nomic-bert": _BERT,
    "modern-bert": {
        "attn_norm": "attn_norm",
        "attn_qkv": "self_attn.qkv_proj",
        "ffn_norm": "mlp_norm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "mixtral": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "qwen3moe": {"ffn_gate_inp": "mlp.gate"},
    "gpt-oss": {
        "ffn_gate_inp": "mlp.router",
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks.weight": "self_attn.sinks",
    },
}
EXPERT_NAMES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "mixtral": ("block_sparse_moe.experts", NUMBERED),
    "qwen3moe": ("mlp.experts", GATED),
    "qwen3next": ("mlp.experts", GATED),
    "qwen35moe": ("mlp.experts", GATED),
    "lfm2moe": ("mlp.experts", GATED),
    "granitehybrid": ("block_sparse_moe.experts", GATED),
    "jamba": ("feed_forward.experts", GATED),
    "nemotron_h_moe": ("mixer.experts", GATED),
    **{arch: decoder.experts for arch, decoder in DECODERS.items()},
}
_PERMUTED = ("llama", "mixtral", "granitehybrid", *(arch for arch, decoder in DECODERS.items() if decoder.permuted))
_AROUND_ONE = (
    *("gemma3", "gemma-embedding", "qwen3next", "qwen35", "qwen35moe"),
    *(arch for arch, decoder in DECODERS.items() if decoder.around_one),
)
_ONE_ROW = (".shared_expert_gate.weight", ".moe_statics.e_score_correction_bias")  # [1, N], stored as [N]
# Where recurrent families keep their mixers' constants.
MIXERS = {
    **dict.fromkeys(("lfm2", "lfm2moe"), "conv"),
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), "linear_attn"),
    **dict.fromkeys(("mamba", "mamba2", "nemotron_h", "nemotron_h_moe"), "mixer"),
    **dict.fromkeys(("granitehybrid", "falcon-h1", "jamba"), "mamba"),
}
_MAX_TENSORS = 2**18  # each costs some memory, and a small file can claim many experts
_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,3})\.([a-z_]+(?:1d|_[12]|\.[a-z_]+)?)\.(weight|bias|scale)")
_CONSTANT = re.compile(
    r"blk\.(0|[1-9]\d{0,3})\.(ffn_norm|ssm_a|ssm_d|ssm_dt\.bias|ssm_norm\.weight|ssm_conv1d\.weight|ssm_ba\.weight"
    r"|shortconv\.conv\.weight|exp_probs_b\.bias|ffn_gate_inp_shexp\.weight)"
)
_STACKED = re.compile(r"blk\.(0|[1-9]\d{0,3})\.ffn_(gate|down|up)_exps\.(weight|bias)")
_FUSED = re.compile(r"blk\.(0|[1-9]\d{0,3})\.attn_qkv\.(weight|bias)")
_STREAMS = {
    "altup_proj.weight": "model.altup_projections",
    "altup_unembd_proj.weight": "model.altup_unembed_projections",
}
_ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_SINGLE_EXPERT = re.compile(r"blk\.(0|[1-9]\d{0,3})\.ffn_(gate|down|up)\.(0|[1-9]\d{0,4})\.weight")


def load_raw(tensor: GgufTensor) -> Bytes:
    """The tensor's bytes in the file.

    Raises:
        CheckpointError: its format cannot be decoded.
    """
    reason = undecodable_reason(tensor.format)
    if reason is not None:
        raise CheckpointError(f"tensor {quoted(tensor.name)}: {reason}.")
    return tensor.data


def _plain(name: str, tensor: GgufTensor) -> VirtualTensor:
    info = TensorInfo(name, tensor.shape, tensor.format, tensor.data.size)
    return VirtualTensor(info, lambda: load_raw(tensor))


def _unpermuted(name: str, tensor: GgufTensor, heads: int) -> VirtualTensor:
    """Rows of each head back from (pair, half) to (half, pair) order. Rows are whole blocks, so raw bytes move."""
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise CheckpointError(f"tensor {quoted(tensor.name)} has {rows} rows, no multiple of 2 × {heads} heads.")

    def load() -> Bytes:
        split = load_raw(tensor).reshape(heads, rows // heads // 2, 2, -1)
        return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(-1)

    return replace(_plain(name, tensor), load=load)


def _minus_one(name: str, tensor: GgufTensor) -> VirtualTensor:
    def load() -> Bytes:
        with np.errstate(invalid="ignore"):
            return (decode_to_float32(tensor.format, load_raw(tensor)) - np.float32(1)).view(np.uint8)

    elements = int(np.prod(tensor.shape))
    return VirtualTensor(TensorInfo(name, tensor.shape, "f32", 4 * elements), load)


def _load_expert(tensor: GgufTensor, index: int) -> Bytes:
    size = tensor.data.size // tensor.shape[0]
    return load_raw(tensor)[index * size : (index + 1) * size]


def _unstacked(tensor: GgufTensor, names: Sequence[str]) -> Iterator[VirtualTensor]:
    """The matrices of a stack, each under its name."""
    count = len(names)
    if len(tensor.shape) != 3 or tensor.shape[0] != count:
        raise CheckpointError(f"tensor {quoted(tensor.name)} has shape {tensor.shape}; [{count}, out, in] is needed.")
    for index, name in enumerate(names):
        info = TensorInfo(name, tensor.shape[1:], tensor.format, tensor.data.size // count)
        yield VirtualTensor(info, partial(_load_expert, tensor, index))


def _expert_names(arch: str, layer: str, which: str, config: Mapping[str, Any]) -> list[str]:
    (prefix, names), count = EXPERT_NAMES[arch], config.get("num_experts") or config["num_local_experts"]
    return [f"model.layers.{layer}.{prefix}.{expert}.{names[which]}.weight" for expert in range(count)]


def _interleaved(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Axis 1 of the parts taken in turn; one part stays as it is."""
    if len(parts) == 1:
        return parts[0]
    return np.stack(parts, axis=2).reshape(parts[0].shape[0], -1, *parts[0].shape[2:])


def _mxfp4_pair(name: str, parts: list[GgufTensor]) -> Iterator[VirtualTensor]:
    experts, rows, columns = parts[0].shape
    rows *= len(parts)
    groups = columns // mxfp4.BLOCK_VALUES

    def blocks() -> npt.NDArray[np.uint8]:
        return _interleaved([load_raw(part).reshape(experts, -1, groups, 1 + mxfp4.PACKED_BYTES) for part in parts])

    shape = (experts, rows, groups)
    packed = TensorInfo(f"{name}_blocks", (*shape, mxfp4.PACKED_BYTES), "u8", experts * rows * columns // 2)
    scales = TensorInfo(f"{name}_scales", shape, "u8", experts * rows * groups)
    yield VirtualTensor(packed, lambda: mxfp4.from_gguf_blocks(blocks())[0].reshape(-1))
    yield VirtualTensor(scales, lambda: np.ascontiguousarray(blocks()[..., 0]).reshape(-1))


def _transposed(name: str, parts: list[GgufTensor]) -> VirtualTensor:
    """[E, out, in] parts → [E, in, out × parts]; 16- and 32-bit floats keep their format, others become f32."""
    fmt = parts[0].format if {part.format for part in parts} in ({"f32"}, {"f16"}, {"bf16"}) else "f32"
    item = np.dtype(np.uint32 if fmt == "f32" else np.uint16)
    experts, rows, columns = parts[0].shape

    def items(part: GgufTensor) -> npt.NDArray[Any]:
        data = load_raw(part) if part.format == fmt else decode_to_float32(part.format, load_raw(part)).view(np.uint8)
        return np.ascontiguousarray(data).view(item).reshape(part.shape)

    def load() -> Bytes:
        joined = _interleaved([items(part) for part in parts])
        return np.ascontiguousarray(joined.swapaxes(1, 2)).reshape(-1).view(np.uint8)

    shape = (experts, columns, rows * len(parts))
    return VirtualTensor(TensorInfo(name, shape, fmt, experts * rows * columns * len(parts) * item.itemsize), load)


def _joined_bias(name: str, parts: list[GgufTensor]) -> VirtualTensor:
    def load() -> Bytes:
        decoded = [decode_to_float32(part.format, load_raw(part)).reshape(part.shape) for part in parts]
        return np.ascontiguousarray(_interleaved(decoded)).reshape(-1).view(np.uint8)

    experts, width = parts[0].shape
    return VirtualTensor(TensorInfo(name, (experts, width * len(parts)), "f32", 4 * experts * width * len(parts)), load)


def _gpt_oss_experts(layer: str, stacks: Mapping[tuple[str, str], GgufTensor]) -> Iterator[VirtualTensor]:
    """Gate and up interleaved row by row in `gate_up_proj`, as GPT-OSS keeps them; MXFP4 stays MXFP4."""
    for joint, members in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        for suffix, rank in (("weight", 3), ("bias", 2)):
            parts = [stacks[which, suffix] for which in members if (which, suffix) in stacks]
            if not parts:
                continue
            shapes = [part.shape for part in parts]
            if len(parts) != len(members) or len(set(shapes)) != 1 or len(shapes[0]) != rank:
                raise CheckpointError(
                    f"layer {layer}: the experts' {' and '.join(members)} {suffix} have shapes {shapes}; "
                    f"{len(members)} equal ones of {rank} axes are needed."
                )
            name = f"model.layers.{layer}.mlp.experts.{joint}"
            if suffix == "bias":
                yield _joined_bias(f"{name}_bias", parts)
            elif all(part.format == "mxfp4" for part in parts):
                yield from _mxfp4_pair(name, parts)
            else:
                yield _transposed(name, parts)


def _shaped(name: str, tensor: GgufTensor, *shape: int) -> VirtualTensor:
    """The same elements in another shape."""
    return VirtualTensor(TensorInfo(name, shape, tensor.format, tensor.data.size), lambda: load_raw(tensor))


def _log_rates(name: str, tensor: GgufTensor) -> VirtualTensor:
    """Decay rates a, negative → log(-a), and the last axis gone if it has one element."""

    def load() -> Bytes:
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.log(-decode_to_float32(tensor.format, load_raw(tensor))).view(np.uint8)

    shape = tensor.shape[:-1] if tensor.shape[1:] and tensor.shape[-1] == 1 else tensor.shape
    return VirtualTensor(TensorInfo(name, shape, "f32", 4 * int(np.prod(shape))), load)


def _halves_by_head(names: tuple[str, str], tensor: GgufTensor, heads: int) -> Iterator[VirtualTensor]:
    """Rows of each head parted in two halves, each for all heads. Rows are whole blocks, so raw bytes move."""
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise CheckpointError(f"tensor {quoted(tensor.name)} has {rows} rows, no multiple of 2 × {heads} heads.")
    for half, name in enumerate(names):

        def load(half: int = half) -> Bytes:
            split = load_raw(tensor).reshape(heads, 2, -1)
            return np.ascontiguousarray(split[:, half]).reshape(-1)

        shape = (rows // 2, *tensor.shape[1:])
        yield VirtualTensor(TensorInfo(name, shape, tensor.format, tensor.data.size // 2), load)


def _constants(
    arch: str, layer: str, stem: str, tensor: GgufTensor, config: Mapping[str, Any], *, grouped: bool
) -> Iterator[VirtualTensor]:
    """What recurrent layers keep in another shape, as its logarithm, or under one name with something else."""
    block, count = f"model.layers.{layer}", int(np.prod(tensor.shape))
    prefix = f"{block}.{MIXERS[arch]}"
    if stem == "ssm_a":
        yield _log_rates(f"{prefix}.A_log", tensor)
    elif stem == "ffn_norm":
        yield _plain(f"{block}.{OWN_NAMES[arch].get(stem, LAYER_NAMES[stem])}.weight", tensor)
    elif stem == "ssm_d":
        yield _shaped(f"{prefix}.D", tensor, count)
    elif stem == "ssm_dt.bias":
        yield _shaped(f"{prefix}.{'dt_proj.bias' if arch in ('mamba', 'jamba') else 'dt_bias'}", tensor, count)
    elif stem == "ssm_norm.weight":
        yield _shaped(f"{prefix}.norm.weight", tensor, count)
    elif stem == "exp_probs_b.bias":
        yield _shaped(f"{block}.{OWN_NAMES[arch].get(stem, 'mlp.expert_bias')}", tensor, count)
    elif stem == "ffn_gate_inp_shexp.weight":
        yield _shaped(f"{block}.mlp.shared_expert_gate.weight", tensor, 1, count)
    elif stem == "ssm_ba.weight" and grouped:
        yield _plain(f"{prefix}.in_proj_ba.weight", tensor)
    elif stem == "ssm_ba.weight":
        names = f"{prefix}.in_proj_b.weight", f"{prefix}.in_proj_a.weight"
        yield from _halves_by_head(names, tensor, config.get("linear_num_key_heads", 1))
    else:
        name = f"{prefix}.{'conv1d' if stem.startswith('ssm') else 'conv'}.weight"
        yield _shaped(name, tensor, *tensor.shape[:1], 1, *tensor.shape[1:])


def _simple(arch: str, tensor: GgufTensor, config: Mapping[str, Any], layer_names: Mapping[str, str]) -> VirtualTensor:
    """Everything that is one tensor on both sides. A name nobody knows is kept, so that the loader reports it."""
    name, stem = TOP_NAMES.get(tensor.name, tensor.name), ""
    if tensor.name == "token_embd_norm.weight" and arch in ("lfm2", "lfm2moe"):
        name = "model.norm.weight"
    whole, _, ending = tensor.name.rpartition(".")
    if own := (DECODER_TOP_NAMES if arch in DECODERS else OWN_TOP_NAMES.get(arch, {})).get(whole):
        name = f"{own}.{ending}"
    if match := _BLOCK.fullmatch(tensor.name):
        layer, stem, suffix = match.groups()
        known = layer_names.get(stem)
        if known is not None:
            name = f"model.layers.{layer}.{known}.{suffix}"
        if exact := layer_names.get(f"{stem}.{suffix}"):
            name = f"model.layers.{layer}.{exact}"
    if arch in _PERMUTED and stem in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
        return _unpermuted(name, tensor, heads)
    if arch in _AROUND_ONE and name.endswith("norm.weight"):
        return _minus_one(name, tensor)
    if name.endswith(_ONE_ROW) and len(tensor.shape) == 1:
        return _shaped(name, tensor, 1, *tensor.shape)
    return _plain(name, tensor)


def _split(tensor: GgufTensor, config: Mapping[str, Any]) -> Iterator[VirtualTensor]:
    """All queries, all keys, all values of a fused projection, each on its own. Rows are whole blocks."""
    _, layer, _, suffix = tensor.name.split(".")
    kv_heads = config["num_key_value_heads"]
    counts = {"q": config["num_attention_heads"], "k": kv_heads, "v": kv_heads}
    rows = tensor.shape[0] if tensor.shape else 1
    dim = config["head_dim"]
    start = 0
    if rows != dim * sum(counts.values()):
        raise CheckpointError(f"tensor {quoted(tensor.name)} has {rows} rows; {dim * sum(counts.values())} are needed.")
    size = tensor.data.size // rows
    for part, heads in counts.items():
        taken = slice(start, start + size * dim * heads)
        info = TensorInfo(
            f"model.layers.{layer}.self_attn.{part}_proj.{suffix}",
            (dim * heads, *tensor.shape[1:]),
            tensor.format,
            size * dim * heads,
        )
        yield VirtualTensor(info, lambda taken=taken: load_raw(tensor)[taken])  # type: ignore[misc]
        start = taken.stop


def _layer_names(arch: str, tensors: Mapping[str, GgufTensor]) -> Mapping[str, str]:
    """A family's names of what its layers have; a key with an ending stands for the whole name."""
    own = DECODERS[arch].layer_names(tensors) if arch in DECODERS else OWN_NAMES.get(arch, {})
    joint = {"ffn_gate_up_exps.weight": f"{EXPERT_NAMES[arch][0]}.gate_up_proj"} if arch in EXPERT_NAMES else {}
    return {**LAYER_NAMES, **joint, **own}


def hugging_face_tensors(
    arch: str, tensors: Mapping[str, GgufTensor], config: Mapping[str, Any]
) -> dict[str, VirtualTensor]:
    """All tensors of a GGUF model by Hugging Face name.

    Args:
        arch: general.architecture.
        tensors: the file's (or all shards') tensor table.
        config: what `gguf_config` made of the same file.

    Raises:
        CheckpointError: shapes that do not fit the layout of the family, or two tensors for one name.
    """
    arch = "mixtral" if config["model_type"] == "mixtral" else arch
    found: list[VirtualTensor] = []
    stacks: dict[str, dict[tuple[str, str], GgufTensor]] = {}
    layer_names, further = _layer_names(arch, tensors), config.get("num_nextn_predict_layers")
    for tensor in tensors.values():
        if len(found) > _MAX_TENSORS:
            raise CheckpointError(f"with each expert on its own the file holds more than {_MAX_TENSORS} tensors.")
        stacked, single = _STACKED.fullmatch(tensor.name), _SINGLE_EXPERT.fullmatch(tensor.name)
        constant = _CONSTANT.fullmatch(tensor.name) if arch in MIXERS else None
        if tensor.name in _ROPE and _explained(tensor, config):
            continue
        if further and (block := _BLOCK.match(tensor.name)) and int(block[1]) >= config["num_hidden_layers"]:
            continue  # predicts further tokens
        if tensor.name == "cls.output.weight" and "classifier_from_token" in config:
            continue  # two rows of the embedding
        if constant:
            grouped = f"blk.{constant[1]}.ssm_in.weight" in tensors
            found.extend(_constants(arch, constant[1], constant[2], tensor, config, grouped=grouped))
            continue
        if stacked and arch == "gpt-oss":
            stacks.setdefault(stacked[1], {})[stacked[2], stacked[3]] = tensor
        elif stacked and arch in EXPERT_NAMES and stacked[3] == "weight":
            found.extend(_unstacked(tensor, _expert_names(arch, stacked[1], stacked[2], config)))
        elif single and arch in EXPERT_NAMES:
            prefix, names = EXPERT_NAMES[arch]
            found.append(_plain(f"model.layers.{single[1]}.{prefix}.{single[3]}.{names[single[2]]}.weight", tensor))
        elif tensor.name in _STREAMS and arch == "gemma3n":
            streams = range(config["altup_num_inputs"] - 1)
            found.extend(_unstacked(tensor, [f"{_STREAMS[tensor.name]}.{stream}.weight" for stream in streams]))
        elif arch in DECODERS and _FUSED.fullmatch(tensor.name):
            found.extend(_split(tensor, config))
        else:
            found.append(_simple(arch, tensor, config, layer_names))
    for layer, members in stacks.items():
        found.extend(_gpt_oss_experts(layer, members))
    by_name = {virtual.info.name: virtual for virtual in found}
    if len(by_name) != len(found):
        raise CheckpointError(f"{len(found) - len(by_name)} tensors of the file have the name of another one.")
    return by_name


def _explained(freqs: GgufTensor, config: Mapping[str, Any]) -> bool:
    """Whether the config already says what the stored rotary divisors do (nothing, or Llama 3.1's scaling)."""
    scaling = config.get("rope_parameters") or config["rope_scaling"]
    if scaling is not None:
        scaling = scaling.get("full_attention", scaling)
        if scaling["rope_type"] == "proportional":
            return freqs.shape == (config["per_layer_config"][min(config["per_layer_config"])]["head_dim"] // 2,)
        return bool(scaling["rope_type"] == ("llama3" if freqs.name == "rope_freqs.weight" else "longrope"))
    return freqs.format == "f32" and bool((decode_to_float32("f32", freqs.data) == 1).all())
