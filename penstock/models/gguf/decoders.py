"""Decoder families in GGUF files: what sets each apart, as one entry of a table.

Most of a family's configuration is read the same way for all (`fields`): every family takes what it knows of it. An
entry adds names of tensors, how converters change them, and fields of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from penstock.config.errors import CheckpointError
from penstock.models.gguf.gemma import BESIDE_EXPERTS, STREAMS, gemma3n, gemma4
from penstock.models.gguf.metadata import MAX_EXPERTS, MAX_LAYERS, Keys, Tensors

Own = Callable[[Keys, Tensors], dict[str, Any]]
UNEVEN = ("gemma3n", "gemma4")  # sizes of heads and MLPs differ from layer to layer
_SIGMOID = 2  # expert_gating_func


def shared(prefix: str) -> dict[str, str]:
    """The MLP beside routed experts."""
    return {f"ffn_{part}_shexp": f"{prefix}.{part}_proj" for part in ("gate", "up", "down")}


GATED = MappingProxyType({"gate": "gate_proj", "down": "down_proj", "up": "up_proj"})
NUMBERED = MappingProxyType({"gate": "w1", "down": "w2", "up": "w3"})
TOP_NAMES = MappingProxyType(
    {
        "output_norm": "model.norm",
        "output": "lm_head",
        "position_embd": "model.wpe",
        "token_embd_norm": "model.word_embeddings_layernorm",
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    }
)
NAMES = MappingProxyType(
    {
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "ffn_gate_inp": "mlp.gate",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        **shared("mlp.shared_experts"),
    }
)


@dataclass(frozen=True, slots=True)
class Decoder:
    """One architecture of GGUF files.

    Attributes:
        architecture, model_type: in config.json.
        names: of a layer's tensors that differ from NAMES; a key with its ending stands for the whole name.
        names_with: names that hold besides where the first layer has the tensor that is the key.
        experts: where single experts lie, and the names of their parts.
        permuted: rows of queries and keys lie in (pair, half) order within a head.
        around_one: 1 was added to the norms' scales.
        constants: fields of config.json that no file says otherwise.
        own: fields that follow from metadata and tensors.
    """

    architecture: str
    model_type: str
    names: Mapping[str, str] = field(default_factory=dict)
    names_with: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    experts: tuple[str, Mapping[str, str]] = ("mlp.experts", GATED)
    permuted: bool = False
    around_one: bool = False
    constants: Mapping[str, Any] = field(default_factory=dict)
    own: Own = lambda keys, tensors: {}

    def fields(self, keys: Keys, tensors: Tensors) -> dict[str, Any]:
        """config.json but for what every model has."""
        found = {"architectures": [self.architecture], "model_type": self.model_type}
        return found | _usual(keys, tensors) | dict(self.constants) | self.own(keys, tensors)


def layer_types(count: int, period: int) -> list[str]:
    """Every period-th layer attends to everything, the others to a window."""
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(count)]


def _sliding(period: int) -> Own:
    """Layers that slide: as the file's pattern says, else all but every `period`-th."""

    def own(keys: Keys, tensors: Tensors) -> dict[str, Any]:
        count = keys.integer("block_count", most=MAX_LAYERS)
        if not _window(keys):
            return {"layer_types": ["full_attention"] * count}
        stated = keys.values.get(f"{keys.arch}.attention.sliding_window_pattern")
        if isinstance(stated, list) and len(stated) == count:
            return {"layer_types": ["sliding_attention" if slides else "full_attention" for slides in stated]}
        every = keys.integer("attention.sliding_window_pattern", period, most=MAX_LAYERS)
        return {"layer_types": layer_types(count, every)}

    return own


def _window(keys: Keys) -> int | None:
    """0 says that there is none."""
    return keys.integer("attention.sliding_window", 0, least=0) or None


def _usual(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """What many families have, under each name that one of them has for it."""
    biased = "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors
    normed = "blk.0.attn_q_norm.weight" in tensors
    further = keys.integer("nextn_predict_layers", 0, most=MAX_LAYERS, least=0)
    layers = keys.integer("block_count", most=MAX_LAYERS)
    if further >= layers:
        raise CheckpointError(f"metadata key {keys.arch}.nextn_predict_layers is {further} of {layers} layers.")
    found: dict[str, Any] = {
        "num_hidden_layers": layers - further,
        **({} if keys.arch in UNEVEN else {"intermediate_size": keys.integer("feed_forward_length")}),
        "sliding_window": _window(keys),
        **dict.fromkeys(("attention_bias", "use_bias", "use_qkv_bias", "qkv_bias", "bias"), biased),
        **dict.fromkeys(("use_qk_norm", "qk_layernorm"), normed),
        "attention_out_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "lm_head_bias": "output.bias" in tensors,
    }
    if further:
        found["num_nextn_predict_layers"] = further
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        found[name] = keys.number(name) if keys.has(name) else None
    rotated, heads = keys.integer("rope.dimension_count", 0, least=0), keys.integer("attention.head_count", most=2**16)
    if rotated:
        head_dim = keys.integer("attention.key_length", max(keys.integer("embedding_length") // heads, 1))
        found["partial_rotary_factor"] = rotated / head_dim
    if keys.integer("expert_count", 0, most=MAX_EXPERTS, least=0):
        found |= _experts(keys, tensors)
    return found


def _experts(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    count = keys.integer("expert_count", most=MAX_EXPERTS)
    size = keys.integer("expert_feed_forward_length", _extent(tensors, "ffn_down_exps", 2) or None)
    beside = _extent(tensors, "ffn_up_shexp", 0)
    found: dict[str, Any] = {
        "num_experts": count,
        "num_experts_per_tok": keys.integer("expert_used_count", most=count),
        "moe_intermediate_size": size,
        **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), beside),
        **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts", "num_shared_expert"), beside // size),
        "use_mixed_mlp_moe": beside > 0,
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, least=0),
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
    }
    if keys.has("expert_weights_scale"):
        found["routed_scaling_factor"] = keys.number("expert_weights_scale")
    if (normed := keys.flag("expert_weights_norm")) is not None:
        found["norm_topk_prob"] = normed
    return found


def _extent(tensors: Tensors, stem: str, axis: int) -> int:
    """Of the first layer's tensor that has the name, 0 where none has."""
    found = (tensor.shape for name, tensor in tensors.items() if name.endswith(f".{stem}.weight"))
    return next((shape[axis] for shape in found if len(shape) > axis), 0)


def _stated_norm(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """Converters of these families only say that the chosen experts' weights are normalised, not that they are not."""
    return {"norm_topk_prob": keys.flag("expert_weights_norm") is True}


def _latent(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """Sizes of one head are absent where `head_count_kv` counts whole heads, as in older files."""
    rotated = keys.integer("rope.dimension_count")
    whole = keys.integer("attention.key_length_mla", keys.integer("attention.key_length"))
    if whole <= rotated:
        raise CheckpointError(
            f"{keys.arch}: heads of {whole} elements of which {rotated} are rotated; more are needed."
        )
    return {
        "q_lora_rank": keys.integer("attention.q_lora_rank") if keys.has("attention.q_lora_rank") else None,
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": whole - rotated,
        "v_head_dim": keys.integer("attention.value_length_mla", keys.integer("attention.value_length")),
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in tensors,
        "partial_rotary_factor": None,
        **_stated_norm(keys, tensors),
    }


def _deepseek(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """V2 to V3.1, Kimi K2, GLM 4.7 Flash: with sigmoids or a bias on the choice it is V3."""
    biased = any(name.endswith(".exp_probs_b.bias") for name in tensors)
    if keys.integer("expert_gating_func", _SIGMOID if biased else 1) == _SIGMOID:
        own = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    else:
        own = {"topk_method": "group_limited_greedy" if keys.integer("expert_group_count", 1) > 1 else "greedy"}
    return {**_latent(keys, tensors), **own}


def _gemma2(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """Only the 27B model (46 layers) scales queries by the hidden size instead of the head's."""
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count", most=2**16)
    large = keys.integer("block_count", most=MAX_LAYERS) == 46
    scale = hidden // heads if large else keys.integer("attention.key_length", 256)
    return {"query_pre_attn_scalar": scale, **_sliding(2)(keys, tensors)}


def _llama4(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """Maverick, of 128 experts, does not normalise queries and keys."""
    return {
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": keys.integer("feed_forward_length"),
        "interleave_moe_layer_step": keys.integer("interleave_moe_layer_step", 1),
        "use_qk_norm": keys.integer("expert_count", most=MAX_EXPERTS) != 128,
    }


def _granite(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {ours: keys.number(theirs, 1.0) for ours, theirs in names.items()}


def _ernie_moe(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return {
        "moe_layer_start_index": keys.integer("leading_dense_block_count", 0, least=0),
        "moe_layer_interval": keys.integer("interleave_moe_layer_step", 1),
    }


def _falcon(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """The 7B model has one key and value for all heads."""
    new = keys.integer("attention.head_count_kv", 1, most=2**16) != 1
    return {
        "new_decoder_architecture": new,
        "multi_query": not new,
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in tensors else 1,
    }


def _mpt(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    own: dict[str, Any] = {"alibi": True, "alibi_bias_max": keys.number("attention.max_alibi_bias")}
    return {"attn_config": own | _clip(keys, tensors)}


def _clip(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    clipped = keys.has("attention.clamp_kqv") and keys.values[f"{keys.arch}.attention.clamp_kqv"] != 0
    return {"clip_qkv": keys.number("attention.clamp_kqv") if clipped else None}


def _olmo2(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    """OLMo 3 slides."""
    if not _window(keys):
        return {}
    return {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", **_sliding(4)(keys, tensors)}


def _logit_scale(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return {"logit_scale": keys.number("logit_scale")}


def _exaone_moe(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return {**_stated_norm(keys, tensors), **_sliding(4)(keys, tensors)}


def _cohere2(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return {**_logit_scale(keys, tensors), **_sliding(4)(keys, tensors)}


def _neox(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return {"use_parallel_residual": keys.flag("use_parallel_residual") is not False}


def _stablelm(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return {"use_parallel_residual": "blk.0.ffn_norm.weight" not in tensors}


def _bigcode(keys: Keys, tensors: Tensors) -> dict[str, Any]:
    return {"multi_query": keys.integer("attention.head_count_kv", 1, most=2**16) == 1}


_TANH = MappingProxyType({"hidden_act": "gelu_pytorch_tanh"})
_GEMMA = MappingProxyType(
    {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
)
_LATENT = MappingProxyType(
    {
        **{f"attn_{part}": f"self_attn.{part}_proj" for part in ("q_a", "q_b", "kv_b", "k_b", "v_b")},
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    }
)
_FUSED_UP = MappingProxyType({"ffn_up": "mlp.gate_up_proj"})
_SPARSE = MappingProxyType({"ffn_gate_inp": "block_sparse_moe.gate"})
_SPARSE_NUMBERED = ("block_sparse_moe.experts", NUMBERED)
DECODERS: Mapping[str, Decoder] = MappingProxyType(
    {
        "deepseek2": Decoder("DeepseekV2ForCausalLM", "deepseek_v2", _LATENT, own=_deepseek),
        "mistral3": Decoder("Ministral3ForCausalLM", "ministral3", permuted=True),
        "mistral4": Decoder("Mistral4ForCausalLM", "mistral4", _LATENT, own=_latent),
        "gemma": Decoder("GemmaForCausalLM", "gemma", around_one=True, constants=_GEMMA),
        "gemma2": Decoder(
            "Gemma2ForCausalLM",
            "gemma2",
            {"ffn_norm": "pre_feedforward_layernorm"},
            around_one=True,
            constants=_GEMMA,
            own=_gemma2,
        ),
        "gemma3n": Decoder("Gemma3nForCausalLM", "gemma3n_text", STREAMS, own=gemma3n),
        "gemma4": Decoder("Gemma4ForCausalLM", "gemma4_text", BESIDE_EXPERTS, experts=("experts", GATED), own=gemma4),
        "phi2": Decoder("PhiForCausalLM", "phi", constants={"hidden_act": "gelu_new"}),
        "phi3": Decoder("Phi3ForCausalLM", "phi3", _FUSED_UP),
        "phimoe": Decoder(
            "PhimoeForCausalLM",
            "phimoe",
            _SPARSE,
            experts=_SPARSE_NUMBERED,
        ),
        "chatglm": Decoder("GlmForCausalLM", "glm", _FUSED_UP),
        "glm4": Decoder(
            "Glm4ForCausalLM",
            "glm4",
            {**_FUSED_UP, "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
        ),
        "glm4moe": Decoder("Glm4MoeForCausalLM", "glm4_moe", own=_stated_norm),
        "dots1": Decoder("Dots1ForCausalLM", "dots1", own=_stated_norm),
        "llama4": Decoder(
            "Llama4ForCausalLM",
            "llama4_text",
            {"ffn_gate_inp": "mlp.router", **shared("mlp.shared_expert")},
            constants={"no_rope_layer_interval": 4, "attention_chunk_size": 8192},
            own=_llama4,
        ),
        "command-r": Decoder("CohereForCausalLM", "cohere", own=_logit_scale),
        "cohere2": Decoder("Cohere2ForCausalLM", "cohere2", own=_cohere2),
        "granite": Decoder("GraniteForCausalLM", "granite", permuted=True, own=_granite),
        "granitemoe": Decoder(
            "GraniteMoeForCausalLM",
            "granitemoe",
            {**_SPARSE, **shared("shared_mlp")},
            experts=("block_sparse_moe.experts", GATED),
            permuted=True,
            own=_granite,
        ),
        "olmo": Decoder("OlmoForCausalLM", "olmo", permuted=True, own=_clip),
        "olmo2": Decoder("Olmo2ForCausalLM", "olmo2", own=_olmo2),
        "olmoe": Decoder("OlmoeForCausalLM", "olmoe"),
        "stablelm": Decoder("StableLmForCausalLM", "stablelm", own=_stablelm),
        "starcoder2": Decoder("Starcoder2ForCausalLM", "starcoder2", constants=_TANH),
        "gpt2": Decoder("GPT2LMHeadModel", "gpt2", constants={"activation_function": "gelu_new"}),
        "starcoder": Decoder("GPTBigCodeForCausalLM", "gpt_bigcode", own=_bigcode),
        "gptneox": Decoder("GPTNeoXForCausalLM", "gpt_neox", constants={"hidden_act": "gelu"}, own=_neox),
        "bloom": Decoder("BloomForCausalLM", "bloom"),
        "mpt": Decoder("MptForCausalLM", "mpt", own=_mpt),
        "falcon": Decoder(
            "FalconForCausalLM",
            "falcon",
            names_with={"attn_norm_2.weight": {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}},
            own=_falcon,
        ),
        "internlm2": Decoder("InternLM2ForCausalLM", "internlm2", permuted=True),
        "baichuan": Decoder("BaichuanForCausalLM", "baichuan", permuted=True),
        "exaone4": Decoder("Exaone4ForCausalLM", "exaone4", own=_sliding(4)),
        "exaone-moe": Decoder("ExaoneMoeForCausalLM", "exaone_moe", own=_exaone_moe),
        "ernie4_5": Decoder("Ernie4_5ForCausalLM", "ernie4_5"),
        "ernie4_5-moe": Decoder(
            "Ernie4_5_MoeForCausalLM",
            "ernie4_5_moe",
            {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
            own=_ernie_moe,
        ),
        "hunyuan-dense": Decoder("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
        "hunyuan-moe": Decoder(
            "HunYuanMoEV1ForCausalLM",
            "hunyuan_v1_moe",
            {"ffn_gate_inp": "mlp.gate.wg", **shared("mlp.shared_mlp")},
        ),
        "seed_oss": Decoder("SeedOssForCausalLM", "seed_oss"),
        "smollm3": Decoder("SmolLM3ForCausalLM", "smollm3", permuted=True),
        "arcee": Decoder("ArceeForCausalLM", "arcee", permuted=True, constants={"hidden_act": "relu2"}),
        "jais2": Decoder("Jais2ForCausalLM", "jais2", constants={"hidden_act": "relu2"}),
        "nemotron": Decoder("NemotronForCausalLM", "nemotron", around_one=True, constants={"hidden_act": "relu2"}),
        "minimax-m2": Decoder(
            "MiniMaxM2ForCausalLM",
            "minimax_m2",
            {**_SPARSE, "exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
            experts=_SPARSE_NUMBERED,
        ),
        "qwen2moe": Decoder(
            "Qwen2MoeForCausalLM",
            "qwen2_moe",
            {**shared("mlp.shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
            constants={"use_sliding_window": False, "mlp_only_layers": [], "decoder_sparse_step": 1},
        ),
    }
)
