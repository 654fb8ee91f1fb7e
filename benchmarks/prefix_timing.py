"""What one API key can find out of another's prompts: guesses by time to the first token and by cached_tokens.

In each trial the first key sends a prompt, by the toss of a coin the one that the second key then sends or another of
the same length. The second key guesses which it was. An area under the ROC curve of 0.5 is guessing, 1 is knowing.
Passes if no guess has more than 0.55 over all trials. A shorter run with --share-prefix-cache, which tells, shows
that the guesses are good ones.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence

import httpx

from benchmarks.report import arguments, report
from benchmarks.server_child import serve

KEYS = ("first-key", "second-key")
MOST = 0.55
WORDS = 160  # of a prompt
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


def prompt(draw: random.Random) -> str:
    """Words that nobody else will think of."""
    syllables = ["".join((draw.choice(_CONSONANTS), draw.choice(_VOWELS))) for _ in range(2 * WORDS)]
    return " ".join("".join(pair) for pair in zip(syllables[::2], syllables[1::2], strict=True))


def send(client: httpx.Client, key: str, text: str) -> tuple[float, int]:
    """Seconds to the first token, and the tokens said to be cached."""
    body = {"prompt": text, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}
    began, first, cached = time.perf_counter(), 0.0, 0
    with client.stream("POST", "/v1/completions", json=body, headers={"x-api-key": key}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or time.perf_counter() - began
            if usage := json.loads(line[6:]).get("usage"):
                cached = usage["prompt_tokens_details"]["cached_tokens"]
    return first, cached


def area(scores: Sequence[float], truth: Sequence[bool]) -> float:
    """Under the ROC curve: how often what was sent scores above what was not; ties count half."""
    ordered = sorted(zip(scores, truth, strict=True))
    rank, ranks, start = 0, 0.0, 0
    while start < len(ordered):
        end = start
        while end < len(ordered) and ordered[end][0] == ordered[start][0]:
            end += 1
        ranks += (start + 1 + end) / 2 * sum(sent for _, sent in ordered[start:end])
        rank += sum(sent for _, sent in ordered[start:end])
        start = end
    return (ranks - rank * (rank + 1) / 2) / (rank * (len(ordered) - rank))


def guess(trials: int, *flags: str) -> dict[str, float]:
    """What the second key makes of so many trials."""
    draw = random.Random(1)
    truth, faster, cached = [], [], []
    keys = [word for key in KEYS for word in ("--api-key", key)]
    with (
        serve((*keys, "--max-model-len", "1024", *flags)) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=60) as client,
    ):
        for key in KEYS * 4:
            send(client, key, prompt(draw))
        for _ in range(trials):
            asked, other, sent = prompt(draw), prompt(draw), draw.random() < 0.5
            send(client, KEYS[0], asked if sent else other)
            seconds, tokens = send(client, KEYS[1], asked)
            truth.append(sent)
            faster.append(-seconds)
            cached.append(float(tokens))
    return {
        "trials": trials,
        "auc_time": area(faster, truth),
        "auc_cached_tokens": area(cached, truth),
        "most_cached_tokens": max(cached),
        "median_ms": -1000 * sorted(faster)[trials // 2],
    }


def main() -> None:
    """Exit code 1 if a key finds out more than by guessing."""
    parser = arguments(__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    given = parser.parse_args()
    apart, shared = guess(given.trials), guess(max(20, given.trials // 10), "--share-prefix-cache")
    passed = max(apart["auc_time"], apart["auc_cached_tokens"]) <= MOST
    rows = [(name, apart[name], shared[name]) for name in apart]
    columns = ("what", "by default", "--share-prefix-cache")
    report("prefix_timing", given.results, {"default": apart, "shared": shared, "passed": passed}, columns, rows)
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
