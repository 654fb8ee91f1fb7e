"""GGUF tensors under their Hugging Face names and layouts.

Converters to GGUF rename tensors and, for some families, also change them: Llama's query and key rows are permuted for
interleaved rotary embedding, Gemma's norm weights have 1 added, experts are stacked, and GPT-OSS's joint gate and up
projection is split. Each is undone here when a tensor is read; what needs no change stays a view of the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config.errors import CheckpointError, quoted
from penstock.models.gguf.layouts import PREDICTS, TensorLayout, layout_of
from penstock.quant.formats import FORMATS, decode_to_float32, mxfp4
from penstock.quant.formats.record import Bytes
from penstock.quant.tensor import TensorInfo
from penstock.weights.readers.gguf_file import GgufTensor


@dataclass(frozen=True, slots=True)
class VirtualTensor:
    """A tensor as Hugging Face would store it; `load` makes its bytes from the file's."""

    info: TensorInfo
    load: Callable[[], Bytes]


@dataclass(frozen=True, slots=True)
class _Model:
    """A file being read.

    Attributes:
        layout: what is particular about its architecture.
        tensors, config: of the file.
        layer_names: of the layout, as they hold for this file.
    """

    layout: TensorLayout
    tensors: Mapping[str, GgufTensor]
    config: Mapping[str, Any]
    layer_names: Mapping[str, str]

    @classmethod
    def of(cls, arch: str, tensors: Mapping[str, GgufTensor], config: Mapping[str, Any]) -> _Model:
        layout = layout_of(arch, config)
        return cls(layout, tensors, config, layout.layer_names(tensors))


_ONE_ROW = (".shared_expert_gate.weight", ".moe_statics.e_score_correction_bias")  # [1, N], stored as [N]
_MAX_TENSORS = 2**18  # each costs some memory, and a small file can claim many experts
_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,3})\.([a-z_]+(?:1d|_[12]|\.[a-z_]+)?)\.(weight|bias|scale)")
_CONSTANT = re.compile(
    r"blk\.(0|[1-9]\d{0,3})\.(ffn_norm|ssm_a|ssm_d|ssm_dt\.bias|ssm_norm\.weight|ssm_conv1d\.weight|ssm_ba\.weight"
    r"|shortconv\.conv\.weight|exp_probs_b\.bias|ffn_gate_inp_shexp\.weight)"
)
_STACKED = re.compile(r"blk\.(0|[1-9]\d{0,3})\.ffn_(gate|down|up)_exps\.(weight|bias)")
_FUSED = re.compile(r"blk\.(0|[1-9]\d{0,3})\.attn_qkv\.(weight|bias)")
_ROPE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_SINGLE_EXPERT = re.compile(r"blk\.(0|[1-9]\d{0,3})\.ffn_(gate|down|up)\.(0|[1-9]\d{0,4})\.weight")


def _undecodable_reason(fmt: str) -> str | None:
    """Why a known ggml type cannot be decoded, with the nearest one that can; None if it can be."""
    if fmt in FORMATS:
        return None
    return f"{fmt.upper()} is a type for intermediate results, not for weights; take a file in Q8_0"


def load_raw(tensor: GgufTensor) -> Bytes:
    """The tensor's bytes in the file.

    Raises:
        CheckpointError: its format cannot be decoded.
    """
    reason = _undecodable_reason(tensor.format)
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


def _expert_name(layout: TensorLayout, layer: str, expert: object, which: str) -> str:
    assert layout.experts is not None
    prefix, names = layout.experts
    return f"model.layers.{layer}.{prefix}.{expert}.{names[which]}.weight"


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


def _joint_experts(layer: str, stacks: Mapping[tuple[str, str], GgufTensor]) -> Iterator[VirtualTensor]:
    """Gate and up interleaved row by row in `gate_up_proj`; MXFP4 stays MXFP4."""
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


def _apart(name: str, tensor: GgufTensor) -> VirtualTensor:
    """The target's ids of a head's tokens → how far apart they are (`weights.draft_heads.draft_ids`)."""

    def load() -> Bytes:
        ids = tensor.data.view("<i8")
        return (ids - np.arange(len(ids))).view(np.uint8)

    return replace(_plain(name, tensor), load=load)


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


def _constants(model: _Model, layer: str, stem: str, tensor: GgufTensor) -> Iterator[VirtualTensor]:
    """What recurrent layers keep in another shape, as its logarithm, or under one name with something else."""
    block, count = f"model.layers.{layer}", int(np.prod(tensor.shape))
    prefix = f"{block}.{model.layout.mixer}"
    if stem == "ssm_a":
        yield _log_rates(f"{prefix}.A_log", tensor)
    elif stem == "ffn_norm":
        yield _plain(f"{block}.{model.layer_names[stem]}.weight", tensor)
    elif stem == "ssm_d":
        yield _shaped(f"{prefix}.D", tensor, count)
    elif stem == "ssm_dt.bias":
        yield _shaped(f"{prefix}.{model.layout.step_bias}", tensor, count)
    elif stem == "ssm_norm.weight":
        yield _shaped(f"{prefix}.norm.weight", tensor, count)
    elif stem == "exp_probs_b.bias":
        yield _shaped(f"{block}.{model.layer_names.get(stem, 'mlp.expert_bias')}", tensor, count)
    elif stem == "ffn_gate_inp_shexp.weight":
        yield _shaped(f"{block}.mlp.shared_expert_gate.weight", tensor, 1, count)
    elif stem == "ssm_ba.weight" and f"blk.{layer}.ssm_in.weight" in model.tensors:
        yield _plain(f"{prefix}.in_proj_ba.weight", tensor)
    elif stem == "ssm_ba.weight":
        names = f"{prefix}.in_proj_b.weight", f"{prefix}.in_proj_a.weight"
        yield from _halves_by_head(names, tensor, model.config.get("linear_num_key_heads", 1))
    else:
        name = f"{prefix}.{'conv1d' if stem.startswith('ssm') else 'conv'}.weight"
        yield _shaped(name, tensor, *tensor.shape[:1], 1, *tensor.shape[1:])


def _simple(model: _Model, tensor: GgufTensor) -> VirtualTensor:
    """Everything that is one tensor on both sides. A name nobody knows is kept, so that the loader reports it."""
    layout, layer_names = model.layout, model.layer_names
    name, stem = layout.top_name(tensor.name), ""
    if match := _BLOCK.fullmatch(tensor.name):
        layer, stem, suffix = match.groups()
        known = layer_names.get(stem)
        if known is not None:
            name = f"model.layers.{layer}.{known}.{suffix}"
        if exact := layer_names.get(f"{stem}.{suffix}"):
            name = f"model.layers.{layer}.{exact}"
    if layout.permuted and stem in ("attn_q", "attn_k"):
        heads = model.config["num_attention_heads" if stem == "attn_q" else "num_key_value_heads"]
        return _unpermuted(name, tensor, heads)
    if layout.around_one and name.endswith("norm.weight"):
        return _minus_one(name, tensor)
    if name == "d2t" and tensor.format == "i64":
        return _apart(name, tensor)
    if name.endswith(_ONE_ROW) and len(tensor.shape) == 1:
        return _shaped(name, tensor, 1, *tensor.shape)
    return _plain(name, tensor)


def named_rows(arch: str, tensor: GgufTensor, config: Mapping[str, Any]) -> VirtualTensor:
    """A tensor [rows, any] that stands for the rows of one matrix of a model, under that one's Hugging Face name and
    with rows in its order; of an adapter, whose file has nothing of the model besides.

    Raises:
        CheckpointError: the rows are too few for the model's heads.
    """
    return _simple(_Model.of(arch, {tensor.name: tensor}, config), tensor)


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


def _unused(tensor: GgufTensor, config: Mapping[str, Any], predicts: bool) -> bool:
    """Whether neither the model nor what drafts for it has a use for a tensor, or the config says the same."""
    if tensor.name in _ROPE and _explained(tensor, config):
        return True
    block = _BLOCK.match(tensor.name) if config.get("num_nextn_predict_layers") else None
    if block and int(block[1]) >= config["num_hidden_layers"] + predicts:
        return True  # predicts further tokens
    return tensor.name == "cls.output.weight" and "classifier_from_token" in config  # two rows of the embedding


def _converted(model: _Model, tensor: GgufTensor) -> Iterable[VirtualTensor]:
    """What one tensor of the file is in Hugging Face's layout."""
    layout, config = model.layout, model.config
    constant = _CONSTANT.fullmatch(tensor.name) if layout.mixer is not None else None
    stacked, single = _STACKED.fullmatch(tensor.name), _SINGLE_EXPERT.fullmatch(tensor.name)
    if constant:
        return _constants(model, constant[1], constant[2], tensor)
    if layout.experts is not None and stacked and stacked[3] == "weight":
        count = config.get("num_experts") or config["num_local_experts"]
        return _unstacked(tensor, [_expert_name(layout, stacked[1], expert, stacked[2]) for expert in range(count)])
    if layout.experts is not None and single:
        return (_plain(_expert_name(layout, single[1], single[3], single[2]), tensor),)
    if tensor.name in layout.stacks:
        streams = range(config["altup_num_inputs"] - 1)
        return _unstacked(tensor, [f"{layout.stacks[tensor.name]}.{stream}.weight" for stream in streams])
    if layout.fused and _FUSED.fullmatch(tensor.name):
        return _split(tensor, config)
    return (_simple(model, tensor),)


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
    model = _Model.of(arch, tensors, config)
    found: list[VirtualTensor] = []
    stacks: dict[str, dict[tuple[str, str], GgufTensor]] = {}
    for tensor in tensors.values():
        if len(found) > _MAX_TENSORS:
            raise CheckpointError(f"with each expert on its own the file holds more than {_MAX_TENSORS} tensors.")
        stacked = _STACKED.fullmatch(tensor.name)
        if _unused(tensor, config, arch in PREDICTS):
            continue
        if stacked and model.layout.joint_experts:
            stacks.setdefault(stacked[1], {})[stacked[2], stacked[3]] = tensor
        else:
            found.extend(_converted(model, tensor))
    for layer, members in stacks.items():
        found.extend(_joint_experts(layer, members))
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
    return freqs.format == "f32" and bool((freqs.decoded() == 1).all())
