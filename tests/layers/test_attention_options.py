"""Options of attention by name and in groups."""

from __future__ import annotations

from dataclasses import fields
from typing import get_type_hints

from penstock.layers.attention_options import (
    AttentionFields,
    HeadNormOptions,
    ProjectionOptions,
    ScoreOptions,
    WindowOptions,
    grouped_options,
)

GROUPS = (ProjectionOptions, HeadNormOptions, ScoreOptions, WindowOptions)


def test_every_option_lies_in_one_group_and_has_one_type() -> None:
    grouped = [(entry.name, get_type_hints(kind)[entry.name]) for kind in GROUPS for entry in fields(kind)]
    assert len(grouped) == len(dict(grouped))
    assert dict(grouped) == get_type_hints(AttentionFields)


def test_options_by_name_come_to_their_groups() -> None:
    found = grouped_options({"qkv_bias": True, "soft_cap": 50.0, "window": 7, "head_norm": "all"})
    assert found["projections"] == ProjectionOptions(qkv_bias=True)
    assert found["norms"] == HeadNormOptions(head_norm="all")
    assert found["scores"] == ScoreOptions(soft_cap=50.0)
    assert found["sees"] == WindowOptions(7)
