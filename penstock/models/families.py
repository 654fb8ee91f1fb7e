"""Architecture names of config.json, what builds them, and what their configurations say of layers. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from penstock.models.defaults import with_defaults
from penstock.models.family_facts import (
    PLAIN,
    FamilyFacts,
    Judge,
    alike,
    asked,
    attending,
    chunks,
    every_nth,
    first_full,
    last_full,
    lettered,
    listed,
    never,
    none_attend,
    periodic,
    spelled_out,
    typed,
    upper,
    where_set,
    without_rope,
)
from penstock.models.fields import Fields


@dataclass(frozen=True, slots=True)
class Family:
    """One entry of the registry.

    Attributes:
        build: makes the model: a module of `penstock.models` and a function there, loaded once it is needed.
        defaults: the model type whose defaults fill in what the family's files leave out.
        nested: the text model's configuration lies under this field, if the file has it.
        facts: what the configuration says of the layers.
    """

    build: str
    defaults: str = ""
    nested: str | None = None
    facts: FamilyFacts = PLAIN


_MISTRAL = FamilyFacts(typed(where_set))
_QWEN = FamilyFacts(typed(upper(28, asked=True)))
# As the model card of the reranker has it (Qwen3 Embedding, arXiv:2506.05176).
_QWEN3 = replace(
    _QWEN,
    judge=Judge(
        "reranker",
        ("no", "yes"),
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
        "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "Given a web search query, retrieve relevant passages that answer the query",
    ),
)
_DELTA = FamilyFacts(attends=attending(every_nth("full_attention_interval", 4)))
_BAMBA = FamilyFacts(attends=attending(listed("attn_layer_indices")))
_HYBRID = FamilyFacts(attends=attending(never))
_COHERE = FamilyFacts(typed(last_full(4, "sliding_window_pattern")))
_FIRST_FULL = FamilyFacts(typed(first_full(4)))
_EVERY_OTHER = FamilyFacts(typed(last_full(2)))
_GEMMA3 = FamilyFacts(typed(last_full(6, "sliding_window_pattern", "_sliding_window_pattern")), stretched=True)
_GEMMA3N = FamilyFacts(typed(last_full(5)), stretched=True)
_GEMMA4 = FamilyFacts(typed(last_full(6)), stretched=True)
_LATENT = FamilyFacts(latent=True)
_LFM2 = FamilyFacts(attends=attending(listed("full_attn_idxs", all_without=True)))
_MAMBA = FamilyFacts(attends=none_attend)
_ENCODER = FamilyFacts(encoder=True)
_ROBERTA = FamilyFacts(padded=True, encoder=True)
_MODERNBERT = FamilyFacts(
    typed(first_full(3, "global_attn_every_n_layers"), lambda fields: fields.integer("local_attention", 128)),
    encoder=True,
)
ARCHITECTURES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family("llama.build"),
        "MistralForCausalLM": Family("mistral.build", facts=_MISTRAL),
        "MinistralForCausalLM": Family("mistral.build", facts=_MISTRAL),
        "Ministral3ForCausalLM": Family("mistral.build", "ministral3", facts=_MISTRAL),
        "Mistral3ForConditionalGeneration": Family("mistral.build", "ministral3", "text_config", facts=_MISTRAL),
        "Mistral4ForCausalLM": Family("deepseek.build_mistral4", facts=_LATENT),
        "Kimi_K25ForConditionalGeneration": Family("deepseek.build_v3", nested="text_config", facts=_LATENT),
        "KimiK25ForConditionalGeneration": Family("deepseek.build_v3", nested="text_config", facts=_LATENT),
        "KimiK2ForCausalLM": Family("deepseek.build_v3", facts=_LATENT),
        "Qwen2ForCausalLM": Family("qwen2.build", facts=_QWEN),
        "MiMoForCausalLM": Family("qwen2.build", facts=_QWEN),
        "Qwen3ForCausalLM": Family("qwen3.build", "qwen3", facts=_QWEN3),
        "Qwen2MoeForCausalLM": Family("qwen3_moe.build_qwen2", facts=_QWEN),
        "Qwen3MoeForCausalLM": Family("qwen3_moe.build", facts=FamilyFacts(asked)),
        "MellumForCausalLM": Family("qwen3_moe.build_mellum", "mellum", facts=FamilyFacts(typed(never))),
        "MixtralForCausalLM": Family("mixtral.build", facts=FamilyFacts(alike)),
        "Gemma3ForCausalLM": Family("gemma3.build", "gemma3_text", facts=_GEMMA3),
        "Gemma3ForConditionalGeneration": Family("gemma3.build", "gemma3_text", "text_config", facts=_GEMMA3),
        "DeepseekV2ForCausalLM": Family("deepseek.build", facts=_LATENT),
        "DeepseekV3ForCausalLM": Family("deepseek.build_v3", facts=_LATENT),
        "Glm4MoeForCausalLM": Family("glm4_moe.build", "glm4_moe"),
        "Glm4MoeLiteForCausalLM": Family("deepseek.build_v3", "glm4_moe_lite", facts=_LATENT),
        "SolarOpenForCausalLM": Family("glm4_moe.build", "solar_open"),
        "YoutuForCausalLM": Family("deepseek.build_youtu", "youtu", facts=_LATENT),
        "Dots1ForCausalLM": Family("glm4_moe.build_dots", facts=FamilyFacts(typed(upper(62, asked=False)))),
        "OlmoeForCausalLM": Family("olmo.build_olmoe", "olmo"),
        "GraniteMoeForCausalLM": Family("granite.build_moe"),
        "GraniteMoeSharedForCausalLM": Family("granite.build_moe"),
        "PhimoeForCausalLM": Family("mixtral.build_phi", "phimoe", facts=FamilyFacts(alike)),
        "PhiMoEForCausalLM": Family("mixtral.build_phi", "phimoe", facts=FamilyFacts(alike)),
        "MiniMaxM2ForCausalLM": Family("mixtral.build_minimax"),
        "Ernie4_5_MoeForCausalLM": Family("ernie4_5.build_moe", "ernie4_5_moe"),
        "HunYuanMoEV1ForCausalLM": Family("hunyuan.build_moe", "hunyuan"),
        "Llama4ForCausalLM": Family("llama4.build", "llama4", facts=FamilyFacts(chunks)),
        "Llama4ForConditionalGeneration": Family("llama4.build", "llama4", "text_config", facts=FamilyFacts(chunks)),
        "GptOssForCausalLM": Family("gpt_oss.build", "gpt_oss", facts=_EVERY_OTHER),
        "BaichuanForCausalLM": Family("llama.build_baichuan"),
        "BaiChuanForCausalLM": Family("llama.build_baichuan"),
        "ArceeForCausalLM": Family("nemotron.build_arcee", "arcee"),
        "BloomForCausalLM": Family("bloom.build", "bloom"),
        "BambaForCausalLM": Family("jamba.build_bamba", "bamba", facts=_BAMBA),
        "CohereForCausalLM": Family("cohere.build", "cohere"),
        "Cohere2ForCausalLM": Family("cohere.build_cohere2", "cohere2", facts=_COHERE),
        "CwmForCausalLM": Family("llama.build_cwm", "cwm", facts=_FIRST_FULL),
        "Ernie4_5ForCausalLM": Family("ernie4_5.build", "ernie4_5"),
        "Exaone4ForCausalLM": Family("exaone4.build", "exaone4", facts=FamilyFacts(typed(spelled_out))),
        "ExaoneMoeForCausalLM": Family("exaone4.build_moe", "exaone_moe", facts=FamilyFacts(typed(spelled_out))),
        "FlexOlmoForCausalLM": Family("olmo.build_flex"),
        "FalconForCausalLM": Family("falcon.build", "falcon"),
        "GPT2ForCausalLM": Family("gpt2.build", "gpt2"),
        "GPTBigCodeForCausalLM": Family("gpt2.build_bigcode", "gpt_bigcode"),
        "GPTJForCausalLM": Family("gptj.build", "gptj"),
        "MptForCausalLM": Family("mpt.build", "mpt"),
        "MPTForCausalLM": Family("mpt.build", "mpt"),
        "OPTForCausalLM": Family("opt.build", "opt"),
        "GemmaForCausalLM": Family("gemma.build", "gemma"),
        "Gemma2ForCausalLM": Family("gemma.build_gemma2", "gemma2", facts=_EVERY_OTHER),
        "Gemma3nForCausalLM": Family("gemma3n.build", "gemma3n_text", facts=_GEMMA3N),
        "Gemma3nForConditionalGeneration": Family("gemma3n.build", "gemma3n_text", "text_config", facts=_GEMMA3N),
        "Gemma4ForCausalLM": Family("gemma4.build", "gemma4_text", facts=_GEMMA4),
        "Gemma4ForConditionalGeneration": Family("gemma4.build", "gemma4_text", "text_config", facts=_GEMMA4),
        "VaultGemmaForCausalLM": Family("gemma.build_vault", "gemma2", facts=_EVERY_OTHER),
        "GlmForCausalLM": Family("glm.build", "glm"),
        "Glm4ForCausalLM": Family("glm.build_glm4", "glm"),
        "GPTNeoXForCausalLM": Family("gpt_neox.build", "gpt_neox"),
        "FalconH1ForCausalLM": Family("falcon_h1.build", "falcon_h1"),
        "FalconMambaForCausalLM": Family("mamba.build_falcon", "falcon_mamba", facts=_MAMBA),
        "GraniteForCausalLM": Family("granite.build"),
        "GraniteSWAForCausalLM": Family("granite.build_sliding", "granite_swa", facts=_FIRST_FULL),
        "HeliumForCausalLM": Family("llama.build_helium", "helium"),
        "GraniteMoeHybridForCausalLM": Family("granite.build_hybrid", "granitemoehybrid", facts=_HYBRID),
        "HunYuanDenseV1ForCausalLM": Family("hunyuan.build", "hunyuan"),
        "InternLM2ForCausalLM": Family("llama.build_internlm2"),
        "InternLM3ForCausalLM": Family("llama.build_internlm3", "internlm3"),
        "IQuestCoderForCausalLM": Family("llama.build", "iquestcoder"),
        "Jais2ForCausalLM": Family("nemotron.build_jais2", "jais2"),
        "JambaForCausalLM": Family("jamba.build", "jamba", facts=FamilyFacts(attends=attending(periodic))),
        "Lfm2ForCausalLM": Family("lfm2.build", "lfm2", facts=_LFM2),
        "Lfm2MoeForCausalLM": Family("lfm2.build_moe", "lfm2", facts=_LFM2),
        "MambaForCausalLM": Family("mamba.build", "mamba", facts=_MAMBA),
        "Mamba2ForCausalLM": Family("mamba.build_mamba2", "mamba2", facts=_MAMBA),
        "NemotronForCausalLM": Family("nemotron.build", "nemotron"),
        "NemotronHForCausalLM": Family("nemotron_h.build", "nemotron_h", facts=FamilyFacts(attends=lettered)),
        "OlmoForCausalLM": Family("olmo.build", "olmo"),
        "Olmo2ForCausalLM": Family("olmo.build_olmo2", "olmo"),
        "Olmo3ForCausalLM": Family("olmo.build_olmo3", "olmo3", facts=FamilyFacts(typed(last_full(4)))),
        "PhiForCausalLM": Family("phi.build", "phi"),
        "Phi3ForCausalLM": Family("mistral.build", "phi3", facts=_MISTRAL),
        "Qwen3NextForCausalLM": Family("qwen3_next.build_moe", "qwen3_next", facts=_DELTA),
        "Qwen3_5ForCausalLM": Family("qwen3_next.build", "qwen3_5", facts=_DELTA),
        "Qwen3_5ForConditionalGeneration": Family("qwen3_next.build", "qwen3_5", "text_config", facts=_DELTA),
        "Qwen3_5MoeForCausalLM": Family("qwen3_next.build_moe", "qwen3_5", facts=_DELTA),
        "Qwen3_5MoeForConditionalGeneration": Family("qwen3_next.build_moe", "qwen3_5", "text_config", facts=_DELTA),
        "SeedOssForCausalLM": Family("llama.build", "seed_oss"),
        "SmolLM3ForCausalLM": Family("smollm3.build", facts=FamilyFacts(without_rope)),
        "StableLmForCausalLM": Family("stablelm.build", "stablelm"),
        "Starcoder2ForCausalLM": Family("starcoder2.build", "starcoder2", facts=FamilyFacts(alike)),
        "BertModel": Family("bert.build", "bert", facts=_ENCODER),
        "CamembertModel": Family("bert.build_roberta", "roberta", facts=_ROBERTA),
        "DistilBertModel": Family("bert.build_distilbert", "distilbert", facts=_ENCODER),
        "EuroBertModel": Family("llama.build_eurobert", "eurobert", facts=_ENCODER),
        "Gemma3TextModel": Family("gemma3.build", "gemma3_text", facts=_GEMMA3),
        "GteModel": Family("nomic_bert.build_gte", "gte", facts=_ENCODER),
        "NewModel": Family("nomic_bert.build_gte", "gte", facts=_ENCODER),
        "JinaEmbeddingsV3Model": Family("nomic_bert.build_jina", "jina_embeddings_v3", facts=_ENCODER),
        "ModernBertModel": Family("modernbert.build", "modernbert", facts=_MODERNBERT),
        "NomicBertModel": Family("nomic_bert.build", "nomic_bert", facts=_ENCODER),
        "RobertaModel": Family("bert.build_roberta", "roberta", facts=_ROBERTA),
        "XLMRobertaModel": Family("bert.build_roberta", "roberta", facts=_ROBERTA),
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


def text_fields(config: Mapping[str, Any], family: Family) -> Fields:
    """The text model's configuration with the family's defaults filled in."""
    fields = Fields(config)
    chosen = (fields.below(family.nested) if family.nested else None) or fields
    return Fields(with_defaults(family.defaults, chosen.values), chosen.where)
