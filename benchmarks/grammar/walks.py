"""Answers drawn at random from what masks allow, and documents read along them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from penstock.config.sampling import SamplingParams
from penstock.structured.grammar_compiler import Vocabulary, compile_grammar, compute_mask, matcher_tokenizer
from penstock.structured.grammar_state import GrammarState
from penstock.text.grammar.translate import translate
from penstock.text.tokenizer import Tokenizer
from penstock.weights.readers.gguf_file import read_gguf_file

_CLOSERS = (b'"', b"}", b"]", b'"}', b'"]', b"}}", b"]}", b",", b'",', b":", b'":', b"@", b"a", b".", b")")


class DeadEnd(Exception):
    """An answer that cannot go on, or does not end."""


@dataclass(frozen=True)
class Grammars:
    """A tokenizer and its matchers."""

    tokenizer: Tokenizer
    matching: LLTokenizer
    ends: tuple[int, ...]
    closers: tuple[int, ...]

    @classmethod
    def load(cls, vocabulary: Path) -> Grammars:
        """Reads a GGUF file of a vocabulary."""
        tokenizer = Tokenizer.from_gguf(read_gguf_file(vocabulary).metadata)
        encode = partial(tokenizer.encode, add_special_tokens=False, parse_special=False)
        eos = tuple(sorted(tokenizer.end_ids, key=lambda token: token != tokenizer.eos_id))
        words = Vocabulary(tokenizer.vocab_size, tokenizer.token_bytes, encode, tokenizer.special_ids, eos)
        ids = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
        closers = tuple(ids[text] for text in _CLOSERS if text in ids)
        return cls(tokenizer, matcher_tokenizer(words), eos, closers)

    def compile(self, schema: Any) -> LLMatcher:
        """A schema's matcher; raises RequestError where it cannot be met."""
        return compile_grammar(self.matching, translate("json_schema", json.dumps(schema)))

    def accepts(self, matcher: LLMatcher, document: Any) -> bool:
        """Whether a document, written compactly in the tokenizer's own tokens, fits, by the masks."""
        text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
        ids = self.tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        if b"".join(map(self.tokenizer.token_bytes, ids)) != text.encode():  # it puts a space before a text
            ids = self.matching.greedy_tokenize(text)
        own = matcher.deep_copy()
        row = np.zeros((self.matching.vocab_size + 31) // 32, np.uint32)
        for token in ids:
            if not own.consume_token(token):
                return False
        compute_mask(own, row)
        return bool(own.is_accepting()) and bool(row[self.ends[0] // 32] >> (self.ends[0] % 32) & 1)

    def walk(self, matcher: LLMatcher, seed: int, *, free: int = 60, most: int = 4000) -> str:
        """A text drawn from the masks as the engine draws. After `free` tokens it makes for the end where it may.

        Raises:
            DeadEnd: a mask allowed nothing, or no end was in sight after `most` tokens.
        """
        chance = random.Random(seed)
        state = GrammarState(matcher.deep_copy(), None, SamplingParams(), self.ends)
        row = np.zeros((self.matching.vocab_size + 31) // 32, np.uint32)
        tokens: list[int] = []
        while not tokens or tokens[-1] not in self.ends:
            source, unready = state.mask_source()
            if source is not None:
                compute_mask(source, row)
            if unready:
                state.finish_mask(row)
            token = self._draw(row, chance, len(tokens) > free)
            if token is None:
                raise DeadEnd("nothing is allowed")
            if len(tokens) > most:
                raise DeadEnd("no end in sight")
            tokens += (token, *state.accept([token]))
        return b"".join(map(self.tokenizer.token_bytes, tokens[:-1])).decode("utf-8")

    def _draw(self, row: Any, chance: random.Random, ending: bool) -> int | None:
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        if not len(allowed):
            return None
        if ending:
            for token in (self.ends[0], *chance.sample(self.closers, len(self.closers))):
                if row[token // 32] >> (token % 32) & 1:
                    return token
        return int(allowed[chance.randrange(len(allowed))])


def validator(schema: Any) -> Callable[[str], bool]:
    """Whether a text is a document that fits, formats included."""
    kind = jsonschema.Draft202012Validator
    checker = kind(schema, format_checker=kind.FORMAT_CHECKER)

    def fits(text: str) -> bool:
        return bool(checker.is_valid(json.loads(text)))

    return fits


def tokenizers(data: Path, names: Sequence[str]) -> dict[str, Grammars]:
    """The named vocabularies of the shared data."""
    return {name: Grammars.load(data / "tokenizers" / f"ggml-vocab-{name}.gguf") for name in names}
