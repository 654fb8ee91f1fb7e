"""Models of Modelfiles: what they say is what an engine gets."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.errors import CheckpointError, ConfigError, TemplateError
from penstock.engine.text_pipeline import TextPipeline
from penstock.library.create import create
from penstock.library.describe import describe, modelfile_of
from penstock.library.make import add_path
from penstock.library.manifest import CONFIG, make_manifest
from penstock.library.modelfile import parse_modelfile
from penstock.library.names import RegistryName
from penstock.library.store import Store
from penstock.library.views import view
from penstock.quant.formats import decode_to_float32
from penstock.quant.tensor import StoredTensor
from penstock.weights.open import bundled_model_path, open_checkpoint
from penstock.weights.readers.safetensors import read_safetensors_file
from penstock.weights.writers.float_folder import write_float_folder
from penstock.weights.writers.merge import Merged, merge_adapters
from penstock.weights.writers.quantize import quantize_model

MADE = """
# a comment
FROM base
from_nothing_else = no
"""
WHOLE = '''# made by hand
FROM base:latest
PARAMETER temperature 0.5
parameter stop "<end>"
PARAMETER stop "two words"
PARAMETER num_ctx 128
SYSTEM """You are
a concierge."""
TEMPLATE """{{ if .System }}S:{{ .System }};{{ end }}{{ if .Prompt }}U:{{ .Prompt }};{{ end }}A:{{ .Response }};"""
LICENSE "Apache-2.0"
MESSAGE user Hi there
MESSAGE assistant """Hello.
Again."""
'''


def test_a_modelfile_is_read() -> None:
    made = parse_modelfile(WHOLE)
    assert made.base == "base:latest" and made.system == "You are\na concierge." and made.licenses == ["Apache-2.0"]
    assert made.params == {"temperature": 0.5, "stop": ["<end>", "two words"], "num_ctx": 128}
    assert list(made.messages) == [
        {"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello.\nAgain."},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (MADE, "line 4 of the Modelfile: 'from_nothing_else'"),
        ("FORM x", "FROM is meant"),
        ("SYSTEM x", "has one FROM"),
        ("FROM a\nFROM b", "this has 2"),
        ("FROM a\nPARAMETER temprature 1", "temperature is meant"),
        ("FROM a\nPARAMETER top_k 1.5", "an integer is needed"),
        ("FROM a\nPARAMETER temperature nan", "a number is needed"),
        ("FROM a\nMESSAGE robot hi", "no role"),
        ('FROM a\nSYSTEM """never', "never ends"),
    ],
)
def test_what_is_wrong_in_a_modelfile_is_told(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse_modelfile(text)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    for whole in (text, f"FROM a\n{text}"):
        try:
            parse_modelfile(whole)
        except ConfigError:
            continue


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_what_a_modelfile_says_is_what_an_engine_gets(store: Store, quantised: Path, tmp_path: Path, kind: str) -> None:
    add_path(store, quantised if kind == "gguf" else bundled_model_path(), RegistryName("base"))
    create(store, RegistryName("mine"), parse_modelfile(WHOLE), tmp_path)
    entry = store.find("mine")
    assert entry is not None and entry.options == {"max_model_len": 128}
    text = TextPipeline.load(str(entry.path))
    assert text.template is not None
    assert text.template.render([{"role": "user", "content": "Book."}]) == (
        "S:You are\na concierge.;U:Hi there;A:Hello.\nAgain.;U:Book.;A:"
    )
    params = text.sampling()
    assert (params.temperature, params.stop) == (0.5, ("<end>", "two words"))
    mine, weights = store.manifest(RegistryName("mine")), store.manifest(RegistryName("base"))
    assert mine is not None and weights is not None
    assert {part.digest for part in weights[0].blobs} <= {part.digest for part in mine[0].blobs}
    told = describe(store, "mine")
    assert (told.license, told.system) == ("Apache-2.0", "You are\na concierge.")
    again = parse_modelfile(modelfile_of(store, "mine"))
    first = parse_modelfile(WHOLE)
    assert (again.params, again.system, list(again.messages)) == (first.params, first.system, list(first.messages))
    assert (again.template, again.licenses) == (first.template, first.licenses)


def test_a_model_of_a_model_keeps_what_is_not_said_anew(store: Store, quantised: Path, tmp_path: Path) -> None:
    add_path(store, quantised, RegistryName("base"))
    create(store, RegistryName("mine"), parse_modelfile(WHOLE), tmp_path)
    create(store, RegistryName("other"), parse_modelfile("FROM mine\nPARAMETER top_k 3\nSYSTEM New."), tmp_path)
    texts = store.texts(RegistryName("other"))
    assert texts.params == {"temperature": 0.5, "stop": ["<end>", "two words"], "num_ctx": 128, "top_k": 3}
    assert texts.system == "New." and texts.licenses == ("Apache-2.0",) and texts.chosen


def test_templates_without_translation_are_refused_before_anything_is_made(
    store: Store, quantised: Path, tmp_path: Path
) -> None:
    add_path(store, quantised, RegistryName("base"))
    for template in ('{{ template "x" . }}', "{% for %}"):
        with pytest.raises(TemplateError):
            create(store, RegistryName("mine"), parse_modelfile(f"FROM base\nTEMPLATE {template}"), tmp_path)
    with pytest.raises(ConfigError, match="no model"):
        create(store, RegistryName("mine"), parse_modelfile("FROM nothing"), tmp_path)
    assert store.find("mine") is None


def test_weights_can_be_made_smaller_on_the_way(store: Store, tmp_path: Path) -> None:
    made = parse_modelfile(f"FROM {bundled_model_path()}\nSYSTEM Hi.")
    create(
        store, RegistryName("small"), made, tmp_path, quantize=lambda m, o: quantize_model(str(m), "q4_0", o) and None
    )
    told = describe(store, "small")
    assert (told.format, told.quantization) == ("gguf", "Q4_0") and told.system == "Hi."


@pytest.mark.parametrize("name", ["signoff", "captain", "caps"])
def test_an_adapter_is_merged(shared_data: Path, store: Store, tmp_path: Path, name: str) -> None:
    """LoRA, DoRA and rank-stabilised LoRA, against the formulas in double precision."""
    adapter = shared_data / "models" / f"penstock-concierge-lora-{name}"
    create(store, RegistryName(name), parse_modelfile(f"FROM {bundled_model_path()}\nADAPTER {adapter}"), tmp_path)
    entry = store.find(name)
    assert entry is not None
    before, after = open_checkpoint(bundled_model_path()), open_checkpoint(entry.path)
    parts = {k: _double(v) for k, v in read_safetensors_file(adapter / "adapter_model.safetensors").items()}
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    changed = 0
    for key in before.tensors:
        stem = f"base_model.model.{key.removesuffix('.weight')}"
        old, new = _double(before.read(key)), _double(after.read(key))
        if f"{stem}.lora_A.weight" not in parts:
            assert np.array_equal(old, new)
            continue
        wanted = old + scale * parts[f"{stem}.lora_B.weight"] @ parts[f"{stem}.lora_A.weight"]
        if config["use_dora"]:
            lengths = parts[f"{stem}.lora_magnitude_vector"]
            wanted *= lengths[:, None] / np.linalg.norm(wanted, axis=1, keepdims=True)
        assert np.allclose(new, wanted, rtol=2**-7, atol=1e-6) and not np.array_equal(old, new)
        changed += 1
    assert changed == len([k for k in parts if k.endswith("lora_A.weight")])


def _double(stored: StoredTensor) -> np.ndarray:
    return decode_to_float32(stored.info.format, stored.data).reshape(stored.info.shape).astype(np.float64)


def test_what_is_no_gguf_adapter_is_refused(store: Store, tmp_path: Path) -> None:
    (tmp_path / "lora.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(CheckpointError, match=r"lora\.gguf"):
        create(store, RegistryName("made"), parse_modelfile("FROM penstock-concierge\nADAPTER ./lora.gguf"), tmp_path)
    adapter = store.add(b"x", "application/vnd.ollama.image.adapter")
    pulled = make_manifest(store.add(b"{}", CONFIG), [adapter])
    with pytest.raises(CheckpointError, match=r"has a GGUF adapter.*with llama-export-lora"):
        view(tmp_path / "views", RegistryName("m"), pulled, store.blobs(pulled))


def test_an_adapter_of_another_model_is_refused(shared_data: Path, tmp_path: Path, quantised: Path) -> None:
    adapter = shared_data / "models" / "penstock-concierge-lora-caps"
    with pytest.raises(ConfigError, match="another"):
        merge_adapters(shared_data / "models/stories260K/hf", [Merged(adapter)], tmp_path / "x")
    with pytest.raises(ConfigError, match="float weights"):
        merge_adapters(quantised, [Merged(adapter)], tmp_path / "x")
    with pytest.raises(CheckpointError, match="is no adapter"):
        merge_adapters(bundled_model_path(), [Merged(tmp_path)], tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_gguf_file_becomes_a_folder_and_back(tmp_path: Path) -> None:
    """The weights of the folder that was written to GGUF and back are the same to the bit; so is its text side."""
    quantize_model("penstock-concierge", "bf16", tmp_path / "c.gguf")
    write_float_folder(open_checkpoint(tmp_path / "c.gguf"), "bf16", tmp_path / "c")
    old, new = open_checkpoint(bundled_model_path()), open_checkpoint(tmp_path / "c")
    tied = {"lm_head.weight"}
    assert old.tensors.keys() - tied == new.tensors.keys() - tied
    for name, info in new.tensors.items():
        if len(info.shape) > 1:  # norms are kept in float32 by GGUF
            assert np.array_equal(old.read(name).data, new.read(name).data), name
    question = [{"role": "user", "content": "Book a table for two."}]
    first, second = (TextPipeline.load(str(path)) for path in (bundled_model_path(), tmp_path / "c"))
    assert first.template is not None and second.template is not None
    text = first.template.render(question)
    assert second.template.render(question) == text
    assert second.tokenizer.encode(text) == first.tokenizer.encode(text)
