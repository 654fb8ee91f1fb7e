"""What a checkpoint's headers say of the model, for planning before anything is loaded. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

from penstock.config.errors import CheckpointError, quoted
from penstock.config.names import served_name
from penstock.config.resolve import DTYPE_BYTES, LayerFacts, ModelFacts
from penstock.models.defaults import with_defaults
from penstock.models.families import named, text_fields
from penstock.models.family_facts import UNKNOWN, FamilyFacts
from penstock.models.fields import Fields
from penstock.quant.methods import checkpoint_method
from penstock.quant.tensor import TensorInfo
from penstock.weights.checkpoint import Checkpoint, text_config
from penstock.weights.pooling import is_encoder

_FLOATS = ("f32", "f16", "bf16")
_SOUND = ("embed_vision", "embed_audio", "audio_tower")
_NOT_LOADED = tuple(
    f"{model}{part}."
    for model in ("", "model.")
    for part in ("vision_tower", "vision_model", "multi_modal_projector", "mm_projector", "mtp", *_SOUND)
)


def _integer(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        state = "missing" if value is None else repr(value)[:40]
        raise CheckpointError(f"config.json: {name} is {state}; an integer of at least 1 is needed.")
    return value


def _layers(fields: Fields, family: FamilyFacts) -> tuple[LayerFacts, ...]:
    config = fields.values
    count = _integer(config, "num_hidden_layers")
    if count > 4096:
        raise CheckpointError(f"config.json: num_hidden_layers is {count}; at most 4096 are allowed.")
    heads = _integer(config, "num_attention_heads")
    kv_heads = _integer(config, "num_key_value_heads", heads)
    elements = 2 * kv_heads * _integer(config, "head_dim", max(1, _integer(config, "hidden_size") // heads))
    if family.latent:
        elements = _integer(config, "kv_lora_rank") + _integer(config, "qk_rope_head_dim")
    windows, attends = family.windows(fields, count), family.attends(fields, count)
    own = count - shared if type(shared := config.get("num_kv_shared_layers")) is int else count
    sizes = [_own_elements(config, layer, elements) * attends[layer] for layer in range(max(0, own))]
    return tuple(LayerFacts(size, window) for size, window in zip(sizes, windows[: len(sizes)], strict=True))


def _own_elements(config: Mapping[str, Any], layer: int, usual: int) -> int:
    """Elements a token of a layer whose heads may be stated by themselves (Gemma 4)."""
    layers = config.get("per_layer_config")
    own = layers.get(str(layer)) if isinstance(layers, Mapping) else None
    if not isinstance(own, Mapping):
        return usual
    kv_heads = _integer(config, "num_key_value_heads", _integer(config, "num_attention_heads"))
    dim = _integer(config, "head_dim", 1)
    return 2 * _integer(own, "num_key_value_heads", kv_heads) * _integer(own, "head_dim", dim)


def _head_size(config: Mapping[str, Any], usual: int, family: FamilyFacts) -> int:
    """A quarter of what attention holds of a head and token at once: query, key, value and result."""
    if not family.latent:
        own = config.get("per_layer_config")
        layers = own.values() if isinstance(own, Mapping) else ()
        stated = [_integer(layer, "head_dim", usual) for layer in layers if isinstance(layer, Mapping)]
        return max(_integer(config, "head_dim", usual), *stated, 0)
    rotated = _integer(config, "qk_rope_head_dim")
    plain = rotated + _integer(config, "qk_nope_head_dim") + _integer(config, "v_head_dim")
    return -(-(plain + 2 * _integer(config, "kv_lora_rank") + rotated) // 4)


def _dtype(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
    stated = config.get("dtype") or config.get("torch_dtype")
    if isinstance(stated, str) and stated in DTYPE_BYTES:
        return stated
    formats = {info.format for info in tensors.values()}
    return "float32" if formats == {"f32"} else "float16" if formats <= {"f32", "f16"} else "bfloat16"


def _context_lengths(config: Mapping[str, Any], family: FamilyFacts) -> tuple[int, int]:
    """max_position_embeddings, stretched where rope scaling was meant to and the number was left as it was.

    The second is what may be asked for: "dynamic" scaling stretches only then, as it turns all positions otherwise.
    """
    length = _integer(config, "max_position_embeddings", 2048)
    if family.padded:
        padding = config.get("pad_token_id", 1)
        length = max(1, length - padding - 1) if type(padding) is int else length
        return length, length
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, Mapping) or family.stretched:
        return length, length
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    original = scaling.get("original_max_position_embeddings", length)
    if kind not in ("yarn", "linear", "dynamic") or type(original) is not int or scaling.get("alpha") is not None:
        return length, length
    stretch = float(factor) if isinstance(factor, (int, float)) and 1 <= factor <= 2**20 else 1.0
    longest = max(length, int(original * stretch))
    return length if kind == "dynamic" else longest, longest


def _widest(config: Mapping[str, Any], usual: int) -> int:
    """The intermediate size, which some models state for every layer."""
    sizes = config.get("intermediate_size")
    if isinstance(sizes, list) and sizes:
        return max(_integer({"intermediate_size": size}, "intermediate_size") for size in sizes)
    return _integer(config, "intermediate_size", usual) * (2 if config.get("use_double_wide_mlp") is True else 1)


def _context_note(config: Mapping[str, Any], context: int, longest: int) -> str:
    """How the longest sequence served changes the rotation of all, whatever their length."""
    if longest > context:
        return f"; the rope's dynamic scaling, for up to {longest} tokens, begins with a longer --max-model-len"
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, Mapping) or scaling.get("rope_type", scaling.get("type")) not in ("longrope", "su"):
        return ""
    short = scaling.get("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    if type(short) is not int or short >= context:
        return ""
    others = f"--max-model-len {short} gives those for fewer"
    return f"; every prompt gets the rope factors for more than {short} tokens, {others}"


def _family(config: Mapping[str, Any]) -> tuple[Fields, FamilyFacts]:
    """The text model's configuration with its defaults, and what its family says of layers."""
    names = config.get("architectures")
    listed = names if isinstance(names, (list, tuple)) else ()
    if found := next((known for name in listed if (known := named(str(name)))), None):
        return text_fields(config, found[0]), found[0].facts
    text = text_config(config)
    return Fields(with_defaults(str(text.get("model_type")), text)), UNKNOWN


def _stored(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
    """What most of a model's values are stored as: a quantisation method's name, or a format."""
    quantised = config.get("quantization_config")
    if isinstance(quantised, Mapping) and isinstance(method := quantised.get("quant_method"), str):
        return quoted(method, 40).strip("'")
    values: Counter[str] = Counter()
    for info in tensors.values():
        values[info.format] += prod(info.shape)
    return max(values, key=values.__getitem__, default="")


def model_facts(checkpoint: Checkpoint) -> ModelFacts:
    """Reads the facts. Vision towers and a copy of tied embeddings are not loaded, so they do not count.

    Raises:
        CheckpointError: config.json lacks a size, or it is out of range; or its quantisation cannot be read.
    """
    fields, family = _family(checkpoint.config)
    config = fields.values
    skipped = ("lm_head.weight", "embed_out.weight") if config.get("tie_word_embeddings") is True else ()
    loaded = {
        name: info
        for name, info in checkpoint.tensors.items()
        if name not in skipped and not name.startswith(_NOT_LOADED)
    }
    hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    method = checkpoint_method(checkpoint.config, loaded)
    context, longest = _context_lengths(config, family)
    parameters, plain = method.count(loaded)
    floats = [info for info in plain if info.format in _FLOATS and len(info.shape) > 1]
    return ModelFacts(
        name=served_name(str(checkpoint.path)),
        parameters=parameters,
        file_bytes=sum(info.nbytes for info in loaded.values()),
        checkpoint_dtype=_dtype(config, checkpoint.tensors),
        context_length=context,
        longest_context=longest,
        context_note=_context_note(config, context, longest),
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_widest(config, 4 * hidden),
        attention_size=heads * _head_size(config, max(1, hidden // heads), family),
        layers=_layers(fields, family),
        whole_prompts=is_encoder(checkpoint.config),
        float_values=sum(prod(info.shape) for info in floats),
        float_bytes=sum(info.nbytes for info in floats),
        decoded=method.converted,
        stored=_stored(checkpoint.config, loaded),
    )
