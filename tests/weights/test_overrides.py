"""A configuration with other values, applied before the family reads it and part of what is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from penstock import LLM
from penstock.config.errors import CheckpointError
from penstock.config.options import EngineOptions
from penstock.startup.kept_start import weights_identity
from tests.models import tiny

TEXT = "two three four five six"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.make("qwen3", dtype=torch.float32).save_pretrained(folder)
    words = ("<pad>", "one", "two", "three", "four", "five", "six")
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def embedded(folder: Path, **options: Any) -> torch.Tensor:
    with LLM(folder, threads=1, kv_blocks=32, kv_cache_dtype="float32", **options) as llm:
        return torch.tensor(llm.embed([TEXT])[0].values)


def expected(folder: Path, theta: float) -> torch.Tensor:
    """transformers' last state under another base of the rotations."""
    config = transformers.AutoConfig.from_pretrained(folder)
    config.rope_parameters = {**config.rope_parameters, "rope_theta": theta}
    model = transformers.AutoModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    with torch.no_grad():
        state = model(torch.tensor([[2, 3, 4, 5, 6]])).last_hidden_state[0, -1]
    return state / state.norm()


def test_the_family_reads_what_the_operator_says(folder: Path, tmp_path: Path) -> None:
    """Also from kept weights and a kept start, which are those of the same values."""
    cache = str(tmp_path)
    for _ in range(2):
        for theta in (100.0, 50_000.0):
            overrides: Any = {"rope_parameters": {"rope_theta": theta}}
            found = embedded(folder, hf_overrides=overrides, pack_cache=cache)
            torch.testing.assert_close(found, expected(folder, theta), rtol=1e-4, atol=1e-4)


def test_lengths_follow(folder: Path) -> None:
    overrides: Any = {"max_position_embeddings": 48}
    with LLM(folder, threads=1, kv_blocks=32, hf_overrides=overrides) as llm:
        assert llm.info.max_model_len == 48


def test_what_is_kept_is_of_the_overrides(folder: Path) -> None:
    spellings: list[Any] = [None, {"rope_theta": 1.0}, {"rope_theta": 2.0}]
    options = [EngineOptions(model=str(folder), hf_overrides=one) for one in spellings]
    assert len({weights_identity(one, folder) for one in options}) == 3


def test_impossible_values_are_the_familys_to_refuse(folder: Path) -> None:
    for overrides in ({"hidden_size": "wide"}, {"architectures": ["NoSuch"]}, {"num_attention_heads": 7}):
        given: Any = overrides
        with pytest.raises(CheckpointError):
            LLM(folder, hf_overrides=given)
