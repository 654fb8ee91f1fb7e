"""What configurations of draft heads say: which kind they are, and what of their target they read. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.config.errors import CheckpointError
from penstock.models.fields import Fields
from penstock.models.mtp_layouts import of_one_layer

TAPPED: Final = ("eagle3", "p-eagle")  # kinds that read hidden states between layers
_EAGLE3: Final = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
_MEDUSA: Final = ("MedusaModel",)
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


def head_kind(config: Mapping[str, Any]) -> str | None:
    """Which kind of head a configuration describes; None for a whole model, which may have "mtp" layers besides."""
    names = config.get("architectures")
    names = [names] if isinstance(names, str) else names if isinstance(names, (list, tuple)) else []
    if any(name in _MEDUSA for name in names) or config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return "medusa"
    if any(name in _EAGLE3 for name in names) or config.get("speculators_model_type") == "eagle3":
        return "p-eagle" if config.get("parallel_drafting") else "eagle3"
    return "p-eagle" if config.get("speculators_model_type") == "peagle" else None


def head_config(kind: str, config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The configuration as one level, with the sizes of the head's own layers; `names` are those of its tensors.

    Speculators' files have those of the layers below `transformer_layer_config`; Medusa's heads have no attention.
    """
    layers = config.get("transformer_layer_config")
    found = {**(layers if isinstance(layers, Mapping) else {}), **config}
    if kind == "medusa":
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
