"""What distinguishes one family's attention from another's, grouped by what it is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

from penstock.kernels.api import HeadNorm
from penstock.layers.rotary import Rotary, Temperature


@dataclass(frozen=True, slots=True)
class ProjectionOptions:
    """The projections, and how a checkpoint stores them.

    Attributes:
        qkv_bias, output_bias: they have biases.
        interleaved: the checkpoint has rotated pairs side by side in a head.
        grouped: the fused projection has the queries of each KV head, then its key and value, in turn; else all
            queries, all keys, all values.
        keys_as_values: there is no projection of values: they are what is projected for keys.
        shared: there are no keys and values; queries read those of the layer whose memory this one names.
        clip: queries, keys and values are bounded to ±clip before all else.
        output_gate: the queries' projection has a gate behind each head's query; its sigmoid weighs what is attended.
        output_factor: of the layer's output.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    interleaved: bool = False
    grouped: bool = False
    keys_as_values: bool = False
    shared: bool = False
    clip: float | None = None
    output_gate: bool = False
    output_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class HeadNormOptions:
    """Norms of the heads.

    Attributes:
        qk_norm: queries and keys are normalised, as `head_norm` says (kernels.api.RopeAndCacheWrite);
            `around_one` as in RmsNorm.
        unit_norm: queries and keys are normalised without scales.
        value_norm: values are normalised by their heads' root mean squares, as queries and keys are.
        norm_eps: of all these.
    """

    qk_norm: bool = False
    head_norm: HeadNorm = "each"
    around_one: bool = False
    unit_norm: bool = False
    value_norm: bool = False
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """How scores come about.

    Attributes:
        scale: of the products; None for head_dim ** -0.5.
        soft_cap: scores are squashed to ±soft_cap.
        sinks: a learned score per head in the softmax.
        slopes: what each head's scores gain for every position a key lies nearer (ALiBi); None for nothing.
        temperature: of the queries.
    """

    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    slopes: tuple[float, ...] | None = None
    temperature: Temperature | None = None


@dataclass(frozen=True, slots=True)
class WindowOptions:
    """Which positions a query sees.

    Attributes:
        window: so many, its own included; None for all.
        chunked: those from the last multiple of the window on.
    """

    window: int | None = None
    chunked: bool = False


class AttentionFields(TypedDict, total=False):
    """All these options by name, as families state them."""

    qkv_bias: bool
    output_bias: bool
    interleaved: bool
    grouped: bool
    keys_as_values: bool
    shared: bool
    clip: float | None
    output_gate: bool
    output_factor: float
    qk_norm: bool
    head_norm: HeadNorm
    around_one: bool
    unit_norm: bool
    value_norm: bool
    norm_eps: float
    scale: float | None
    soft_cap: float | None
    sinks: bool
    slopes: tuple[float, ...] | None
    temperature: Temperature | None
    window: int | None
    chunked: bool


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Sizes and rotation of a layer's attention, and its options."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: Rotary
    projections: ProjectionOptions = field(default_factory=ProjectionOptions)
    norms: HeadNormOptions = field(default_factory=HeadNormOptions)
    scores: ScoreOptions = field(default_factory=ScoreOptions)
    sees: WindowOptions = field(default_factory=WindowOptions)


def grouped_options(given: AttentionFields) -> dict[str, Any]:
    """The groups of AttentionOptions, by field, that hold options given by name."""
    return {
        "projections": _group(ProjectionOptions, given),
        "norms": _group(HeadNormOptions, given),
        "scores": _group(ScoreOptions, given),
        "sees": _group(WindowOptions, given),
    }


def _group(kind: Any, given: Mapping[str, Any]) -> Any:
    return kind(**{entry.name: given[entry.name] for entry in fields(kind) if entry.name in given})
