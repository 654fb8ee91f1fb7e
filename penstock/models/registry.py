"""Architecture names of config.json and what builds them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from penstock.config.errors import CheckpointError
from penstock.config.model_defaults import with_defaults
from penstock.layers.decoder import DecoderModel as Model
from penstock.layers.ops import KernelSet
from penstock.models import deepseek, gemma3, glm4_moe, gpt_oss, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from penstock.models.blueprint import Blueprint
from penstock.models.fields import Fields

__all__ = ["ARCHITECTURES", "Family", "Model", "build_model", "text_fields"]


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
        "Qwen2ForCausalLM": Family(qwen2.build),
        "Qwen3ForCausalLM": Family(qwen3.build, "qwen3"),
        "Qwen2MoeForCausalLM": Family(qwen3_moe.build_qwen2),
        "Qwen3MoeForCausalLM": Family(qwen3_moe.build),
        "MixtralForCausalLM": Family(mixtral.build),
        "Gemma3ForCausalLM": Family(gemma3.build, "gemma3_text"),
        "Gemma3ForConditionalGeneration": Family(gemma3.build, "gemma3_text", "text_config"),
        "DeepseekV2ForCausalLM": Family(deepseek.build),
        "DeepseekV3ForCausalLM": Family(deepseek.build_v3),
        "Glm4MoeForCausalLM": Family(glm4_moe.build, "glm4_moe"),
        "Glm4MoeLiteForCausalLM": Family(deepseek.build_v3, "glm4_moe_lite"),
        "Dots1ForCausalLM": Family(glm4_moe.build_dots),
        "GptOssForCausalLM": Family(gpt_oss.build, "gpt_oss"),
    }
)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of the first supported name under `architectures`.

    Raises:
        CheckpointError: none is supported.
    """
    names = config.get("architectures")
    if not isinstance(names, (list, tuple)) or not names:
        raise CheckpointError(
            f"config.json: architectures is {names!r}; it must list one of: {', '.join(ARCHITECTURES)}."
        )
    found = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if found is None:
        raise CheckpointError(
            f"the architecture {', '.join(map(str, names))} is not supported; supported are: "
            f"{', '.join(ARCHITECTURES)}. Choose a model of one of these families."
        )
    return found


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
    family = family_of(config)
    return family.build(Blueprint.read(text_fields(config, family), kernels, dtype, max_model_len))
