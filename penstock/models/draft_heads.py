"""What configurations of draft heads say: which kind they are, and what of their target they read. No torch."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from penstock.config.errors import CheckpointError
from penstock.models.fields import Fields
from penstock.models.mtp_layouts import of_one_layer

TAPPED: Final = ("eagle3", "p-eagle")  # kinds that read hidden states between layers
LAST_STATE: Final = ("medusa", "mlp_speculator", "redrafter")  # that read the last one alone, and keep nothing
_ARCHITECTURES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "MedusaModel": "medusa",
        "MLPSpeculatorPreTrainedModel": "mlp_speculator",
        "EagleLlamaForCausalLM": "eagle",
        "LlamaForCausalLMEagle": "eagle",
        "LlamaForCausalLMEagle3": "eagle3",
        "Eagle3LlamaForCausalLM": "eagle3",
        "Eagle3Speculator": "eagle3",
        "Eagle3DraftModel": "eagle3",
    }
)
_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {"medusa": "medusa", "mlp_speculator": "mlp_speculator", "recurrent_drafting_drafter": "redrafter"}
)
_SPECULATORS: Final[Mapping[str, str]] = MappingProxyType({"eagle3": "eagle3", "peagle": "p-eagle"})
WRITTEN: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {  # what configurations of heads that are written here have in common
        "eagle3": {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
        "medusa": {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "medusa_num_layers": 1,
            "torch_dtype": "bfloat16",
        },
    }
)
_PAIRED: Final = ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
_FEWEST_LAYERS: Final = 5  # of a target, where a head does not say which layers it reads


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What a head has to agree with.

    Attributes:
        hidden_size, vocab_size, layers: of the target.
    """

    hidden_size: int
    vocab_size: int
    layers: int


def head_kind(config: Mapping[str, Any], tensors: Container[str]) -> str | None:
    """Which kind of head these files are; None for a whole model, which may have "mtp" layers besides.

    EAGLE's authors call their heads models of one layer, so that their tensors tell.
    """
    names = config.get("architectures")
    names = [names] if isinstance(names, str) else names if isinstance(names, (list, tuple)) else []
    stated = next((kind for name in names if (kind := _ARCHITECTURES.get(str(name)))), None)
    stated = stated or _TYPES.get(str(config.get("model_type")))
    stated = stated or _SPECULATORS.get(str(config.get("speculators_model_type")))
    if stated is None and "medusa_num_heads" in config:
        return "medusa"
    begins = [name for name in ("", "model.") if f"{name}fc.weight" in tensors]
    whole = any(f"{name}layers.0.mlp.down_proj.weight" in tensors for name in begins)
    if stated is None and whole and not any(name in tensors for name in _PAIRED):  # those are of EAGLE-3's first layer
        return "eagle"
    return "p-eagle" if stated == "eagle3" and config.get("parallel_drafting") else stated


def head_config(kind: str, config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The configuration as one level, with the sizes of the head's own layers; `names` are those of its tensors.

    Speculators' files have those of the layers below `transformer_layer_config`; kinds of LAST_STATE have no attention.
    """
    layers = config.get("transformer_layer_config")
    found = {**(layers if isinstance(layers, Mapping) else {}), **config}
    if kind == "mlp_speculator":
        found = {"hidden_size": config.get("emb_dim"), **found}
    if kind in LAST_STATE:
        return {"num_attention_heads": 1, "max_position_embeddings": 1 << 30, **found, "num_hidden_layers": 1}
    if kind == "mtp":
        return of_one_layer(found, names)
    return {"num_hidden_layers": 1, **found}


def tapped_layers(fields: Fields, target: TargetFacts) -> tuple[int, ...]:
    """Whose inputs an EAGLE-3 head reads, as its configuration tells or as is usual (vLLM, SGLang).

    At the top level layers are counted as those that are entered, below `eagle_config` as those that are left.

    Raises:
        CheckpointError: the target has no such layers.
    """
    given = fields.integers("eagle_aux_hidden_state_layer_ids")
    below = fields.below("eagle_config")
    if not given and below is not None:
        given = tuple(layer + 1 for layer in below.integers("eagle_aux_hidden_state_layer_ids"))
    if not given and target.layers < _FEWEST_LAYERS:
        raise fields.error(
            "eagle_aux_hidden_state_layer_ids",
            f"is missing; what is usual needs a target of {_FEWEST_LAYERS} layers, and this one has {target.layers}",
        )
    given = given or (2, target.layers // 2, target.layers - 3)
    if wrong := [layer for layer in given if not 0 <= layer < target.layers]:
        raise CheckpointError(
            f"the head reads what layers {', '.join(map(str, given))} are given, but the target has layers 0 to "
            f"{target.layers - 1}, and no layer {wrong[0]}: it was made for a model of more layers."
        )
    return given
