"""Mamba (arXiv:2312.00752), Falcon Mamba (arXiv:2410.05355) and Mamba-2 (arXiv:2405.21060), and their settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from penstock.layers.decoder import DecoderModel, SelfAttention
from penstock.layers.mamba import Mamba2Mixer, Mamba2Options, MambaMixer, MambaOptions
from penstock.models.block_norms import MIXER_ALONE
from penstock.models.blueprint import NO_ROPE, Blueprint
from penstock.models.fields import Fields

RENAMES = (
    (r"^(backbone\.)?embeddings?\.", "model.embed_tokens."),
    (r"^(backbone\.)?norm_f\.", "model.norm."),
    (r"^backbone\.", "model."),
)


def build(blueprint: Blueprint) -> DecoderModel:
    """Layers of Mamba alone."""
    return _alone(blueprint, lambda index: mamba(blueprint, index, channels=_channels(blueprint)))


def build_falcon(blueprint: Blueprint) -> DecoderModel:
    """The same with norms of steps and of what states are read and written with."""
    eps = blueprint.fields.number("mixer_rms_eps", 1e-6)
    channels = _channels(blueprint)
    return _alone(blueprint, lambda index: mamba(blueprint, index, channels=channels, norms="plain", eps=eps))


def build_mamba2(blueprint: Blueprint) -> DecoderModel:
    """Layers of Mamba-2 alone."""
    return _alone(blueprint, lambda index: mamba2(blueprint, index, "mixer"))


def _alone(blueprint: Blueprint, mixer: Callable[[int], SelfAttention]) -> DecoderModel:
    return blueprint.decoder(rotary=NO_ROPE, norms=MIXER_ALONE, self_attention=mixer, model={"renames": RENAMES})


def _channels(blueprint: Blueprint) -> int:
    fields = blueprint.fields
    return fields.integer("intermediate_size", fields.integer("expand", 2) * blueprint.hidden_size)


def mamba(
    blueprint: Blueprint, index: int, name: str = "mixer", channels: int | None = None, **more: Any
) -> MambaMixer:
    """Layer `index`'s Mamba under `name`; more as in MambaOptions."""
    fields, hidden = blueprint.fields, blueprint.hidden_size
    rank = _name(fields, "time_step_rank", "mamba_dt_rank")
    options = MambaOptions(
        hidden,
        channels or fields.integer("mamba_expand", 2) * hidden,
        fields.integer(_name(fields, "state_size", "mamba_d_state"), 16),
        -(-hidden // 16) if fields.values.get(rank, "auto") == "auto" else fields.integer(rank),
        fields.integer(_name(fields, "conv_kernel", "mamba_d_conv"), 4),
        fields.flag(_name(fields, "use_bias", "mamba_proj_bias"), False),
        fields.flag(_name(fields, "use_conv_bias", "mamba_conv_bias"), True),
        **more,
    )
    return MambaMixer(blueprint.kernels, f"model.layers.{index}.{name}", index, options)


def mamba2(blueprint: Blueprint, index: int, name: str = "mamba", slot: int | None = None, **more: Any) -> Mamba2Mixer:
    """Layer `index`'s Mamba-2 under `name`, keeping its state in memory `slot`; more as in Mamba2Options."""
    fields, hidden = blueprint.fields, blueprint.hidden_size
    inner = fields.integer("mamba_d_ssm", fields.integer(_name(fields, "expand", "mamba_expand"), 2) * hidden)
    many, single = _name(fields, "mamba_n_heads", "num_heads"), _name(fields, "mamba_d_head", "head_dim")
    heads = fields.integer(many)
    if inner % heads or fields.values.get(single, "auto") not in ("auto", inner // heads):
        raise fields.error(many, f"is {heads}, of {fields.values.get(single)} elements each; allowed: {inner} in all")
    bias = fields.flag(_name(fields, "use_bias", "mamba_proj_bias"), False)
    settings: dict[str, Any] = {
        "groups": fields.integer(_name(fields, "n_groups", "mamba_n_groups"), 1),
        "taps": fields.integer(_name(fields, "conv_kernel", "mamba_d_conv"), 4),
        "bias": bias,
        "conv_bias": fields.flag(_name(fields, "use_conv_bias", "mamba_conv_bias"), True),
        "output_bias": bias,
        "eps": fields.number(_name(fields, "rms_norm_eps", "layer_norm_epsilon"), 1e-5),
        "step_limits": _limits(fields),
    }
    states = fields.integer(_name(fields, "state_size", "mamba_d_state"), 128)
    options = Mamba2Options(hidden, heads, inner // heads, states, **{**settings, **more})
    return Mamba2Mixer(blueprint.kernels, f"model.layers.{index}.{name}", index if slot is None else slot, options)


def _name(fields: Fields, *names: str) -> str:
    """The name under which a configuration has a setting."""
    return next(filter(fields.has, names), names[0])


def _limits(fields: Fields) -> tuple[float, float]:
    """The bounds of steps; the upper one may be infinite."""
    found = fields.values.get("time_step_limit") or (0.0, math.inf)
    if isinstance(found, (list, tuple)) and len(found) == 2:
        low, high = (float(v["__float__"]) if isinstance(v, Mapping) else v for v in found)
        if all(isinstance(value, (int, float)) for value in (low, high)) and 0 <= low < high:
            return float(low), float(high)
    raise fields.error("time_step_limit", f"is {found}; allowed: two numbers, the lower one first")
