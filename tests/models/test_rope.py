"""Every rope scaling past its original length, from new and old spellings of the configuration."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.config.errors import CheckpointError
from penstock.kernels.api import resolve_kernels
from penstock.kernels.reference.dense import rope_tables
from penstock.kernels.registry import KernelContext
from penstock.layers.rotary import RopeParameters, Rotary, inverse_frequencies
from penstock.models.blueprint import Blueprint
from penstock.models.fields import Fields
from penstock.models.rope import context_length, read_rope
from tests.models import tiny
from tests.models.harness import Harness, load

CONFIG = {"max_position_embeddings": 64}


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "truncate": False},
        {"rope_type": "yarn", "factor": 0.5, "beta_fast": 20, "beta_slow": 2, "original_max_position_embeddings": 4096},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.7, "original_max_position_embeddings": 48},
        {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
        {**tiny.LLAMA3},
        {**tiny.LLAMA3, "original_max_position_embeddings": 4000, "rope_theta": 500000.0},
        {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    ],
)
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_frequencies(settings: dict[str, Any], theta: float):
    settings = {"rope_theta": theta, **settings}
    config = transformers.LlamaConfig(head_dim=32, **CONFIG, rope_parameters=dict(settings))
    expected, factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config)
    rope = read_rope(Fields({**CONFIG, "rope_parameters": settings}), 32)
    torch.testing.assert_close(inverse_frequencies(rope, 64), expected, rtol=1e-6, atol=1e-10)
    assert rope.attention_factor == pytest.approx(factor)


def test_old_spelling_reads_the_same():
    new = Fields({**CONFIG, "rope_parameters": {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0}})
    old = Fields({**CONFIG, "rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert read_rope(new, 8) == read_rope(old, 8)
    assert read_rope(Fields({**CONFIG, "rope_theta": 7.0, "rope_scaling": None}), 8).theta == 7.0
    assert read_rope(Fields(CONFIG), 8, theta=123.0).theta == 123.0


def test_gemma_spellings():
    """Old files scale the full layers only and give the local base a name of its own."""
    nested = {"full_attention": {"rope_type": "linear", "rope_theta": 9.0, "factor": 8.0}}
    nested["sliding_attention"] = {"rope_type": "default", "rope_theta": 5.0}
    new = Fields({**CONFIG, "rope_parameters": nested})
    old = Fields({**CONFIG, "rope_theta": 9.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    for fields in (new, old):
        assert read_rope(fields, 8, layer_type="full_attention") == RopeParameters("linear", 9.0, 8, 64, 8.0)
        local = read_rope(fields, 8, theta=5.0, layer_type="sliding_attention", local=True)
        assert local == RopeParameters("default", 5.0, 8, 64)


@pytest.mark.parametrize(
    ("settings", "length"),
    [
        ({"rope_type": "default"}, 64),
        ({"rope_type": "linear", "factor": 2.0}, 128),
        ({"rope_type": "dynamic", "factor": 4.0}, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({**tiny.LLAMA3}, 64),
    ],
)
def test_context_length(settings: dict[str, Any], length: int):
    fields = Fields({**CONFIG, "rope_parameters": settings})
    assert context_length(fields, read_rope(fields, 8)) == length


@pytest.mark.parametrize(("asked", "length"), [(None, 64), (32, 64), (100, 100), (1000, 256)])
def test_dynamic_scaling_stretches_as_far_as_is_asked(asked: int | None, length: int):
    fields = Fields({**CONFIG, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}})
    assert context_length(fields, read_rope(fields, 8), asked) == length


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rope_type": "spiral"}, "rope_type"),
        ({"rope_type": "longrope"}, "short_factor is missing"),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "short_factor has 1 entries"),
        ({"rope_type": "longrope", "short_factor": [1.0, 0.0]}, "short_factor"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": -1}, "factor"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({**tiny.LLAMA3, "low_freq_factor": 4.5}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.1}, "partial_rotary_factor"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], named: str):
    with pytest.raises(CheckpointError, match=named):
        read_rope(Fields({**CONFIG, "rope_parameters": settings}), 8)


@pytest.mark.parametrize(
    ("family", "settings", "dim"),
    [
        ("qwen2_vl.Qwen2VL", {"mrope_section": [4, 6, 6]}, 32),
        ("qwen2_vl.Qwen2VL", {"mrope_section": [2, 3, 3], "rope_theta": 1_000_000.0}, 16),
        ("qwen3_vl.Qwen3VL", {"mrope_section": [24, 20, 20], "mrope_interleaved": True}, 128),
        ("qwen3_vl.Qwen3VL", {"mrope_section": [6, 5, 5], "mrope_interleaved": True}, 32),
        ("qwen3_5.Qwen3_5", {"mrope_section": [3, 3, 2], "interleaved": True, "partial_rotary_factor": 0.25}, 64),
    ],
)
def test_positions_of_several_axes(family: str, settings: dict[str, Any], dim: int):
    """The tables of transformers, whose modules lay the axes' parts side by side, or in turns."""
    settings = {"rope_type": "default", "rope_theta": 10_000.0, **settings}
    name, _, family = family.partition(".")
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    embedding = "RotaryEmbedding" if family == "Qwen2VL" else "TextRotaryEmbedding"
    kind = getattr(transformers, f"{family}TextConfig")
    config = kind(
        head_dim=dim, hidden_size=4 * dim, num_attention_heads=4, num_key_value_heads=2, **CONFIG,
        rope_parameters=dict(settings),
    )  # fmt: skip
    positions = torch.randint(0, 60, (3, 11), generator=torch.Generator().manual_seed(0))
    cos, sin = getattr(module, family + embedding)(config)(torch.zeros(1), positions[:, None])
    rotary = Rotary(read_rope(Fields({**CONFIG, "rope_parameters": settings}), dim, axes=True), 64)
    frequencies, axes = rotary.beside(positions)
    ours, signed = rope_tables(positions, frequencies, rotary.rope.attention_factor, axes)
    torch.testing.assert_close(ours[:, 0], cos[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(signed[:, 0].abs(), sin[0].abs(), rtol=1e-5, atol=1e-5)


def test_sections_of_old_files_and_of_text():
    """Old files name the kind after the sections; who takes no media has one axis, whatever the file says."""
    sections = {"mrope_section": [1, 2, 1]}
    new = Fields({**CONFIG, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0, **sections}})
    old = Fields({**CONFIG, "rope_theta": 7.0, "rope_scaling": {"type": "mrope", **sections}})
    assert read_rope(new, 8, axes=True) == read_rope(old, 8, axes=True)
    assert read_rope(new, 8, axes=True).axes == (0, 1, 1, 2)
    assert read_rope(new, 8).axes == read_rope(Fields(CONFIG), 8, axes=True).axes == ()
    turns = {"rope_type": "yarn", "factor": 2.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    stretched = read_rope(Fields({**CONFIG, "rope_parameters": turns}), 8, axes=True)
    assert (stretched.kind, stretched.axes) == ("yarn", (0, 1, 2, 0))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"mrope_section": [1, 2, 2]}, r"\[1, 2, 2\], 5 pairs; allowed: counts of 1 and more, 4 in all"),
        ({"mrope_section": [4, 0, 0]}, "counts of 1 and more"),
        ({"mrope_section": [5, -1]}, "counts of 1 and more"),
        ({"mrope_section": "1, 2, 1"}, "a list of integers"),
        ({"mrope_section": [1, 2, 1], "mrope_interleaved": True}, r"\[1, 2, 1\], which do not take turns"),
    ],
)
def test_sections_that_do_not_fit_are_named(settings: dict[str, Any], problem: str):
    with pytest.raises(CheckpointError, match=f"mrope_section.*{problem}"):
        read_rope(Fields({**CONFIG, "rope_parameters": settings}), 8, axes=True)


def test_a_model_has_the_axes_of_its_rotation():
    config = {
        "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 50,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 2, 1]}, **CONFIG,
    }  # fmt: skip
    blueprint = Blueprint.read(Fields(config), resolve_kernels(KernelContext("cpu", "float32")), torch.float32)
    assert blueprint.decoder(rotary=blueprint.rotary(axes=True)).position_axes == 3
    assert blueprint.decoder().position_axes == 1


class TestDynamic:
    """Dynamic NTK scaling with cached keys: one base for an engine's life.

    transformers picks the base by the longest sequence seen, so its logits equal ours where that is the length we
    fix: the longest served. By default that is the original length, within which nothing is stretched.
    """

    SETTINGS = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}  # noqa: RUF012
    ORIGINAL = 16

    def make(self, folder: Path) -> transformers.PreTrainedModel:
        fields = {"rope_parameters": dict(self.SETTINGS), "max_position_embeddings": self.ORIGINAL}
        return tiny.save("llama", folder, **fields)

    @pytest.mark.parametrize("served", [64, 40])
    def test_equal_at_the_longest_served(self, tmp_path: Path, served: int):
        theirs = self.make(tmp_path)
        ours = load(tmp_path, max_model_len=served)
        assert ours.max_positions == served
        tokens = tiny.prompt(served)
        harness = Harness(ours)
        parts = [harness.step({"row": tokens[start : start + 9]})["row"] for start in range(0, len(tokens), 9)]
        assert tiny.distance(torch.cat(parts), tiny.reference_logits(theirs, tokens)) < 1e-4

    def test_equal_within_the_original_length(self, tmp_path: Path):
        theirs = self.make(tmp_path)
        ours = load(tmp_path)
        assert ours.max_positions == self.ORIGINAL
        tokens = tiny.prompt(self.ORIGINAL)
        assert tiny.distance(Harness(ours).step({"row": tokens})["row"], tiny.reference_logits(theirs, tokens)) < 1e-4

    def test_longer_service_changes_short_prompts(self, tmp_path: Path):
        theirs = self.make(tmp_path)
        tokens = tiny.prompt(self.ORIGINAL)
        ours = Harness(load(tmp_path, max_model_len=64)).step({"row": tokens})["row"]
        assert tiny.distance(ours, tiny.reference_logits(theirs, tokens)) > 1e-3


@pytest.mark.parametrize(
    ("served", "length", "equal"), [(None, 43, False), (None, 80, True), (64, 43, True), (64, 64, True)]
)
def test_longrope_factors_follow_the_longest_served(tmp_path: Path, served: int | None, length: int, equal: bool):
    """transformers chooses them by the prompt's length, an engine once for all."""
    scaling = {**tiny.LONGROPE, "original_max_position_embeddings": 64}
    theirs = tiny.save("phi3-longrope", tmp_path, rope_parameters=scaling, original_max_position_embeddings=64)
    tokens = tiny.prompt(length)
    ours = Harness(load(tmp_path, max_model_len=served)).step({"row": tokens})["row"]
    assert (tiny.distance(ours, tiny.reference_logits(theirs, tokens)) < 1e-4) is equal


def test_tables_do_not_depend_on_their_company():
    frequencies = Rotary(RopeParameters("default", 100.0, 6, 64), 64).frequencies
    cos, sin = rope_tables(torch.tensor([0, 3, 200]), frequencies, 1.5)
    alone, _ = rope_tables(torch.tensor([200]), frequencies, 1.5)
    assert torch.equal(cos[2:], alone)
    assert cos[1, 0, 0] == torch.tensor(3.0).cos() * 1.5
    assert torch.equal(sin[:, :, :3], -sin[:, :, 3:])
