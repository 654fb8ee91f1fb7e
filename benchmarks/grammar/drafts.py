"""What masks behind drafts cost: a document of the bundled model's tokens, followed with 0, 1, 4 and 8 right drafts.

    python -m benchmarks.grammar.drafts

Prints microseconds of a sequence's step for its masks, all made in turn: median and 90 of 100.
"""

from __future__ import annotations

import json
import statistics
from time import perf_counter

from llguidance import LLMatcher

from penstock.config.sampling import SamplingParams
from penstock.engine.build import grammar_vocabulary
from penstock.engine.text_pipeline import TextPipeline
from penstock.structured.grammar_compiler import compile_grammar, matcher_tokenizer
from penstock.structured.grammar_state import GrammarState
from penstock.structured.masks import Masks
from penstock.text.grammar.translate import translate

DOCUMENT = {"restaurant_name": "Da Mario", "party_size": 12, "outdoor_seating": True, "remarks": "a table by the sea"}
PROPERTIES = {"restaurant_name": "string", "party_size": "integer", "outdoor_seating": "boolean", "remarks": "string"}
DRAFTS, ROUNDS = (0, 1, 4, 8), 60


def seconds(matcher: LLMatcher, eos_ids: tuple[int, ...], words: int, tokens: list[int], drafts: int) -> list[float]:
    """Of the masks of each step of a document."""
    state = GrammarState(matcher.deep_copy(), None, SamplingParams(max_tokens=len(tokens), logprobs=0), eos_ids)
    taken = []
    for place in range(len(tokens) - max(DRAFTS)):
        ahead = {0: tuple(tokens[place : place + drafts])} if drafts else {}
        began = perf_counter()
        Masks(words, {0: state}, drafts=ahead, timed=True)
        taken.append(perf_counter() - began)
        state.replay(tokens[place : place + 1])
    return taken


def main() -> None:
    text = TextPipeline.load("penstock-concierge")
    size = text.tokenizer.vocab_size
    vocabulary = grammar_vocabulary(text, size)
    schema = {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in PROPERTIES.items()},
        "required": list(PROPERTIES),
        "additionalProperties": False,
    }
    source = translate("json_schema", json.dumps(schema))
    matcher = compile_grammar(matcher_tokenizer(vocabulary), source)
    tokens = text.tokenizer.encode(json.dumps(DOCUMENT, separators=(",", ":")))
    found: dict[int, list[float]] = {count: [] for count in DRAFTS}
    for _ in range(ROUNDS):  # interleaved: a machine's load falls on all alike
        for count in DRAFTS:
            found[count] += seconds(matcher, text.eos_ids, (size + 31) // 32, tokens, count)
    for count, taken in found.items():
        median, late = statistics.median(taken), sorted(taken)[len(taken) * 9 // 10]
        print(f"{count} drafts, vocabulary of {size}: {1e6 * median:.0f} µs, {1e6 * late:.0f} µs (90 of 100)")


if __name__ == "__main__":
    main()
