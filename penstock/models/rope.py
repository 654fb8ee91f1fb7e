"""Rotary settings as configurations spell them: `rope_parameters`, or `rope_theta` with `rope_scaling`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.layers.rotary import (
    ROPE_KINDS,
    RopeParameters,
    longrope_attention_factor,
    section_axes,
    turn_axes,
    yarn_attention_factor,
)
from penstock.models.fields import Fields

STRETCHING = ("linear", "yarn")  # kinds whose context is the original length times the factor


def read_rope(
    fields: Fields,
    head_dim: int,
    *,
    theta: float = 10_000.0,
    layer_type: str | None = None,
    local: bool = False,
    partial: bool = True,
    axes: bool = False,
) -> RopeParameters:
    """The rotary parameters of a configuration.

    Args:
        fields: the configuration.
        head_dim: elements of a head.
        theta: the family's base where the file has none.
        layer_type: key of the nested object where layers of different types rotate differently.
        local: settings outside that nested object do not apply to this layer type.
        partial: the configuration tells how much of a head is rotated; else all of `head_dim` is.
        axes: the family takes media, whose positions have as many axes as the configuration has sections
            (`mrope_section`); of text alone all axes are alike, so that one does.

    Raises:
        CheckpointError: unknown kind, or a missing or impossible field.
    """
    outer = Fields({}, fields.where) if local else fields
    found = fields.below("rope_parameters")
    if layer_type is not None:
        found = (found and found.below(layer_type)) or (None if local else found)
    if found is not None:
        _check_agreement(outer, found)
    found = found or outer.below("rope_scaling") or Fields({}, fields.where)
    rope = _one_axis(fields, found, outer, head_dim, theta=theta, partial=partial, axes=axes)
    return replace(rope, axes=_axes(found, rope.rotary_dim // 2)) if axes else rope


def _one_axis(
    fields: Fields, found: Fields, outer: Fields, head_dim: int, *, theta: float, partial: bool, axes: bool
) -> RopeParameters:
    """The settings `found`, axes apart; where there are such, old files name the kind after them."""
    kinds = {kind: kind for kind in ROPE_KINDS} | {"su": "longrope"} | ({"mrope": "default"} if axes else {})
    kind = found.choice("rope_type" if found.has("rope_type") else "type", kinds, "default")
    base = found.number("rope_theta", outer.number("rope_theta", theta), minimum=1.0)
    rotary_dim = _rotated(fields, found, head_dim) if partial and kind != "proportional" else head_dim
    length = fields.integer("max_position_embeddings")
    if kind in ("yarn", "llama3", "longrope"):
        stated = fields.integer("original_max_position_embeddings", length)
        length = found.integer("original_max_position_embeddings", stated)
    if kind == "dynamic" and found.has("alpha") and rotary_dim > 2:  # a fixed stretch of the base, whatever the length
        kind, base = "default", base * found.number("alpha") ** (rotary_dim / (rotary_dim - 2))
    if kind == "longrope":
        return _longrope(fields, found, base, rotary_dim, length)
    if kind == "default":
        return RopeParameters(kind, base, rotary_dim, length)
    if kind == "dynamic" and rotary_dim == 2:
        raise found.error("rope_type", "is 'dynamic', which needs at least two rotated pairs a head")
    if kind == "proportional":
        share = found.number("partial_rotary_factor", 1.0)
        if share > 1:
            raise found.error("partial_rotary_factor", f"is {share}; allowed: at most 1")
        return RopeParameters(kind, base, rotary_dim, length, found.number("factor", 1.0), share=share)
    factor = found.number("factor")
    if kind == "llama3":
        low, high = found.number("low_freq_factor"), found.number("high_freq_factor")
        if low > high:
            raise found.error("low_freq_factor", f"is {low}; allowed: at most high_freq_factor, {high}")
        return RopeParameters(kind, base, rotary_dim, length, factor, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        return _yarn(found, base, rotary_dim, length, factor)
    return RopeParameters(kind, base, rotary_dim, length, factor)


def _axes(found: Fields, pairs: int) -> tuple[int, ...]:
    """The axis of positions that turns each pair; () where there are no sections."""
    sections = found.integers("mrope_section")
    if not sections:
        return ()
    if sum(sections) != pairs or min(sections) < 1:
        problem = f"is {list(sections)}, {sum(sections)} pairs; allowed: counts of 1 and more, {pairs} in all"
        raise found.error("mrope_section", problem)
    if not found.flag("mrope_interleaved", found.flag("interleaved", False)):
        return section_axes(sections)
    axes = turn_axes(sections)
    if any(axes.count(axis) != count for axis, count in enumerate(sections)):
        problem = f"is {list(sections)}, which do not take turns; allowed: no axis but the first has most pairs"
        raise found.error("mrope_section", problem)
    return axes


def _check_agreement(outer: Fields, found: Fields) -> None:
    """Refuses an older spelling that says otherwise than `rope_parameters` (`found`) beside it."""
    here, scaling = _settings(found), outer.below("rope_scaling")
    if outer.has("rope_theta") and "rope_theta" in here and here["rope_theta"] != outer.values["rope_theta"]:
        raise outer.error("rope_theta", f"is {outer.values['rope_theta']}, but {here['rope_theta']} in rope_parameters")
    if scaling is None or not scaling.values:
        return
    there = {"rope_theta": here.get("rope_theta")} | _settings(scaling)
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise scaling.error(name, f"is {there.get(name)}, but {here.get(name)} in rope_parameters")


def _settings(fields: Fields) -> dict[str, Any]:
    stated = {name: value for name, value in fields.values.items() if value is not None}
    kind = stated.pop("type", "default")
    return {"rope_type": kind} | stated


def _yarn(found: Fields, base: float, rotary_dim: int, length: int, factor: float) -> RopeParameters:
    derived = yarn_attention_factor(factor, found.optional_number("mscale"), found.optional_number("mscale_all_dim"))
    return RopeParameters(
        "yarn",
        base,
        rotary_dim,
        length,
        factor,
        beta_fast=found.number("beta_fast", 32.0),
        beta_slow=found.number("beta_slow", 1.0),
        truncate=found.flag("truncate", True),
        attention_factor=found.number("attention_factor", derived),
    )


def _rotated(fields: Fields, found: Fields, head_dim: int) -> int:
    """How many elements of a head are rotated."""
    stated = fields.integer("rotary_dim") / head_dim if fields.has("rotary_dim") else 1.0
    partial = found.number("partial_rotary_factor", fields.number("partial_rotary_factor", stated))
    rotated = int(head_dim * partial)
    if rotated < 2 or rotated % 2 or rotated > head_dim:
        raise fields.error("partial_rotary_factor", f"is {partial}, which rotates {rotated} of {head_dim} elements")
    return rotated


def _longrope(fields: Fields, found: Fields, base: float, rotary_dim: int, length: int) -> RopeParameters:
    pairs = rotary_dim // 2
    factor = found.number("factor", fields.integer("max_position_embeddings") / length)
    derived = longrope_attention_factor(factor, length)
    if found.has("long_mscale") or found.has("short_mscale"):
        derived, short = found.number("long_mscale"), found.number("short_mscale")
        if derived != short:
            raise found.error("long_mscale", f"is {derived}; allowed: the same as short_mscale, {short}")
    return RopeParameters(
        "longrope",
        base,
        rotary_dim,
        length,
        factor,
        attention_factor=found.number("attention_factor", derived),
        short_factors=found.numbers("short_factor", pairs),
        long_factors=found.numbers("long_factor", pairs),
    )


def context_length(fields: Fields, rope: RopeParameters, asked: int | None = None) -> int:
    """Longest sequence a configuration supports: stated, or the original length stretched by the factor.

    "dynamic" stretches no further than `asked`: what it stretches to turns shorter sequences otherwise too.
    """
    stated = fields.integer("max_position_embeddings")
    if rope.kind == "dynamic":
        return max(stated, min(asked or 0, int(rope.original_length * rope.factor)))
    stretched = int(rope.original_length * rope.factor) if rope.kind in STRETCHING else 0
    return max(stated, stretched)
