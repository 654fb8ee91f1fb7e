"""Tokens a second under grammars against free decoding: one engine, one batch, in turns, medians.

`text` is one long string, of which nothing can be forced: what masks cost. `record` has names of usual length with
values between them. `form` is mostly names, so that at least 60% of the text is forced.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.report import arguments, report
from penstock.config.constraint import Grammar, GrammarKind
from penstock.config.environment import settle_torch
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.engine.loop import Engine
from penstock.engine.text_pipeline import TextPipeline
from penstock.text.grammar.translate import translate

COLUMNS = ("batch", "work", "tokens/s", "over free", "steps", "forced of the tokens")


def record(names: list[str], value: dict[str, Any]) -> dict[str, Any]:
    """An object that has all of these properties, and no other."""
    properties = dict.fromkeys(names, value)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


SCHEMAS: dict[str, Any] = {
    "free": None,
    "text": record(["text"], {"type": "string", "minLength": 5000}),
    "record": record([f"field_{i}" for i in range(12)], {"type": "string", "minLength": 30, "maxLength": 60}),
    "form": record([f"the_name_of_property_number_{i}" for i in range(14)], {"enum": ["alpha", "beta"]}),
}


def requests(text: TextPipeline, name: str, batch: int, tokens: int) -> list[EngineRequest]:
    """A batch of answers that are only as long as `tokens`, or end with their document."""
    schema = SCHEMAS[name]
    grammar = None if schema is None else Grammar(GrammarKind.LARK, translate("json_schema", json.dumps(schema)))
    how = SamplingParams(max_tokens=tokens, ignore_eos=grammar is None)
    prompt = tuple(text.tokenizer.encode("<|im_start|>user\nTell me more.<|im_end|>\n<|im_start|>assistant\n"))
    stop_ids = () if grammar is None else text.eos_ids
    return [EngineRequest(f"{name}{i}", prompt, how, stop_ids, seed=i, grammar=grammar) for i in range(batch)]


def run(engine: Engine, asked: list[EngineRequest]) -> dict[str, float]:
    """Runs a batch from its first step to its last."""
    for request in asked:
        engine.add(request)
    while engine.structured.pending:
        engine.structured.wait(0.01)
        for compiled, error in engine.structured.ready():
            assert error is None
            engine.admit(compiled)
    steps, tokens, sampled = engine.stats().steps, 0, 0
    began = perf_counter()
    while engine.has_work:
        outputs = engine.step()
        tokens += sum(len(output.tokens) for output in outputs)
        sampled += len(outputs)
    seconds = perf_counter() - began
    steps = engine.stats().steps - steps
    return {"tokens_per_s": tokens / seconds, "steps": steps, "forced": 1 - sampled / tokens}


def measure(engine: Engine, text: TextPipeline, batch: int, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """All kinds of work in turns; medians by kind."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SCHEMAS}
    for turn in range(rounds + 1):
        for name, results in found.items():
            result = run(engine, requests(text, name, batch, tokens))
            if turn:  # the first is for warmth
                results.append(result)
    figures: dict[str, dict[str, float]] = {}
    for name, results in found.items():
        ratios = [r["tokens_per_s"] / f["tokens_per_s"] for r, f in zip(results, found["free"], strict=True)]
        figures[name] = {key: median(result[key] for result in results) for key in results[0]}
        figures[name]["over_free"] = median(ratios)
    return figures


def main() -> None:
    """Measures every batch size."""
    parser = arguments(__doc__)
    parser.add_argument("--model", default="penstock-concierge")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="grammar_speed", help="of the results' file")
    given = parser.parse_args()
    settle_torch()
    from penstock.engine.build import build_engine

    options = EngineOptions(
        model=given.model,
        max_model_len=2048,
        max_num_seqs=max(given.batch),
        threads=given.threads,
        enable_prefix_caching=False,
    )
    engine, _ = build_engine(options)
    text = TextPipeline.load(given.model)
    work = {batch: measure(engine, text, batch, given.tokens, given.rounds) for batch in given.batch}
    rows = [
        (batch, n, f["tokens_per_s"], f["over_free"], f["steps"], f"{f['forced']:.0%}")
        for batch, figures in work.items()
        for n, f in figures.items()
    ]
    setting = {"model": Path(given.model).name, "tokens": given.tokens, "rounds": given.rounds}
    report(given.name, given.results, {**setting, "work": work}, COLUMNS, rows)
    engine.close()


if __name__ == "__main__":
    main()
