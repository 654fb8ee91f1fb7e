"""Names of model families stand in `models` alone: what holds for one family is an entry of a table there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from penstock.models.families import ARCHITECTURES
from penstock.models.gguf.configuration import BUILDERS
from tests.architecture.source import Module, modules, parse

CLASSES = re.compile(r"\w+(?:ForCausalLM|ForConditionalGeneration|ForSequenceClassification|LMHeadModel)")
NAMES = {*ARCHITECTURES, *BUILDERS, *(family.defaults for family in ARCHITECTURES.values())} - {""}
# Kinds of tokenizers and ways to write calls, which are known by the names of the families that first had them.
NAMED_AFTER = (
    "penstock.text.gguf_export", "penstock.text.gguf_fields", "penstock.text.gguf_vocab", "penstock.text.pretokenizer",
    "penstock.text.ranked", "penstock.text.sentencepiece_model", "penstock.text.tokenizer",
    "penstock.text.parsers.format",
)  # fmt: skip


def named(module: Module) -> Iterator[str]:
    """Every family that a module names outside of its documentation, as a sentence."""
    if module.part == "models" or module.within(*NAMED_AFTER):
        return
    texts = [node for node in ast.walk(module.tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    for text in texts:
        if text.value in NAMES or CLASSES.fullmatch(str(text.value)):
            yield f"{module.path}:{text.lineno} names the family {text.value!r}"


def test_families_are_named_in_models_alone() -> None:
    assert [sentence for module in modules() for sentence in named(module)] == []


def test_what_may_be_named_after_a_family_is_there() -> None:
    found = {module.name for module in modules()}
    assert [name for name in NAMED_AFTER if name not in found] == []


@pytest.mark.parametrize("text", ["x = arch == 'llama'", "X = ('qwen3moe',)", "n = {'NewForCausalLM': 1}"])
def test_the_rule_sees_families(text: str) -> None:
    assert len(list(named(parse(text, "penstock.weights.x")))) == 1
    assert list(named(parse(text, "penstock.models.gguf.x"))) == []


def test_the_rule_allows_documentation() -> None:
    assert list(named(parse('"""Rows of llama and gemma3 are changed."""', "penstock.weights.x"))) == []
