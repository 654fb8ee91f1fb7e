"""Tokens a second against transformers' `generate`, same weights, prompts and threads.

Penstock gets all requests at once; transformers gets them one by one, as its plain use is. Greedy, exactly
`max-tokens` new tokens each, float32. The two alternate; figures are medians over the rounds. Prefix caching is off,
so that later rounds compute as much as the first; loading is not counted; both are warmed up with one request.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.report import arguments, report
from penstock import LLM
from penstock.engine.text_pipeline import TextPipeline
from penstock.weights.open import bundled_model_path

MODEL = "penstock-concierge"


def prompts(data: Path, count: int) -> list[tuple[int, ...]]:
    """The first user turn of as many dialogues, in the model's own chat template."""
    text = TextPipeline.load(MODEL)
    assert text.template is not None
    found = []
    for line in (data / "chat" / "sgd_dev_200.jsonl").read_text(encoding="utf-8").splitlines()[:count]:
        first = next(m for m in json.loads(line)["messages"] if m["role"] == "user")
        rendered = text.template.render([{"role": "user", "content": first["content"]}])
        found.append(tuple(text.tokenizer.encode(rendered, add_special_tokens=False)))
    return found


class Transformers:
    """The peer: one request after the other."""

    def __init__(self, path: Path) -> None:
        loader: Any = AutoModelForCausalLM
        self._model = loader.from_pretrained(path, dtype=torch.float32)
        self._model.eval()
        self._model.generation_config.eos_token_id = None  # go on past the end, as ignore_eos does

    def generate(self, asked: Sequence[tuple[int, ...]], max_tokens: int) -> list[tuple[int, ...]]:
        """Greedy answers of exactly `max_tokens`."""
        answers = []
        for prompt in asked:
            ids = torch.tensor([prompt])
            made = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                repetition_penalty=1.0,
                min_new_tokens=max_tokens,
                max_new_tokens=max_tokens,
                pad_token_id=0,
            )
            answers.append(tuple(made[0, len(prompt) :].tolist()))
        return answers


def ours(llm: LLM, asked: Sequence[tuple[int, ...]], max_tokens: int) -> list[tuple[int, ...]]:
    """All requests in one call."""
    found = llm.generate(
        asked, temperature=0, max_tokens=max_tokens, ignore_eos=True, repetition_penalty=1.0, top_k=0, top_p=1.0
    )
    return [completion.outputs[0].token_ids for completion in found]


def agreement(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> dict[str, float]:
    """Share of requests with equal tokens, and of tokens before each request's first difference."""
    same = sum(list(a) == list(b) for a, b in zip(left, right, strict=True))
    before = 0
    for a, b in zip(left, right, strict=True):
        before += next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return {"requests": same / len(left), "tokens": before / sum(map(len, left))}


def main() -> None:
    """Measures both, alternating."""
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    asked = prompts(given.data, given.requests)
    peer = Transformers(bundled_model_path())
    rates: dict[str, list[float]] = {"penstock": [], "transformers": []}
    answers: dict[str, list[tuple[int, ...]]] = {}
    with LLM(MODEL, dtype="float32", threads=given.threads, enable_prefix_caching=False) as llm:
        ways: dict[str, Callable[[Sequence[tuple[int, ...]]], list[tuple[int, ...]]]] = {
            "penstock": lambda some: ours(llm, some, given.max_tokens),
            "transformers": lambda some: peer.generate(some, given.max_tokens),
        }
        for way in ways.values():
            way(asked[:1])  # first-use costs
        for _ in range(given.rounds):
            for name, way in ways.items():
                started = time.perf_counter()
                answers[name] = way(asked)
                rates[name].append(sum(map(len, answers[name])) / (time.perf_counter() - started))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    ratio = medians["penstock"] / medians["transformers"]
    agreed = agreement(answers["penstock"], answers["transformers"])
    figures = {"tokens_per_s": rates, "median": medians, "ratio": ratio, "agreement": agreed}
    setup = {"requests": given.requests, "max_tokens": given.max_tokens, "threads": given.threads}
    rows = [(name, medians[name], medians[name] / medians["transformers"]) for name in medians]
    report("transformers_peer", given.results, {**setup, **figures}, ("engine", "output tokens/s", "ratio"), rows)
    print(
        f"\nequal answers: {agreed['requests']:.1%} of requests, {agreed['tokens']:.1%} of tokens before a difference"
    )


if __name__ == "__main__":
    main()
