"""Architecture names of config.json and what builds them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from penstock.config.errors import CheckpointError
from penstock.layers.decoder import DecoderModel as Model
from penstock.layers.ops import KernelSet
from penstock.models import (
    bert,
    bloom,
    cohere,
    deepseek,
    ernie4_5,
    exaone4,
    falcon,
    falcon_h1,
    fallback,
    gemma,
    gemma3,
    gemma3n,
    gemma4,
    glm,
    glm4_moe,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    hunyuan,
    jamba,
    lfm2,
    llama,
    llama4,
    mamba,
    mistral,
    mixtral,
    modernbert,
    mpt,
    nemotron,
    nemotron_h,
    nomic_bert,
    olmo,
    opt,
    phi,
    qwen2,
    qwen3,
    qwen3_moe,
    qwen3_next,
    smollm3,
    stablelm,
    starcoder2,
)
from penstock.models.blueprint import Blueprint
from penstock.models.defaults import with_defaults
from penstock.models.fields import Fields

__all__ = ["ARCHITECTURES", "Family", "Model", "build_model", "check_architecture", "text_fields"]


@dataclass(frozen=True, slots=True)
class Family:
    """One entry of the registry.

    Attributes:
        build: makes the model.
        defaults: the model type whose defaults fill in what the family's files leave out.
        nested: the text model's configuration lies under this field, if the file has it.
    """

    build: Callable[[Blueprint], Model]
    defaults: str = ""
    nested: str | None = None


ARCHITECTURES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(llama.build),
        "MistralForCausalLM": Family(mistral.build),
        "MinistralForCausalLM": Family(mistral.build),
        "Ministral3ForCausalLM": Family(mistral.build, "ministral3"),
        "Mistral3ForConditionalGeneration": Family(mistral.build, "ministral3", "text_config"),
        "Mistral4ForCausalLM": Family(deepseek.build_mistral4),
        "Kimi_K25ForConditionalGeneration": Family(deepseek.build_v3, nested="text_config"),
        "KimiK25ForConditionalGeneration": Family(deepseek.build_v3, nested="text_config"),
        "KimiK2ForCausalLM": Family(deepseek.build_v3),
        "Qwen2ForCausalLM": Family(qwen2.build),
        "Qwen3ForCausalLM": Family(qwen3.build, "qwen3"),
        "Qwen2MoeForCausalLM": Family(qwen3_moe.build_qwen2),
        "Qwen3MoeForCausalLM": Family(qwen3_moe.build),
        "MellumForCausalLM": Family(qwen3_moe.build_mellum, "mellum"),
        "MixtralForCausalLM": Family(mixtral.build),
        "Gemma3ForCausalLM": Family(gemma3.build, "gemma3_text"),
        "Gemma3ForConditionalGeneration": Family(gemma3.build, "gemma3_text", "text_config"),
        "DeepseekV2ForCausalLM": Family(deepseek.build),
        "DeepseekV3ForCausalLM": Family(deepseek.build_v3),
        "Glm4MoeForCausalLM": Family(glm4_moe.build, "glm4_moe"),
        "Glm4MoeLiteForCausalLM": Family(deepseek.build_v3, "glm4_moe_lite"),
        "SolarOpenForCausalLM": Family(glm4_moe.build, "solar_open"),
        "YoutuForCausalLM": Family(deepseek.build_youtu, "youtu"),
        "Dots1ForCausalLM": Family(glm4_moe.build_dots),
        "OlmoeForCausalLM": Family(olmo.build_olmoe, "olmo"),
        "GraniteMoeForCausalLM": Family(granite.build_moe),
        "GraniteMoeSharedForCausalLM": Family(granite.build_moe),
        "PhimoeForCausalLM": Family(mixtral.build_phi, "phimoe"),
        "PhiMoEForCausalLM": Family(mixtral.build_phi, "phimoe"),
        "MiniMaxM2ForCausalLM": Family(mixtral.build_minimax),
        "Ernie4_5_MoeForCausalLM": Family(ernie4_5.build_moe, "ernie4_5_moe"),
        "HunYuanMoEV1ForCausalLM": Family(hunyuan.build_moe, "hunyuan"),
        "Llama4ForCausalLM": Family(llama4.build, "llama4"),
        "Llama4ForConditionalGeneration": Family(llama4.build, "llama4", "text_config"),
        "GptOssForCausalLM": Family(gpt_oss.build, "gpt_oss"),
        "BaichuanForCausalLM": Family(llama.build_baichuan),
        "BaiChuanForCausalLM": Family(llama.build_baichuan),
        "ArceeForCausalLM": Family(nemotron.build_arcee, "arcee"),
        "BloomForCausalLM": Family(bloom.build, "bloom"),
        "BambaForCausalLM": Family(jamba.build_bamba, "bamba"),
        "CohereForCausalLM": Family(cohere.build, "cohere"),
        "Cohere2ForCausalLM": Family(cohere.build_cohere2, "cohere2"),
        "CwmForCausalLM": Family(llama.build_cwm, "cwm"),
        "Ernie4_5ForCausalLM": Family(ernie4_5.build, "ernie4_5"),
        "Exaone4ForCausalLM": Family(exaone4.build, "exaone4"),
        "ExaoneMoeForCausalLM": Family(exaone4.build_moe, "exaone_moe"),
        "FlexOlmoForCausalLM": Family(olmo.build_flex),
        "FalconForCausalLM": Family(falcon.build, "falcon"),
        "GPT2ForCausalLM": Family(gpt2.build, "gpt2"),
        "GPTBigCodeForCausalLM": Family(gpt2.build_bigcode, "gpt_bigcode"),
        "GPTJForCausalLM": Family(gptj.build, "gptj"),
        "MptForCausalLM": Family(mpt.build, "mpt"),
        "MPTForCausalLM": Family(mpt.build, "mpt"),
        "OPTForCausalLM": Family(opt.build, "opt"),
        "GemmaForCausalLM": Family(gemma.build, "gemma"),
        "Gemma2ForCausalLM": Family(gemma.build_gemma2, "gemma2"),
        "Gemma3nForCausalLM": Family(gemma3n.build, "gemma3n_text"),
        "Gemma3nForConditionalGeneration": Family(gemma3n.build, "gemma3n_text", "text_config"),
        "Gemma4ForCausalLM": Family(gemma4.build, "gemma4_text"),
        "Gemma4ForConditionalGeneration": Family(gemma4.build, "gemma4_text", "text_config"),
        "VaultGemmaForCausalLM": Family(gemma.build_vault, "gemma2"),
        "GlmForCausalLM": Family(glm.build, "glm"),
        "Glm4ForCausalLM": Family(glm.build_glm4, "glm"),
        "GPTNeoXForCausalLM": Family(gpt_neox.build, "gpt_neox"),
        "FalconH1ForCausalLM": Family(falcon_h1.build, "falcon_h1"),
        "FalconMambaForCausalLM": Family(mamba.build_falcon, "falcon_mamba"),
        "GraniteForCausalLM": Family(granite.build),
        "GraniteSWAForCausalLM": Family(granite.build_sliding, "granite_swa"),
        "HeliumForCausalLM": Family(llama.build_helium, "helium"),
        "GraniteMoeHybridForCausalLM": Family(granite.build_hybrid, "granitemoehybrid"),
        "HunYuanDenseV1ForCausalLM": Family(hunyuan.build, "hunyuan"),
        "InternLM2ForCausalLM": Family(llama.build_internlm2),
        "InternLM3ForCausalLM": Family(llama.build_internlm3, "internlm3"),
        "IQuestCoderForCausalLM": Family(llama.build, "iquestcoder"),
        "Jais2ForCausalLM": Family(nemotron.build_jais2, "jais2"),
        "JambaForCausalLM": Family(jamba.build, "jamba"),
        "Lfm2ForCausalLM": Family(lfm2.build, "lfm2"),
        "Lfm2MoeForCausalLM": Family(lfm2.build_moe, "lfm2"),
        "MambaForCausalLM": Family(mamba.build, "mamba"),
        "Mamba2ForCausalLM": Family(mamba.build_mamba2, "mamba2"),
        "NemotronForCausalLM": Family(nemotron.build, "nemotron"),
        "NemotronHForCausalLM": Family(nemotron_h.build, "nemotron_h"),
        "OlmoForCausalLM": Family(olmo.build, "olmo"),
        "Olmo2ForCausalLM": Family(olmo.build_olmo2, "olmo"),
        "Olmo3ForCausalLM": Family(olmo.build_olmo3, "olmo3"),
        "PhiForCausalLM": Family(phi.build, "phi"),
        "Phi3ForCausalLM": Family(mistral.build, "phi3"),
        "Qwen3NextForCausalLM": Family(qwen3_next.build_moe, "qwen3_next"),
        "Qwen3_5ForCausalLM": Family(qwen3_next.build, "qwen3_5"),
        "Qwen3_5ForConditionalGeneration": Family(qwen3_next.build, "qwen3_5", "text_config"),
        "Qwen3_5MoeForCausalLM": Family(qwen3_next.build_moe, "qwen3_5"),
        "Qwen3_5MoeForConditionalGeneration": Family(qwen3_next.build_moe, "qwen3_5", "text_config"),
        "SeedOssForCausalLM": Family(llama.build, "seed_oss"),
        "SmolLM3ForCausalLM": Family(smollm3.build),
        "StableLmForCausalLM": Family(stablelm.build, "stablelm"),
        "Starcoder2ForCausalLM": Family(starcoder2.build, "starcoder2"),
        "BertModel": Family(bert.build, "bert"),
        "CamembertModel": Family(bert.build_roberta, "roberta"),
        "DistilBertModel": Family(bert.build_distilbert, "distilbert"),
        "EuroBertModel": Family(llama.build_eurobert, "eurobert"),
        "Gemma3TextModel": Family(gemma3.build, "gemma3_text"),
        "GteModel": Family(nomic_bert.build_gte, "gte"),
        "NewModel": Family(nomic_bert.build_gte, "gte"),
        "JinaEmbeddingsV3Model": Family(nomic_bert.build_jina, "jina_embeddings_v3"),
        "ModernBertModel": Family(modernbert.build, "modernbert"),
        "NomicBertModel": Family(nomic_bert.build, "nomic_bert"),
        "RobertaModel": Family(bert.build_roberta, "roberta"),
        "XLMRobertaModel": Family(bert.build_roberta, "roberta"),
    }
)


_HEADS = (("ForSequenceClassification", "labels"), ("ForMaskedLM", "none"), ("Model", "none"))


def named(name: str) -> tuple[Family, str] | None:
    """The family of an architecture and what stands above its last layer; None if there is none.

    Every causal language model is known under its bare name too, and every model as a classifier.
    """
    name = name.replace("LMHeadModel", "ForCausalLM")  # as GPT-2 says it
    if name in ARCHITECTURES:
        return ARCHITECTURES[name], "none" if name.endswith("Model") else "logits"
    for ending, head in _HEADS:
        base = name.removesuffix(ending)
        if base == name:
            continue
        family = ARCHITECTURES.get(f"{base}Model") or ARCHITECTURES.get(f"{base}ForCausalLM")
        if family:
            return family, head
    return None


def family_of(config: Mapping[str, Any]) -> tuple[Family, str]:
    """The family of the first supported name under `architectures`, and its head as in `Blueprint`.

    Raises:
        CheckpointError: none is supported.
    """
    names = _architectures(config)
    name, found = next(((name, known) for name in names if (known := named(name))), ("", None))
    if found is None:
        near = difflib.get_close_matches(names[0], ARCHITECTURES, 1, cutoff=0.0)[0]
        raise CheckpointError(
            f"config.json: architectures is {names}, which neither is known here nor is a causal language model of the "
            f"installed transformers ({fallback.version() or 'none'}); the nearest that is known: {near}. "
            f"All: {', '.join(ARCHITECTURES)}."
        )
    typed = _plain(str(config.get("model_type")))
    own = [known for known, family in ARCHITECTURES.items() if _plain(_base(known)) == typed]
    if own and all(ARCHITECTURES[known].build is not found[0].build for known in own):
        raise CheckpointError(
            f"config.json: model_type is {config['model_type']!r}, which goes with {own[0]}, but architectures says "
            f"{name}. Correct the one that is wrong, or download the file again from where the model comes from."
        )
    return found


def _base(architecture: str) -> str:
    return re.sub(r"(ForCausalLM|ForConditionalGeneration|Model)$", "", architecture)


def _plain(name: str) -> str:
    return re.sub(r"[-_]", "", name).lower()


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    if not isinstance(names, (list, tuple)) or not names:
        raise CheckpointError(
            f"config.json: architectures is {names!r}; it must list one of: {', '.join(ARCHITECTURES)}."
        )
    return [str(name) for name in names]


def check_architecture(config: Mapping[str, Any]) -> None:
    """Refuses what neither the registry nor transformers can run, whatever else the configuration says.

    Raises:
        CheckpointError: the architecture is unknown, or cannot run through transformers.
    """
    if made := _elsewhere(config):
        fallback.check(made, config)
    else:
        family_of(config)


def _elsewhere(config: Mapping[str, Any]) -> Any:
    """transformers' class, where the registry has no family; None where it has, or there is no class either."""
    names = _architectures(config)
    if any(named(name) for name in names):
        return None
    return next((found for name in names if (found := fallback.known(name))), None)


def text_fields(config: Mapping[str, Any], family: Family) -> Fields:
    """The text model's configuration with the family's defaults filled in."""
    fields = Fields(config)
    chosen = (fields.below(family.nested) if family.nested else None) or fields
    return Fields(with_defaults(family.defaults, chosen.values), chosen.where)


def build_model(
    config: Mapping[str, Any], kernels: KernelSet, *, dtype: torch.dtype, max_model_len: int | None = None
) -> Model:
    """Builds a model whose weights are declared and not yet loaded.

    Args:
        config: config.json as a dict.
        kernels: the ops it computes with.
        dtype: compute dtype.
        max_model_len: longest sequence that will be served, if already known. Only "dynamic" rope depends on it.

    Raises:
        CheckpointError: unknown architecture, or a field that is missing or impossible.
    """
    if made := _elsewhere(config):
        return fallback.build(config, made, kernels, dtype, max_model_len)
    family, head = family_of(config)
    return family.build(Blueprint.read(text_fields(config, family), kernels, dtype, max_model_len, head))
