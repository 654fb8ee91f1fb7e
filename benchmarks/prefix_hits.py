"""Prefix-cache hits as a share of the tokens that could have been hit, on a 5-shot and a multi-turn workload.

What could be hit is computed beside the engine, from the token sequences alone: for every prompt the longest prefix it
shares with anything computed for an earlier request (its prompt and its answer but the last token, whose keys
and values nobody computed), at most the prompt's length less one, because one token must be computed to go on.
The scheduler and cache are the engine's own; the null runner stands in for the model, the texts and tokens are real.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.replay import VOCABULARY, null_engine, request_of
from benchmarks.report import arguments, report
from penstock.engine.text_pipeline import TextPipeline

ANSWER_TOKENS = 32
MODEL = "penstock-concierge"

Trie = dict[int, "Trie"]


def shared_prefix(seen: Trie, tokens: tuple[int, ...]) -> int:
    """Tokens at the start of `tokens` that some sequence in the trie starts with."""
    node, length = seen, 0
    while length < len(tokens) and (child := node.get(tokens[length])) is not None:
        node, length = child, length + 1
    return length


def remember(seen: Trie, tokens: tuple[int, ...]) -> None:
    """Adds a sequence to the trie."""
    node = seen
    for token in tokens:
        node = node.setdefault(token, {})


def serve_rounds(rounds: list[list[tuple[int, ...]]], *, grow: bool, rows: int = 32) -> dict[str, Any]:
    """Serves the rounds one after the other; all requests of a round arrive at once.

    Args:
        rounds: per round, what each conversation says; with `grow` it is appended to all that was said before.

    Returns:
        Prompt tokens, possible and actual hits, and their share.
    """
    longest = max(sum(len(turns) + ANSWER_TOKENS for turns in said) for said in zip(*rounds, strict=True))
    whole = sum(len(tokens) + ANSWER_TOKENS for said in rounds for tokens in said)
    engine = null_engine(rows=rows, budget=2048, max_model_len=longest, num_blocks=2 * whole // 16 + 64)
    history: list[tuple[int, ...]] = [()] * len(rounds[0])
    seen: Trie = {}
    prompt_tokens = possible = 0
    for number, said in enumerate(rounds):
        prompts = [(history[i] if grow else ()) + tokens for i, tokens in enumerate(said)]
        for index, prompt in enumerate(prompts):
            possible += min(shared_prefix(seen, prompt), len(prompt) - 1)
            remember(seen, prompt)
            prompt_tokens += len(prompt)
            engine.add(request_of(f"{number}-{index}", prompt, ANSWER_TOKENS))
        answers: list[tuple[int, ...]] = [()] * len(prompts)
        while engine.has_work:
            for output in engine.step():
                answers[int(output.request_id.split("-")[1])] += output.tokens
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            history[index] = prompt + answer
            remember(seen, history[index][:-1])
    hits = engine.stats().prefix_hits
    return {"prompt_tokens": prompt_tokens, "possible": possible, "hits": hits, "share": hits / possible}


def _tokens(text: TextPipeline, content: str) -> tuple[int, ...]:
    return tuple(min(token, VOCABULARY - 1) for token in text.tokenizer.encode(content))


def five_shot(data: Path, text: TextPipeline, count: int) -> list[list[tuple[int, ...]]]:
    """GSM8K questions behind the same five solved ones, all at once."""
    lines = (data / "eval" / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    problems = [json.loads(line) for line in lines[: count + 5]]
    shots = "".join(f"Question: {p['question']}\nAnswer: {p['answer']}\n\n" for p in problems[:5])
    return [[_tokens(text, f"{shots}Question: {p['question']}\nAnswer:") for p in problems[5:]]]


def multi_turn(data: Path, text: TextPipeline, count: int, turns: int = 6) -> list[list[tuple[int, ...]]]:
    """What users of the SGD dialogues say, turn by turn, after a system message of their service's tools."""
    found: list[list[tuple[int, ...]]] = []
    for line in (data / "chat" / "sgd_dev_200.jsonl").read_text(encoding="utf-8").splitlines():
        dialogue = json.loads(line)
        said = [message["content"] for message in dialogue["messages"] if message["role"] == "user"]
        if len(said) >= turns and len(found) < count:
            tools = json.dumps(dialogue["tools"])
            first = f"<|im_start|>system\n{tools}<|im_end|>\n"
            texts = [f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n" for content in said[:turns]]
            found.append([_tokens(text, first + texts[0]), *(_tokens(text, content) for content in texts[1:])])
    random.Random(0).shuffle(found)
    return [list(round_) for round_ in zip(*found, strict=True)]


def main() -> None:
    """Measures both workloads."""
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=200, help="questions, and conversations, at most")
    given = parser.parse_args()
    text = TextPipeline.load(MODEL)
    figures = {
        "5-shot": serve_rounds(five_shot(given.data, text, given.requests), grow=False),
        "multi-turn": serve_rounds(multi_turn(given.data, text, given.requests), grow=True),
    }
    columns = ("workload", "prompt tokens", "possible hits", "hits", "share of the possible")
    rows = [(n, f["prompt_tokens"], f["possible"], f["hits"], f"{f['share']:.2%}") for n, f in figures.items()]
    report("prefix_hits", given.results, {"workloads": figures}, columns, rows)


if __name__ == "__main__":
    main()
