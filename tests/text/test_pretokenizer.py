"""Text is cut into words as each vocabulary was trained."""

from __future__ import annotations

import re

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from penstock.text.pretokenizer import PRE_TOKENIZERS
from penstock.text.vocabulary import cutting

NAMES = """
    a.x-4.0 afmoe bailingmoe bailingmoe2 bloom chameleon chatglm-bpe codeshell cohere2moe command-r dbrx
    deepseek-coder deepseek-llm deepseek-r1-qwen deepseek-v3 default exaone exaone-moe exaone4 f2llmv2 falcon
    falcon-h1 falcon3 gemma4 gigachat glm4 gpt-2 gpt-4o gpt3-finnish granite-docling granite-embed-multi-311m
    granite-embed-multi-97m grok-2 hunyuan hunyuan-dense hy_v4 jais jais-2 jina-de jina-es jina-v1-en jina-v2-code
    jina-v2-de jina-v2-es jina-v5-nano joyai-llm kanana2 kimi-k2 kormo laguna lfm2 llada-moe llama-bpe llama-v3 llama3
    llama4 megrez mellum mellum2 midm-2.0 minerva-7b minicpm5 minimax-m2 modern-bert mpt olmo phi-2 pixtral poro-chat
    qwen2 qwen35 refact roberta-bpe sarvam-moe seed-coder smaug-bpe smollm solar-open spark2_5 stablelm2 starcoder
    superbpe talkie tekken tiny_aya trillion ufakzeka viking youtu
"""
CHARACTERS = st.characters(exclude_categories=["Cs"])
TEXTS = st.text(CHARACTERS, max_size=40) | st.text(" \t\r\n.,'!?/sStTlLeEmM019é中あ한़A", max_size=40)


def words(cut: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    """The words of a text."""
    return [text[slice(*span)] for _, span in cut.pre_tokenize_str(text)]


def test_every_name_of_gguf_files_is_known() -> None:
    assert sorted(PRE_TOKENIZERS) == sorted(NAMES.split())


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@settings(max_examples=15, deadline=None)
@given(text=TEXTS)
def test_nothing_is_lost_between_words(name: str, text: str) -> None:
    assert "".join(words(cutting(PRE_TOKENIZERS[name]), text)) == text


@pytest.mark.parametrize("name", GGUF_PRE_TOKENIZER_SPLITS)
@settings(max_examples=25, deadline=None)
@given(text=TEXTS)
def test_words_are_those_of_transformers(name: str, text: str) -> None:
    split = pre_tokenizers.Split(tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), "isolated")
    assert words(cutting(PRE_TOKENIZERS[name]), text) == words(split, text)


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_words_are_those_of_the_librarys_own_cutters(text: str) -> None:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert words(cutting(PRE_TOKENIZERS["gpt-2"]), text) == words(plain, text)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    assert words(cutting(PRE_TOKENIZERS["smollm"]), text) == words(digits, text)


THREES = re.compile(r"\d{1,3}(?=(?:\d{3})*$)")


@pytest.mark.parametrize("name", ["superbpe", "afmoe"])
def test_digits_stay_together_in_threes_from_the_right(name: str) -> None:
    for size in range(1, 12):
        digits = "12345678901"[:size]
        assert words(cutting(PRE_TOKENIZERS[name]), digits) == THREES.findall(digits)


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("gpt-2", "I|'ll| take|  | 123|!!|\n\n"),
        ("llama-bpe", "I|'LL| take| | |123|45|!!\n\n|\tx"),
        ("qwen2", "I|'LL|1|2| (|x|)\n"),
        ("qwen35", "कि| e\u0301x"),
        ("gpt-4o", "camel|Case's|HTTPServer|123|4| .//"),
        ("tekken", "it|'s|1|2"),
        ("starcoder", "a|1|2| b"),
        ("deepseek-v3", "123|4|中文|!abc| ?|x"),
        ("deepseek-coder", "a| b|\n|1|中文"),
        ("falcon", "a|,| b|123|4"),
        ("bloom", "Hello| world|,| you| (|x|)"),
        ("viking", "abc|1|2| d"),
        ("bailingmoe", "I|'S| x|1|2| ++\n"),
        ("kimi-k2", "你好|world| ABCdef's|123|4"),
        ("chameleon", "<|sentinel|:|3|>|IMGIMGABZ|    |  |a|1|!"),
        ("youtu", "한국|a|…|b|中文"),
        ("jais-2", "a|" + " " * 4 + "|" + " " * 2 + "| b"),
        ("seed-coder", "x|!!|\n|y"),
        ("ufakzeka", "Ali|'nin"),
        ("laguna", "a|!|\n|b"),
        ("exaone-moe", "two words here|1|!\n"),
        ("minicpm5", "123|45| x"),
        ("spark2_5", "a|!|\n|\n|b"),
        ("gemma4", "any words|\n\n|1"),
    ],
)
def test_words(name: str, cut: str) -> None:
    assert "|".join(words(cutting(PRE_TOKENIZERS[name]), cut.replace("|", ""))) == cut
