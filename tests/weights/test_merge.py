"""Adapters in a model's weights: transformers computes of them what peft computes of both."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.fuse import app
from penstock.config.environment import ModelPlaces
from penstock.config.errors import ConfigError
from penstock.library.create import create
from penstock.library.modelfile import parse_modelfile
from penstock.library.names import RegistryName
from penstock.library.store import Store
from penstock.weights.open import open_checkpoint
from penstock.weights.writers.float_folder import write_float_folder
from penstock.weights.writers.merge import Merged, merge_adapters
from tests.layers.test_peft import KINDS, PROMPT, Kind, write
from tests.models import tiny

MERGED = ("LoRA", "DoRA", "tables", "shared table", "head of a shared table", "DoRA of a scaled embedding")


@pytest.mark.parametrize("name", MERGED)
def test_it_says_what_peft_says(name: str, tmp_path: Path) -> None:
    expected = write(KINDS[name], tmp_path)
    assert merge_adapters(tmp_path / "model", [Merged(tmp_path / "adapter")], tmp_path / "out") > 0
    model = tiny.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert tiny.distance(tiny.reference_logits(model, PROMPT), expected) < 1e-4


def test_weights_that_are_stored_the_other_way_round(tmp_path: Path) -> None:
    """GPT-2's, among them square ones, whose shape does not tell."""
    expected = write(Kind("gpt2", "all-linear"), tmp_path)
    merge_adapters(tmp_path / "model", [Merged(tmp_path / "adapter")], tmp_path / "out")
    model = tiny.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert tiny.distance(tiny.reference_logits(model, PROMPT), expected) < 1e-4


def test_what_a_type_does_not_hold_is_not_written(tmp_path: Path) -> None:
    write(KINDS["LoRA"], tmp_path)
    write_float_folder(open_checkpoint(tmp_path / "model"), "f16", tmp_path / "float16")
    with pytest.raises(ConfigError, match="values that f16 does not hold"):
        merge_adapters(tmp_path / "float16", [Merged(tmp_path / "adapter", 1e30)], tmp_path / "out")


def test_several_count_by_their_weights(tmp_path: Path) -> None:
    expected = write(KINDS["DoRA"], tmp_path)
    halves = [Merged(tmp_path / "adapter", 0.75), Merged(tmp_path / "adapter", 0.25)]
    merge_adapters(tmp_path / "model", halves, tmp_path / "out")
    model = tiny.transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert tiny.distance(tiny.reference_logits(model, PROMPT), expected) < 1e-4


def test_an_activated_adapter_is_not_merged(tmp_path: Path) -> None:
    write(Kind("llama", ("q_proj",), {"alora_invocation_tokens": [5, 6]}), tmp_path)
    with pytest.raises(ConfigError, match="activated adapter"):
        merge_adapters(tmp_path / "model", [Merged(tmp_path / "adapter")], tmp_path / "out")


def fused(*words: str | Path) -> str:
    found = CliRunner().invoke(app, [str(word) for word in words])
    return found.output if found.exception is None else str(found.exception)


def test_the_command_on_floats_and_on_few_bits(shared_data: Path, tmp_path: Path) -> None:
    """What is quantised comes out in bfloat16, or as small again as is asked for."""
    from penstock.config.names import BUNDLED_MODEL
    from penstock.weights.writers.quantize import quantize_model

    adapter = f"{shared_data / 'models' / 'penstock-concierge-lora-caps'}:0.5"
    said = fused(BUNDLED_MODEL, "--adapter", adapter, "-o", tmp_path / "out")
    assert "matrices changed" in said
    small = quantize_model(BUNDLED_MODEL, "q8_0", tmp_path / "small.gguf").path
    assert "matrices changed" in fused(small, "--adapter", adapter, "-o", tmp_path / "floats")
    assert {info.format for info in open_checkpoint(tmp_path / "floats").tensors.values()} == {"bf16"}
    assert "then written as q8_0" in fused(small, "--adapter", adapter, "-o", tmp_path / "o.gguf", "-q", "q8_0")
    formats = {info.format for info in open_checkpoint(tmp_path / "o.gguf").tensors.values()}
    assert "q8_0" in formats
    assert "exists already" in fused(small, "--adapter", adapter, "-o", tmp_path / "out")
    assert "cannot be written" in fused(small, "--adapter", adapter, "-o", tmp_path / "small.gguf" / "x")
    assert "a folder is written" in fused(small, "--adapter", adapter, "-o", tmp_path / "x.gguf")


def test_a_modelfile_of_a_gguf_file_with_an_adapter(shared_data: Path, tmp_path: Path) -> None:
    from penstock.config.names import BUNDLED_MODEL
    from penstock.weights.writers.quantize import quantize_model

    small = quantize_model(BUNDLED_MODEL, "q8_0", tmp_path / "small.gguf").path
    adapter = shared_data / "models" / "penstock-concierge-lora-caps"
    places = ModelPlaces(tmp_path / "store", tmp_path / "hub", (tmp_path / "ollama",), endpoint="http://127.0.0.1:9")
    store = Store(places)
    create(store, RegistryName("made"), parse_modelfile(f"FROM {small}\nADAPTER {adapter}"), tmp_path)
    entry = store.find("made")
    assert entry is not None and open_checkpoint(entry.path).tensors
