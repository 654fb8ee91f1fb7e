"""Falcon-H1 (TII, arXiv:2507.22448): attention and Mamba-2 side by side, constant factors everywhere."""

from __future__ import annotations

from typing import Any

from penstock.layers.decoder import DecoderModel, ParallelMixers
from penstock.layers.mamba import ProjectionFactors
from penstock.layers.mlp import MlpVariant
from penstock.models.blueprint import Blueprint
from penstock.models.jamba import NORMS, RENAMES
from penstock.models.mamba import mamba2


def build(blueprint: Blueprint) -> DecoderModel:
    """Factors of products are taken into weights; those of keys and queries into the scale of scores."""
    fields = blueprint.fields

    def factor(name: str) -> float:
        return fields.number(name, 1.0)

    def factors(name: str, count: int, what: str) -> tuple[float, ...]:
        return fields.numbers(name, count, what) if fields.has(name) else (1.0,) * count

    inputs = {"attention_bias": "attention_in_multiplier", "mamba_proj_bias": "ssm_in_multiplier"}
    biases = {name: fields.flag(name, False) for name in inputs}
    for name, biased in biases.items():
        if biased and factor(inputs[name]) != 1.0:
            raise fields.error(name, f"is true; allowed where {inputs[name]} is {factor(inputs[name])}: false")
    inward, kernels = factor("attention_in_multiplier"), blueprint.kernels
    rotary = blueprint.rotary()
    norm = "norm first" if fields.flag("mamba_norm_before_gate", True) else "gated"
    inner, parts = factor("ssm_in_multiplier"), factors("ssm_multipliers", 5, "one a part of the projection")
    scan: dict[str, Any] = {
        "norm": norm if fields.flag("mamba_rms_norm", False) else None,
        "output_bias": fields.flag("projectors_bias", False),
        "factors": ProjectionFactors(
            gate=inner * parts[0],
            inputs=inner * parts[1],
            write=inner * parts[2],
            read=inner * parts[3],
            steps=inner * parts[4],
        ),
        "output_factor": factor("ssm_out_multiplier"),
    }

    def mixers(index: int) -> ParallelMixers:
        attention = blueprint.attention(
            index,
            rotary,
            slot=2 * index,
            scale=blueprint.head_dim**-0.5 * inward**2 * factor("key_multiplier"),
            output_factor=inward * factor("attention_out_multiplier"),
        )
        return ParallelMixers(kernels, attention, mamba2(blueprint, index, slot=2 * index + 1, **scan))

    scales = factors("mlp_multipliers", 2, "the gate's and the output's")
    return blueprint.decoder(
        rotary=rotary,
        self_attention=mixers,
        feed_forward=lambda index: blueprint.mlp(
            index, name="feed_forward", variant=MlpVariant(factors=(scales[0], scales[1]))
        ),
        norms=NORMS,
        model={
            "renames": RENAMES,
            "embedding_scale": factor("embedding_multiplier"),
            "logit_scale": factor("lm_head_multiplier"),
        },
    )
