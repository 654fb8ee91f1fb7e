"""LLM on models that embed, classify and rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from penstock import LLM, AsyncLLM
from penstock.config.errors import CheckpointError, ParameterError, RequestError
from tests.models import encoders
from tests.server.test_embeddings import LABELS, words

TEXTS = ["one two three", "two", "seven six five four three two one " * 5]
OPTIONS: dict[str, Any] = {"kv_blocks": 64, "threads": 1}


def saved(folder: Path, head: str = "Model", **fields: Any) -> tuple[Any, tokenizers.Tokenizer]:
    tokenizer = words(template=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return encoders.save("bert", folder, head, **fields), tokenizer


def test_embed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.async_llm.IN_FLIGHT", 2)
    model, tokenizer = saved(tmp_path)
    with LLM(tmp_path, **OPTIONS) as llm:
        results = llm.embed(TEXTS)
        for text, result in zip(TEXTS, results, strict=True):
            ids = tokenizer.encode(text).ids
            theirs = encoders.reference(model, "bert", ids).mean(0)
            assert torch.cosine_similarity(torch.tensor(result.values), theirs, dim=0) >= 0.9999
            assert result.prompt_tokens == len(ids)
            assert llm.embed(text)[0].values == llm.embed(ids)[0].values == result.values
        (short,) = llm.embed(TEXTS[0], dimensions=5, normalize=False)
        assert len(short.values) == 5
        assert llm.embed([]) == []
        cosines = llm.score(TEXTS[0], TEXTS)
        assert cosines[0] == pytest.approx(1.0, abs=1e-5)
        assert cosines[1] == pytest.approx(float(torch.tensor(results[0].values) @ torch.tensor(results[1].values)))
        assert llm.rerank(TEXTS[0], TEXTS, top_n=1) == [(0, cosines[0])]
        with pytest.raises(RequestError, match="cannot generate"):
            llm.generate("one")
        with pytest.raises(ParameterError, match="dimensions is 99"):
            llm.embed("one", dimensions=99)
        with pytest.raises(RequestError, match="The text has 129 tokens; at most 128"):
            llm.embed(["one", "one " * 127])


def test_prompts(tmp_path: Path) -> None:
    """As sentence-transformers puts them before a text."""
    saved(tmp_path)
    known = {"prompts": {"query": "two three ", "document": ""}, "default_prompt_name": "document"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(known))
    with LLM(tmp_path, **OPTIONS) as llm:
        (expected,) = llm.embed("two three one")
        assert llm.embed("one", prompt_name="query")[0].values == expected.values
        assert llm.embed("one", prompt="two three ")[0].values == expected.values
        assert llm.embed("one", prompt_name="document")[0].values == llm.embed("one")[0].values != expected.values
        with pytest.raises(ParameterError, match=r'prompt_name is "title"; allowed: this model.s: query, document'):
            llm.embed("one", prompt_name="title")
        with pytest.raises(ParameterError, match="only without prompt"):
            llm.embed("one", prompt_name="query", prompt="")
        with pytest.raises(ParameterError, match="not with token ids"):
            llm.embed([1, 2], prompt_name="query")
    known["default_prompt_name"] = "query"
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(known))
    with LLM(tmp_path, **OPTIONS) as llm:
        assert llm.embed("one")[0].values == expected.values
        assert llm.embed("one", prompt="")[0].values != expected.values
        assert llm.score("one", "one") == pytest.approx([1.0], abs=1e-5)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"prompts": ["query"]}, "prompts is .*an object of strings"),
        ({"prompts": {"query": 5}}, "prompts is .*an object of strings"),
        ({"prompts": {"query": "x"}, "default_prompt_name": "title"}, "default_prompt_name is .*allowed: query"),
    ],
)
def test_damaged_prompts(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=named):
        LLM(tmp_path, **OPTIONS)


def test_classify_and_score(tmp_path: Path) -> None:
    model, tokenizer = saved(tmp_path, "ForSequenceClassification", num_labels=3, id2label=LABELS)
    with LLM(tmp_path, **OPTIONS) as llm:
        assert llm.labels == tuple(LABELS.values())
        for text, result in zip(TEXTS, llm.classify(TEXTS), strict=True):
            with torch.no_grad():
                theirs = model(**encoders.inputs("bert", tokenizer.encode(text).ids)).logits[0].softmax(0)
            torch.testing.assert_close(torch.tensor(result.values), theirs, rtol=1e-4, atol=1e-5)
        with pytest.raises(RequestError, match="tells 3 labels apart"):
            llm.score("one", "two")


@pytest.mark.asyncio
async def test_rerank(tmp_path: Path) -> None:
    model, tokenizer = saved(tmp_path, "ForSequenceClassification", num_labels=1)
    async with AsyncLLM(tmp_path, **OPTIONS) as llm:
        scores = await llm.score(TEXTS[0], TEXTS)
        assert await llm.score([TEXTS[0]] * 3, TEXTS) == scores
        for text, score in zip(TEXTS, scores, strict=True):
            pair = tokenizer.encode(TEXTS[0], text)
            with torch.no_grad():
                logit = model(**encoders.inputs("bert", pair.ids, pair.type_ids.index(1))).logits[0, 0]
            assert score == pytest.approx(float(logit.sigmoid()), rel=1e-4, abs=1e-6)
        with pytest.raises(ParameterError, match="2 texts for 3"):
            await llm.score(TEXTS[:2], TEXTS)
