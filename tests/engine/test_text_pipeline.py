"""The text side of model folders with other vocabularies than tokenizer.json."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pytest
import tokenizers

from penstock.config.errors import CheckpointError
from penstock.engine.text_pipeline import TextPipeline


@pytest.fixture
def folder(shared_data: Path, tmp_path: Path) -> Path:
    """A model folder without vocabulary and template."""
    source = shared_data / "models" / "penstock-concierge"
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, tmp_path / name)
    return tmp_path


def test_a_folder_with_tekken_json_speaks_mistrals_format(folder: Path) -> None:
    vocab = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode()} for i in range(256)]
    sizes = {"default_vocab_size": 276, "default_num_special_tokens": 20}
    tekken = {"config": {"pattern": r"\w+|\W", "version": "v7", **sizes}, "vocab": vocab}
    (folder / "tekken.json").write_text(json.dumps(tekken))
    text = TextPipeline.load(str(folder))
    assert text.template is not None
    rendered = text.template.render([{"role": "system", "content": "S"}, {"role": "user", "content": "hé"}])
    assert rendered == "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]hé[/INST]"
    ids = text.tokenizer.encode(rendered, add_special_tokens=False)
    assert ids == [1, 17, 20 + ord("S"), 18, 3, *(20 + byte for byte in "hé".encode()), 4]
    assert 2 in text.eos_ids
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "own"}))
    again = TextPipeline.load(str(folder))
    assert again.template is not None
    assert again.template.render([]) == "own"


def test_a_folder_without_vocabulary_names_what_is_looked_for(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*tekken\.json.*tokenizer\.model"):
        TextPipeline.load(str(folder))


def test_code_in_a_folder_is_never_imported(folder: Path) -> None:
    (folder / "qwen.tiktoken").write_bytes(b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256)))
    (folder / "tokenization_qwen.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    config = {
        "tokenizer_class": "QWenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", None]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    text = TextPipeline.load(str(folder))
    assert text.tokenizer.encode("a<|im_end|>") == [97, 258]
    assert not (folder / "ran").exists()


def test_a_vocabulary_larger_than_the_models_is_refused_with_both_numbers(folder: Path, shared_data: Path) -> None:
    file = shared_data / "models" / "penstock-concierge" / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.save(str(folder / "tokenizer.json"))
    assert TextPipeline.load(str(folder)).vocab_size == 4096
    assert TextPipeline.load(str(folder)).tokenizer.rows("many") == 4096
    assert TextPipeline.load(str(folder)).tokenizer.rows(5000) == 5000
    backend.add_special_tokens(["<beyond>"])
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"vocab_size is 4096.*ids up to 4096 \('<beyond>'\).*at least 4097"):
        TextPipeline.load(str(folder))
