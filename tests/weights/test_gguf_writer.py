"""GGUF files written from folders and from other GGUF files: read by the gguf package and by ourselves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from penstock.config.errors import CheckpointError, ConfigError
from penstock.config.options import EngineOptions
from penstock.engine.text_pipeline import TextPipeline
from penstock.evaluate.scoring import Scorer, Window
from penstock.kernels.cpu import native
from penstock.quant.formats import decode_to_float32
from penstock.text.tokenizer import Tokenizer
from penstock.weights.open import bundled_model_path, open_checkpoint
from penstock.weights.writers.gguf import TensorToWrite, write_gguf
from penstock.weights.writers.gguf_model import plan_gguf, source_of
from penstock.weights.writers.quantize import quantize_model
from tests.models.tiny import save

TEXTS = (
    "Book a table for 2 at 19:30, please!",
    "  naïve café — 12345 …\n\n\tif x != y:",
    "<|im_start|>user\nhi<|im_end|>",
)
needs_native = pytest.mark.skipif(not native.available(), reason="the native library is not built")


def values(model: Path | str) -> dict[str, np.ndarray]:
    checkpoint = open_checkpoint(model)
    return {
        name: decode_to_float32(info.format, checkpoint.read(name).data).reshape(info.shape)
        for name, info in checkpoint.tensors.items()
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model in f32."""
    path = tmp_path_factory.mktemp("written") / "concierge.gguf"
    quantize_model("penstock-concierge", "f32", path)
    return path


def test_float_file_equals_its_source(written: Path) -> None:
    source, found = values(bundled_model_path()), values(written)
    source.pop("lm_head.weight", None)
    assert source.keys() == found.keys()
    assert all(np.array_equal(found[name], array) for name, array in source.items())
    config, original = open_checkpoint(written).config, open_checkpoint("penstock-concierge").config
    for key in (
        "architectures",
        "hidden_size",
        "num_hidden_layers",
        "head_dim",
        "rope_theta",
        "rms_norm_eps",
        "eos_token_id",
    ):
        assert config[key] == original[key], key


def test_text_side_is_the_same(written: Path) -> None:
    ours, original = TextPipeline.load(str(written)), TextPipeline.load("penstock-concierge")
    for text in TEXTS:
        assert ours.tokenizer.encode(text) == original.tokenizer.encode(text)
    assert ours.eos_ids == original.eos_ids
    assert ours.defaults == original.defaults
    messages = [{"role": "user", "content": "Hello"}]
    assert ours.template is not None and original.template is not None
    assert ours.template.render(messages) == original.template.render(messages)


@needs_native
@pytest.mark.parametrize("recipe", ["q4_k_m", "q8_0", "iq4_xs", "mxfp4", "tq2_0"])
def test_the_gguf_package_reads_what_we_write(tmp_path: Path, recipe: str) -> None:
    path = tmp_path / "m.gguf"
    report = quantize_model("penstock-concierge", recipe, path)
    reader = gguf.GGUFReader(path)
    assert report.nbytes == path.stat().st_size
    assert reader.fields["general.architecture"].contents() == "qwen3"
    assert reader.fields["general.quantization_version"].contents() == 2
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == 4096
    assert "im_start" in reader.fields["tokenizer.chat_template"].contents()
    theirs = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    ours = values(path)
    assert len(theirs) == len(ours)
    assert np.array_equal(theirs["token_embd.weight"], ours["model.embed_tokens.weight"])
    assert np.array_equal(theirs["blk.3.ffn_down.weight"], ours["model.layers.3.mlp.down_proj.weight"])


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biases": {},
    "llama-linear": {},
    "llama-llama3": {
        "head_dim": 12,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral-sliding": {},
    "qwen2": {},
    "qwen3-biases": {},
    "qwen3-moe": {"mlp_only_layers": []},
    "mixtral": {},
    "gemma3": {
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": 10,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_the_same_from_gguf(family: str, tmp_path: Path, shared_data: Path) -> None:
    folder, path = tmp_path / "hf", tmp_path / "m.gguf"
    save(family, folder, vocab_size=512, **FAMILIES[family])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shared_data / "models/stories260K/hf" / name, folder / name)
    quantize_model(str(folder), "f32", path)
    window = Window(tuple(np.random.default_rng(0).integers(3, 512, 40).tolist()), 1)
    logits = []
    for model in (folder, path):
        scorer = Scorer(EngineOptions(model=str(model), dtype="float32", isa="auto"), 48)
        logits.append(np.concatenate([part.numpy().copy() for part, _ in scorer.logits(window)]))
        scorer.close()
    assert np.abs(logits[0] - logits[1]).max() <= 2e-4 * np.abs(logits[0]).max()
    assert gguf.GGUFReader(path).fields["general.file_type"].contents() == 0


@pytest.mark.parametrize(
    ("family", "named"), [("qwen3-moe", "mlp_only_layers"), ("gemma3", "query_pre_attn_scalar 17")]
)
def test_what_gguf_cannot_express_is_refused(family: str, named: str, tmp_path: Path) -> None:
    save(family, tmp_path / "hf")
    with pytest.raises(CheckpointError, match=f"cannot express .*{named}"):
        quantize_model(str(tmp_path / "hf"), "f32", tmp_path / "m.gguf")


def test_sentencepiece_vocabulary_round_trips(tmp_path: Path, shared_data: Path) -> None:
    source = shared_data / "models/stories260K/hf"
    quantize_model(str(source), "q8_0", tmp_path / "m.gguf")
    ours = Tokenizer.from_gguf(open_checkpoint(tmp_path / "m.gguf").metadata)
    original = Tokenizer.from_folder(source)
    for text in ("Once upon a time, there was a cat.", "  two  spaces\nnew line é 12", "", "ünïcode 日本"):
        assert ours.encode(text) == original.encode(text)
        assert ours.decode(ours.encode(text)) == original.decode(original.encode(text))


def test_from_gguf_to_gguf(written: Path, tmp_path: Path) -> None:
    """Metadata is copied as it is, and the result is that of the folder."""
    direct, twice = tmp_path / "direct.gguf", tmp_path / "twice.gguf"
    quantize_model("penstock-concierge", "q8_0", direct)
    quantize_model(str(written), "q8_0", twice)
    one, two = gguf.GGUFReader(direct), gguf.GGUFReader(twice)
    assert [(t.name, t.tensor_type, bytes(t.data)) for t in one.tensors] == [
        (t.name, t.tensor_type, bytes(t.data)) for t in two.tensors
    ]
    for key, field in one.fields.items():
        if not key.startswith("GGUF."):
            assert two.fields[key].types == field.types and two.fields[key].contents() == field.contents(), key


def test_rows_that_do_not_divide_are_told(tmp_path: Path, shared_data: Path) -> None:
    told: list[str] = []
    report = quantize_model(str(shared_data / "models/stories260K/hf"), "q4_k_m", tmp_path / "m.gguf", tell=told.append)
    assert "blk.0.attn_q.weight: rows of 64 are not whole q4_k blocks; written as q5_0" in told
    assert "blk.0.ffn_down.weight: rows of 172 are not whole q4_k blocks; written as f16" in told
    assert set(report.formats) == {"q8_0", "q5_0", "f16", "f32"}
    assert tuple(told) == report.remarks


def test_refusals(written: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--to is 'q9'; allowed: f32, f16"):
        quantize_model("penstock-concierge", "q9", tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match=r"name ends in \.gguf"):
        quantize_model("penstock-concierge", "q8_0", tmp_path / "folder")
    with pytest.raises(ConfigError, match="exists already; choose another --output, or replace it with --force"):
        quantize_model("penstock-concierge", "q8_0", written)
    with pytest.raises(ConfigError, match="where the model itself lies"):
        quantize_model(str(written), "q8_0", written, force=True)
    small = tmp_path / "q8.gguf"
    quantize_model("penstock-concierge", "q8_0", small)
    with pytest.raises(ConfigError, match="is stored as q8_0; only f32, f16, bf16, f64 can be quantised"):
        quantize_model(str(small), "q4_0", tmp_path / "again.gguf")
    with pytest.raises(ConfigError, match="is written from a Hugging Face folder"):
        quantize_model(str(written), "int8", tmp_path / "folder")
    with pytest.raises(CheckpointError, match="there is no model at"):
        quantize_model(str(tmp_path / "nothing"), "q8_0", tmp_path / "m.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q8.gguf"]


def test_a_damaged_weight_leaves_nothing_behind(written: Path, tmp_path: Path) -> None:
    source = source_of(open_checkpoint(written))
    plan = plan_gguf(source, "q8_0")
    path = tmp_path / "m.gguf"
    path.write_bytes(b"before")

    def broken() -> Any:
        raise ConfigError("tensor x: a weight is infinite or not a number")
        yield

    tensors = [*plan.tensors[:3], TensorToWrite("x", (32,), "f32", broken)]
    with pytest.raises(ConfigError, match="tensor x"):
        write_gguf(path, plan.metadata, tensors)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
