"""The text side of model folders with other vocabularies than tokenizer.json."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from penstock.config.errors import CheckpointError
from penstock.config.generation import GenerationRequest
from penstock.config.sampling import SamplingParams
from penstock.engine.frontend import Frontend
from penstock.engine.text_pipeline import TextPipeline
from penstock.engine.thread_client import ThreadClient
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from penstock.weights.readers.gguf_file import read_gguf_file
from tests.engine.support import null_engine


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


CHAT = ({"role": "user", "content": "hi"},)
USER = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


def chat_ids(text: TextPipeline, template: str, **asked: Any) -> list[int]:
    """Token ids of a chat, as every dialect gets them."""
    text = replace(text, template=ChatTemplate.from_config({"chat_template": template, "bos_token": "<s>"}))

    async def ids() -> tuple[int, ...]:
        client = ThreadClient(null_engine)
        await client.start()
        try:
            frontend = Frontend(client, text, served_name="m")
            return await frontend.tokenize(GenerationRequest("r", SamplingParams(), messages=CHAT, **asked))
        finally:
            await client.close()

    return list(asyncio.run(ids()))


@pytest.mark.parametrize(("written", "begins"), [("", 0), ("{{ bos_token }}", 1), ("<s>", 1), ("<s><s>", 2)])
@pytest.mark.parametrize("asked", [True, False, None])
def test_chats_of_gguf_models_begin_once_where_the_file_says_so(
    shared_data: Path, written: str, begins: int, asked: bool | None
) -> None:
    """As llama.cpp does, whatever the template writes and the client asks for."""
    metadata = read_gguf_file(shared_data / "tokenizers" / "ggml-vocab-llama-spm.gguf").metadata
    text = TextPipeline.load("penstock-concierge")
    asking, silent = (
        replace(text, tokenizer=Tokenizer.from_gguf({**metadata, "tokenizer.ggml.add_bos_token": flag}))
        for flag in (True, False)
    )
    said = chat_ids(silent, written + USER, add_special_tokens=asked)
    assert said[:begins] == [1] * begins and said.count(1) == begins
    assert chat_ids(asking, written + USER, add_special_tokens=asked) == [1, *said[begins:]]


@pytest.mark.parametrize("asked", [True, False, None])
def test_the_tokenizers_own_tokens_are_around_a_chat_where_asked_for(
    shared_data: Path, folder: Path, asked: bool | None
) -> None:
    backend = tokenizers.Tokenizer.from_file(str(shared_data / "models" / "penstock-concierge" / "tokenizer.json"))
    begin = backend.token_to_id("<|im_end|>")
    around = {"single": "<|im_end|> $A", "special_tokens": [("<|im_end|>", begin)]}
    backend.post_processor = tokenizers.processors.TemplateProcessing(**around)
    backend.save(str(folder / "tokenizer.json"))
    text = TextPipeline.load(str(folder))
    said = text.tokenizer.encode("[hi]", add_special_tokens=False)
    assert chat_ids(text, USER, add_special_tokens=asked) == ([begin, *said] if asked else said)
