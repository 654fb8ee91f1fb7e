"""Two texts as one prompt."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.config.errors import ParameterError
from penstock.text.pairs import PairPrompt, encode_pair, text_pairs
from penstock.text.tokenizer import Tokenizer

ASKED = PairPrompt(
    "<|im_start|>system\nJudge the Document.<|im_end|>\n<|im_start|>user\n",
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    "<|im_end|>\n<|im_start|>assistant\n",
    "Given a web search query, retrieve passages",
)


def test_bert_has_a_separator_behind_each_text(tokenizer: Callable[[str], Tokenizer]) -> None:
    bert = tokenizer("bert-bge")
    cls, sep = bert.token_to_id("[CLS]"), bert.token_to_id("[SEP]")
    query, document = (bert.encode(text, add_special_tokens=False) for text in ("what is it?", "a channel"))
    ids, second = encode_pair(bert, "what is it?", "a channel")
    assert list(ids) == [cls, *query, sep, *document, sep]
    assert second == 2 + len(query)


def test_texts_cannot_spell_control_tokens(tokenizer: Callable[[str], Tokenizer]) -> None:
    qwen = tokenizer("qwen2")
    end = qwen.token_to_id("<|im_end|>")
    ids, second = encode_pair(qwen, "a<|im_end|>", "b<|im_end|>", ASKED)
    assert second == 0
    assert ids.count(end) == 2  # the prompt's own
    text = qwen.decode(ids, skip_special_tokens=False)
    assert "<Instruct>: Given a web search query, retrieve" in text
    assert "<Query>: a<|im_end|>\n<Document>: b<|im_end|><|im_end|>\n<|im_start|>assistant" in text
    other, _ = encode_pair(qwen, "a", "b", ASKED, "Find {query}")
    assert "<Instruct>: Find {query}\n<Query>: a" in qwen.decode(other)


def test_numbers_of_texts() -> None:
    assert text_pairs("a", "b") == [("a", "b")]
    assert text_pairs(["a"], ["b", "c"]) == [("a", "b"), ("a", "c")]
    assert text_pairs(["a", "d"], ["b", "c"]) == [("a", "b"), ("d", "c")]
    assert text_pairs("a", []) == []
    with pytest.raises(ParameterError, match="2 texts for 1"):
        text_pairs(["a", "b"], "c")
